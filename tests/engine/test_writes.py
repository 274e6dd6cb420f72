"""What the user writes after prepare is trained on, on every rank, as in plain PyTorch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.units.param_unit import UnitState
from rayzero.errors import UnsupportedError
from rayzero.testing import Transport, run_ranks

from .models import Net, averaged, fit, prepared_copy, relative_difference, same_bits, seeded, tight, token_loss, tokens

Write = Callable[[nn.Module], Any]
STEPS = 3


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


# ---- ways to write ----------------------------------------------------------------------------------------------


def _mul(model: nn.Module) -> None:
    with torch.no_grad():
        model.layers[1].up.weight.mul_(2)


def _assign(model: nn.Module) -> None:
    with torch.no_grad():
        model.layers[1].up.weight[:2] = 1.0


def _clamp_all(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.05, 0.05)


def _numpy(model: nn.Module) -> None:
    model.layers[0].down.bias.detach().numpy()[3:] = 0.25


def _held(model: nn.Module) -> None:
    model.held = model.layers[2].up.bias.data  # stays over steps, as the plain model's alias does
    model.held.add_(1)


def _set_data(model: nn.Module) -> None:
    weight = model.layers[1].up.weight
    weight.data = torch.ones_like(weight) * 0.01


def _foreach(model: nn.Module) -> None:
    for layer in model.layers:
        torch._foreach_add_([p.detach() for p in layer.parameters()], 0.5)


def _from_another(model: nn.Module) -> None:
    with torch.no_grad():
        model.layers[0].up.weight.copy_(model.layers[2].up.weight)
        model.layers[2].up.weight.lerp_(model.layers[1].up.weight, 0.5)


WRITES: dict[str, Write] = {
    "mul_": _mul,
    "w[:2] =": _assign,
    "data.clamp_ of all": _clamp_all,
    "numpy": _numpy,
    "a held alias": _held,
    "data =": _set_data,
    "foreach": _foreach,
    "from another unit": _from_another,
}
CONFIGS = {
    "all up": lambda model, **settings: ZeroConfig(**settings),
    "tight": lambda model, **settings: tight(model, prefetch_buffer_size=1, **settings),
}


def plain_run(base: nn.Module, write: Write, world_size: int, when: str) -> dict[str, Tensor]:
    """Plain PyTorch on all ranks' batches, writing in every step at ``when``."""
    model = copy.deepcopy(base)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        if when == "before forward":
            write(model)
        replicas = []
        for rank in range(world_size):
            optimizer.zero_grad()
            token_loss(model, tokens(step, rank)).backward()
            replicas.append([p.grad for p in model.parameters()])
        for param, grad in zip(model.parameters(), averaged(replicas), strict=True):
            param.grad = grad
        if when != "before forward":
            write(model)
        optimizer.step()
    return model.state_dict()


def zero_run(
    base: nn.Module,
    write: Write,
    world_size: int,
    when: str,
    config: ZeroConfig,
    transport: Transport = "inproc",
) -> list[dict[str, Tensor]]:
    """The same under RayZero; each rank's ``full_state_dict``."""

    def loop(context: RankContext) -> dict[str, Tensor]:
        model, optimizer = prepared_copy(base, sgd, config)
        for step in range(STEPS):
            if when == "before forward":
                write(model)
            token_loss(model, tokens(step, context.rank)).backward()
            if when == "between clip and step":
                optimizer.clip_grad_norm_(1e9)
            if when != "before forward":
                write(model)
            optimizer.step()
            optimizer.zero_grad()
        return rayzero.full_state_dict(model)

    return run_ranks(loop, world_size, 2, transport)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", WRITES)
def test_every_way_to_write_is_right_on_one_rank(name: str, config: str) -> None:
    base = seeded(Net)
    (state,) = zero_run(base, WRITES[name], 1, "before forward", CONFIGS[config](base))
    assert same_bits(state, plain_run(base, WRITES[name], 1, "before forward"))


def test_masters_of_a_bf16_model_keep_their_precision_where_nothing_was_written() -> None:
    base = seeded(Net)

    def loop(context: RankContext) -> list[dict[str, Tensor]]:
        config = tight(base, precision="bf16", prefetch_buffer_size=1)
        model, optimizer = prepared_copy(base, sgd, config)
        fit(model, optimizer, [0], context.rank)
        states = [rayzero.full_state_dict(model)]
        with torch.no_grad():
            model.layers[1].up.weight[:2] = 0.3
        states.append(rayzero.full_state_dict(model))  # of this rank alone
        optimizer.step()
        optimizer.zero_grad()
        states.append(rayzero.full_state_dict(model))  # of the owners
        return states

    for before, local, after in run_ranks(loop, 2, 2):
        assert same_bits(local, after)
        assert not torch.equal(before["layers.1.up.weight"], before["layers.1.up.weight"].bfloat16().float())
        before["layers.1.up.weight"][:2] = torch.tensor(0.3).bfloat16().float()
        assert same_bits(after, before)


def test_weights_swapped_for_an_evaluation_and_back_were_not_written() -> None:
    """Every rank or one alone may do it, nobody waits, and bf16 masters are not rounded."""
    base = seeded(Net)
    config = tight(base, precision="bf16", prefetch_buffer_size=1)

    def loop(context: RankContext, swap: bool) -> dict[str, Tensor]:
        model, optimizer = prepared_copy(base, sgd, config)
        writes: list[str] = []
        optimizer.engine.cache.observers.append(lambda verb, unit: writes.append(unit) if verb == "write" else None)
        for step in range(2):
            token_loss(model, tokens(step, context.rank)).backward()
            if swap and context.rank == 0:
                with torch.no_grad():
                    backup = [param.clone() for param in model.parameters()]
                    for param in model.parameters():
                        param.fill_(0.1)
                    model.eval()(tokens(9)[0])
                    for param, value in zip(model.parameters(), backup, strict=True):
                        param.copy_(value)
            optimizer.step()
            optimizer.zero_grad()
        assert writes == []
        return rayzero.full_state_dict(model)

    swapped, untouched = (run_ranks(lambda ctx, s=s: loop(ctx, s), 2, 2) for s in (True, False))
    assert same_bits(swapped[0], untouched[0])


# ---- inside forward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_a_write_between_forward_and_backward_is_torchs_error(config: str, alone: RankContext) -> None:
    model = seeded(Net)
    model, optimizer = rayzero.prepare(model, sgd(model.parameters()), CONFIGS[config](model))
    loss = token_loss(model, tokens(0))
    _mul(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    token_loss(model, tokens(0)).backward()
    optimizer.step()


# ---- full_parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_full_parameters_can_be_modified_in_every_way(world_size: int) -> None:
    base = seeded(Net)

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.layers[0].up.weight.mul_(0.5)
        model.layers[1].up.weight.data.clamp_(-0.01, 0.01)
        model.layers[2].up.bias.detach().numpy()[:] = 0.125

    def write(model: nn.Module) -> None:
        try:
            full = rayzero.full_parameters(model, modify=True)
            full.__enter__()
        except UnsupportedError:
            change(model)
            return
        change(model)
        full.__exit__(None, None, None)

    expected = plain_run(base, write, world_size, "before step")
    for state in zero_run(base, write, world_size, "before step", ZeroConfig()):
        assert relative_difference(state, expected) <= 1e-6


# ---- load_state_dict --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_plain_state_dict_is_loaded_without_rounding(precision: str, world_size: int) -> None:
    base, other = seeded(Net), seeded(Net, 7)
    config = tight(base, precision=precision, prefetch_buffer_size=1)

    def loop(context: RankContext) -> list[dict[str, Tensor]]:
        model, optimizer = prepared_copy(base, sgd, config)
        fit(model, optimizer, [0], context.rank)
        assert not model.load_state_dict(other.state_dict()).missing_keys
        ups = sum(unit.state is UnitState.UNSHARDED for unit in optimizer.engine.units)
        assert ups < len(optimizer.engine.units)  # loading brings nothing up
        loaded = [rayzero.full_state_dict(model), model.state_dict()]
        token_loss(model, tokens(1, context.rank)).backward()
        optimizer.step()
        return [*loaded, rayzero.full_state_dict(model)]

    for full, local, trained in run_ranks(loop, world_size, 2):
        assert same_bits(full, other.state_dict())
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        assert same_bits(local, {name: value.to(dtype) for name, value in other.state_dict().items()})
        assert not same_bits(trained, full)


def test_some_entries_can_be_loaded_and_the_others_stay() -> None:
    base, other = seeded(Net), seeded(Net, 7)

    def loop(context: RankContext) -> dict[str, Tensor]:
        model, optimizer = prepared_copy(base, sgd, tight(base, prefetch_buffer_size=1))
        _mul(model)  # not with the owners yet
        result = model.load_state_dict({"layers.1.up.bias": other.layers[1].up.bias.detach()}, strict=False)
        assert "layers.1.up.weight" in result.missing_keys
        model.layers[2].load_state_dict(other.layers[2].state_dict())
        with pytest.raises(RuntimeError, match="Unexpected key"):
            model.load_state_dict({**base.state_dict(), "extra": torch.ones(1)} | other.norm.state_dict(prefix="norm."))
        optimizer.step()
        optimizer.zero_grad()
        return rayzero.full_state_dict(model)

    plain = copy.deepcopy(base)
    plain.norm.load_state_dict(other.norm.state_dict())
    for state in run_ranks(loop, 2, 2):
        assert same_bits(state, plain.state_dict())


def test_a_graph_from_before_a_load_is_torchs_error(alone: RankContext) -> None:
    model = seeded(Net)
    model, _ = rayzero.prepare(model, sgd(model.parameters()), tight(model, prefetch_buffer_size=1))
    loss = token_loss(model, tokens(0))
    model.load_state_dict(seeded(Net, 7).state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_view_held_over_a_load_shows_what_was_loaded(alone: RankContext) -> None:
    model, other = seeded(Net), seeded(Net, 7)
    model, _ = rayzero.prepare(model, sgd(model.parameters()), tight(model, prefetch_buffer_size=1))
    view = model.layers[1].up.weight.detach()[3:5]
    model.load_state_dict(other.state_dict())
    assert torch.equal(view, other.layers[1].up.weight[3:5])


def test_loading_by_assignment_is_refused(alone: RankContext) -> None:
    model, _ = prepared_copy(seeded(Net), sgd)
    with pytest.raises(UnsupportedError, match=r"load_state_dict\(assign=True\) after rayzero\.prepare"):
        model.load_state_dict(seeded(Net, 7).state_dict(), assign=True)
    assert same_bits(rayzero.full_state_dict(model), seeded(Net).state_dict())


def test_buffers_are_loaded_beside_parameters(alone: RankContext) -> None:
    base, other = (seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), seed) for seed in (0, 1))
    other(torch.randn(8, 4))
    model, _ = rayzero.prepare(base, sgd(base.parameters()))
    model.load_state_dict(other.state_dict())
    assert same_bits(rayzero.full_state_dict(model), other.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    assert same_bits(rayzero.full_state_dict(model), other.state_dict())


def test_a_checkpoint_has_what_was_written(tmp_path: Any) -> None:
    base = seeded(Net)

    def loop(context: RankContext) -> dict[str, Tensor]:
        model, optimizer = prepared_copy(base, sgd, tight(base, prefetch_buffer_size=1))
        if context.resume is None:
            _clamp_all(model)
            rayzero.save_checkpoint(optimizer, tmp_path / "step", {})
        return rayzero.full_state_dict(model)

    written = run_ranks(loop, 2, 2)
    assert torch.equal(written[0]["layers.0.up.weight"], base.layers[0].up.weight.detach().clamp(-0.05, 0.05))
    assert same_bits(run_ranks(loop, 1, 1, resume=tmp_path / "step")[0], written[1])
