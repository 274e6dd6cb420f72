"""The same promises on a CUDA device: bits of plain torch, bounded memory, side streams."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.memory.pool import buffer_bytes

from .models import Net, same_bits, seeded, tight, token_loss, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def batch(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(step)
    return inputs.cuda(), targets.cuda()


def oracle(model: nn.Module, steps: int) -> dict[str, Tensor]:
    """Forward and backward on the GPU, AdamW on CPU masters."""
    masters = {name: p.detach().cpu().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3, fused=True)
    for step in range(steps):
        token_loss(model, batch(step)).backward()
        for name, param in model.named_parameters():
            masters[name].grad = param.grad.cpu()
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


CONFIGS = {
    "all up": lambda model: ZeroConfig(),
    "one ahead": lambda model: tight(model, prefetch_buffer_size=1),
    "none ahead": lambda model: tight(model, async_prefetch=False),
    "unpinned": lambda model: tight(model, pin_cpu_memory=False),
    "sums on the device": lambda model: ZeroConfig(offload_grads=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_plain_torch(name: str, alone: RankContext) -> None:
    base = seeded(lambda: Net(num_layers=6, width=256)).cuda()
    expected = oracle(copy.deepcopy(base), steps=5)
    adamw = torch.optim.AdamW(base.parameters(), lr=1e-3)
    model, optimizer = rayzero.prepare(base, adamw, CONFIGS[name](base))
    for step in range(5):
        token_loss(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_bits(rayzero.full_state_dict(model), expected)


@pytest.mark.parametrize("method", ["int8", "quantization", "lossless"])
def test_frozen_parameters_are_those_that_their_owner_keeps(method: str, alone: RankContext) -> None:
    base = seeded(lambda: Net(num_layers=6, width=256)).cuda()
    for name, param in base.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    trained = [param for param in base.parameters() if param.requires_grad]
    config = tight(base, cpu_compression=method)
    model, optimizer = rayzero.prepare(base, torch.optim.AdamW(trained, lr=1e-3), config)
    kept = rayzero.full_state_dict(model)
    for step in range(3):
        token_loss(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            if not param.requires_grad:
                assert torch.equal(param.detach().cpu(), kept[name]), name


def test_gathered_parameters_stay_within_the_window(alone: RankContext) -> None:
    base = seeded(lambda: Net(num_layers=8, width=256)).cuda()
    model, optimizer = rayzero.prepare(
        base, torch.optim.SGD(base.parameters(), lr=0.1), tight(base, prefetch_buffer_size=1)
    )
    for step in range(3):
        token_loss(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    units = optimizer.engine.units
    largest = max(buffer_bytes(unit.size_bytes) for unit in units if unit.name != "root")
    root = sum(buffer_bytes(unit.size_bytes) for unit in units if unit.name == "root")
    assert optimizer.engine.residency.budget.peak == 2 * largest + root


def test_compute_on_a_users_stream_sees_complete_weights(alone: RankContext) -> None:
    base = seeded(lambda: Net(num_layers=6, width=256)).cuda()
    expected = copy.deepcopy(base)(batch(0)[0])
    model, _ = rayzero.prepare(base, torch.optim.SGD(base.parameters(), lr=0.1), tight(base, prefetch_buffer_size=2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        output = model(batch(0)[0])
    stream.synchronize()
    assert torch.equal(output, expected)


@pytest.mark.usefixtures("full_depth")
def test_a_manager_frees_device_memory_and_says_what_it_measured(alone: RankContext) -> None:
    base = seeded(lambda: Net(num_layers=4, width=512)).cuda()
    with rayzero.OffloadManager(None, None, base) as manager:
        for step in range(3):
            inputs, targets = batch(step)
            loss = nn.functional.cross_entropy(manager.forward_pass(inputs).flatten(0, 1), targets.flatten())
            manager.backward_pass(loss)
            manager.optimizer_step()
        with torch.no_grad():
            manager.forward_pass(batch(0)[0])
        found = manager.get_performance_stats()
        assert found.memory.device_used == torch.cuda.memory_allocated()
        assert found.memory.device_peak >= found.memory.gathered_peak
        assert found.to_device.copies.bytes >= 3 * found.memory.parameters * 4
        assert found.to_device.copies.timed_bytes == 0, "the device makes the last copy: the host has no time for it"
        assert found.to_host.copies.timed_bytes == found.to_host.copies.bytes > 0
        held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        freed = manager.force_memory_optimization()
        assert freed["buffers"].bytes >= found.memory.gathered_peak
        assert held - torch.cuda.memory_allocated() >= found.memory.gathered_peak
        assert freed["device"].bytes == reserved - torch.cuda.memory_reserved()
        assert manager.adapt_performance().link_to_device > 1e9
