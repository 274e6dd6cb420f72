"""A parameter is waited for where it is first used, by whatever uses it."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from rayzero import HybridDeviceOptimizer
from rayzero.errors import UnsupportedError
from rayzero.hybrid.gate import AwayParameter
from tests.hybrid.models import backward, equal, net, train, weights
from tests.support.leftovers import threads, threads_left
from tests.support.modes import Functions, Operations
from tests.support.watched_lane import WatchedLane

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


class Held:
    """A lane whose copies back to the device wait for ``let_go()``."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.lane = WatchedLane(self._hold)

    def _hold(self, direction: str, label: str) -> None:
        assert direction == "out" or self.gone.wait(60)

    def let_go(self) -> None:
        self.gone.set()


def away(model: nn.Module) -> list[bool]:
    return [isinstance(param, AwayParameter) for param in model.parameters()]


@pytest.fixture
def held():
    held = Held()
    yield held
    held.let_go()
    held.lane.close()


def stepped(model: nn.Module, held: Held, **options) -> HybridDeviceOptimizer:
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, lane=held.lane, bucket_bytes=4096, **ADAMW, **options)
    backward(model, 0)
    hybrid.step()
    return hybrid


@pytest.mark.promise("hidden", "hybrid")
def test_step_returns_while_parameters_are_away_and_metadata_waits_for_nothing(held):
    model = net()
    before = weights(model)
    hybrid = stepped(model, held)
    assert all(away(model))
    weight = model[0].weight
    found = (weight.shape, weight.dtype, weight.requires_grad, weight.grad is None, weight.numel())
    assert found == ((67, 13), torch.float32, True, False, 67 * 13)
    hybrid.zero_grad()
    assert all(away(model))
    held.let_go()
    assert not equal(weights(model), before)
    assert not any(away(model))
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


USES = {
    "forward": lambda model: model(torch.ones(1, 13)),
    "function": lambda model: torch.cat([param.flatten() for param in model.parameters()]),
    "list": lambda model: torch._foreach_norm(list(model.parameters())),
    "data": lambda model: [param.data for param in model.parameters()],
    "state_dict": lambda model: model.state_dict(),
    "in place": lambda model: [nn.init.zeros_(param) for param in model.parameters()],
    "deepcopy": lambda model: copy.deepcopy(model),
    "pickle": lambda model: pickle.dumps(model),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_waits(use, held):
    model = net()
    stepped(model, held)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (USES[use](model), done.set()))
    thread.start()
    assert not done.wait(0.2)  # it cannot be done before the copies are let go
    held.let_go()
    thread.join(60)
    assert done.is_set()
    assert not any(away(model))


def test_buckets_are_updated_in_the_order_of_first_use():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))

        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    model = Backwards()
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, bucket_bytes=13 * 13 * 4 + 1024, **ADAMW)
    assert len(hybrid._runs) == 4
    for step in range(2):
        backward(model, step)  # the second one uses what the first step sent back
        hybrid.step()
    assert hybrid._order == [3, 2, 1, 0]
    hybrid.close()


def test_attention_that_uses_a_child_without_calling_it():
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(13, 16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            x = self.inner(x)[None]
            return self.attention(x, x, x)[0]

    model, twin = Attends(), Attends()
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, bucket_bytes=1024, **ADAMW)
    hybrid.attach(model)
    want = train(twin, torch.optim.AdamW(twin.parameters(), fused=True, **ADAMW))
    assert equal(train(model, hybrid), want)


def test_attached_modules_wait_in_their_pre_hooks_before_their_forward_runs(held):
    model = net()
    hybrid = stepped(model, held)
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(type(module.weight)))
    handles = hybrid.attach(model)
    model[0].register_forward_pre_hook(lambda module, args: seen.append(type(module.weight)))
    held.let_go()
    model(torch.ones(1, 13))
    assert seen == [hybrid._gate._class, nn.Parameter]
    for handle in handles:
        handle.remove()


def test_compiled_modules_wait_as_a_whole():
    model, twin = net(), net()
    compiled = torch.compile(model, backend="eager")
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, bucket_bytes=4096, **ADAMW)
    assert len(hybrid.attach(compiled)) == 1
    want = train(twin, torch.optim.AdamW(twin.parameters(), fused=True, **ADAMW))
    got = train(compiled, hybrid)
    assert equal(got, want)


def test_a_copy_that_fails_is_raised_at_the_first_use():
    def fail(direction: str, label: str) -> None:
        if direction == "in":
            raise OSError("the link is down")

    model = net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, lane=WatchedLane(fail), **ADAMW)
    backward(model, 0)
    hybrid.step()
    for _ in range(2):
        with pytest.raises(OSError, match="the link is down"):
            model(torch.ones(1, 13))
    with pytest.raises(OSError, match="the link is down"):
        hybrid.step()


def test_without_the_gate_step_waits():
    model = net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 0.5, return_in_forward=False, **ADAMW)
    backward(model, 0)
    hybrid.step()
    assert not any(away(model))


def test_a_dropped_optimizer_leaves_no_thread_and_no_parameter_away():
    model = net()
    before = threads()
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, **ADAMW)
    train(model, hybrid, 2)
    assert not equal(weights(model), weights(net()))
    gone = weakref.ref(hybrid)
    del hybrid
    gc.collect()
    assert gone() is None
    assert threads_left(before) == []
    backward(model, 0)  # hooks that are left do nothing


def test_close_ends_threads_and_state_can_still_be_read():
    model = net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, **ADAMW)
    train(model, hybrid, 2)
    hybrid.close()
    hybrid.close()
    assert not any(thread.is_alive() for thread in worker_threads(hybrid))
    assert len(hybrid.state_dict()["state"]) == len(list(model.parameters()))


def worker_threads(hybrid: HybridDeviceOptimizer) -> set[threading.Thread]:
    return set(hybrid._sides.host._worker._threads)  # type: ignore[attr-defined]


def test_copies_are_refused_by_name():
    hybrid = HybridDeviceOptimizer(net().parameters(), **ADAMW)
    for act in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="load this one's state_dict"):
            act(hybrid)


@pytest.mark.parametrize("seed", range(6))
def test_random_delays_anywhere_change_no_bit(seed):
    """Copies and the computation are delayed at random; uses happen in random order, by forward or by hand."""
    draws = random.Random(seed)

    def delay(direction: str, label: str) -> None:
        time.sleep(draws.choice([0, 0, 1e-4, 2e-3]))

    model, twin = net(), net()
    mode = ("send", "step", "nothing")[seed % 3]
    lane = WatchedLane(delay)
    hybrid = HybridDeviceOptimizer(
        model.parameters(), draws.choice([0.4, 1.0]), lane=lane, in_backward=mode, bucket_bytes=2048, **ADAMW
    )
    reference = torch.optim.AdamW(twin.parameters(), fused=True, **ADAMW)
    for step in range(25):
        for each, optimizer in ((model, hybrid), (twin, reference)):
            optimizer.zero_grad()
            backward(each, step)
            optimizer.step()
        pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
        for ours, theirs in draws.sample(pairs, draws.randint(0, 3)):
            assert torch.equal(ours.detach(), theirs.detach())
    assert equal(weights(model), weights(twin))
    hybrid.close()
    lane.close()


@pytest.mark.parametrize("options", [{}, {"overlap_cpu_optimizer_d2h_h2d": False}, {"in_backward": "step"}])
def test_the_users_modes_see_no_operation_of_the_gate_or_of_gradients_that_leave(options):
    seen = []
    for make in (torch.optim.AdamW, partial(HybridDeviceOptimizer, offload_fraction=1.0, bucket_bytes=4096, **options)):
        model = net()
        optimizer = make(model.parameters(), **ADAMW)
        for step in range(2):  # the second forward opens the gate
            optimizer.zero_grad()
            with Operations() as operations, Functions() as functions:
                backward(model, step)
            optimizer.step()
            seen.append((operations.seen, functions.seen))
    assert seen[:2] == seen[2:]
