"""What fails on the way is raised as its own error at the next wait, and leaves a state that goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.units.param_unit import UnitState
from rayzero.errors import StoreClosedError, TransferError
from rayzero.protocol.messages import COMPUTE, Contribution
from rayzero.store.inprocess import LocalConnection, LocalOwners
from rayzero.store.rank.rank_store import RankStore

from .models import Net, plain_state, prepared_copy, same_bits, seeded, tight, token_loss, tokens


class FaultyStore(RankStore):
    """An in-process store whose chosen fetches and pushes fail, or are held until they are let go."""

    fail_fetch: Callable[[int, int], bool] = staticmethod(lambda unit, version: False)
    fail_push: Callable[[Contribution], bool] = staticmethod(lambda contribution: False)
    fail_published: Callable[[int, int], bool] = staticmethod(lambda unit, version: False)
    hold: Callable[[int], bool] = staticmethod(lambda unit: False)

    def published(self, unit: int, version: int) -> Future[int]:
        return failed("news") if self.fail_published(unit, version) else super().published(unit, version)

    def fetch(self, unit: int, version: int, kind: str, out: Tensor) -> Future[None]:
        if kind == COMPUTE and self.fail_fetch(unit, version):
            return failed("fetch")
        if kind == COMPUTE and self.hold(unit):
            return Future()
        return super().fetch(unit, version, kind, out)

    def push(self, contribution: Contribution, grads: Tensor) -> Future[None]:
        if self.fail_push(contribution):
            return failed("push")
        return super().push(contribution, grads)


def failed(what: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(TransferError(f"{what} failed as planned"))
    return future


def once(condition: Callable[..., bool]) -> Callable[..., bool]:
    """True the first time the condition holds, never again."""
    left = [True]

    def first(*args: Any) -> bool:
        if left and condition(*args):
            left.clear()
            return True
        return False

    return first


@pytest.fixture
def store() -> Any:
    owners = LocalOwners(2)
    store = FaultyStore(LocalConnection(0, owners))
    with running_in(RankContext(connect=lambda _: store)):
        yield store
    owners.close()


def prepared(base: nn.Module, config: ZeroConfig) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    return prepared_copy(base, torch.optim.SGD, config, lr=0.1)


def step_once(model: nn.Module, optimizer: rayzero.ZeroOptimizer, step: int) -> None:
    optimizer.zero_grad()
    token_loss(model, tokens(step)).backward()
    optimizer.step()


@pytest.mark.parametrize("ahead", [True, False], ids=["prefetched", "on demand"])
@pytest.mark.parametrize("unit", [0, 1, 2, 3])
def test_a_failed_fetch_is_raised_where_the_unit_is_needed_and_the_next_try_is_right(
    unit: int, ahead: bool, store: FaultyStore
) -> None:
    base = seeded(Net)
    model, optimizer = prepared(base, tight(base, prefetch_buffer_size=1, async_prefetch=ahead))
    step_once(model, optimizer, 0)
    store.fail_fetch = once(lambda index, version: index == unit and version == 2)
    step_once(model, optimizer, 1)
    with pytest.raises(TransferError, match="fetch failed as planned"):
        token_loss(model, tokens(2)).backward()
    optimizer.zero_grad()
    step_once(model, optimizer, 2)
    assert same_bits(rayzero.full_state_dict(model), plain_state(base, 3))


@pytest.mark.parametrize("let_go", [False, True], ids=["still held", "let go"])
@pytest.mark.parametrize(("debug", "what"), [("0", "published"), ("1", "fetch")])
@pytest.mark.parametrize("unit", [0, 1, 3])
def test_pinned_units_that_a_step_could_not_refresh_are_refreshed_before_anything_computes_with_them(
    unit: int, debug: str, what: str, let_go: bool, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYZERO_DEBUG", debug)  # 0: units are the owners' own memory
    base = seeded(Net)
    model, optimizer = prepared(base, ZeroConfig(min_unit_bytes=1))
    views = [param.detach() for param in model.parameters()]  # what a logger holds
    step_once(model, optimizer, 0)
    setattr(store, f"fail_{what}", once(lambda index, version: index == unit and version == 2))
    with pytest.raises(TransferError, match="failed as planned"):
        step_once(model, optimizer, 1)
    if let_go:
        views.clear()
    step_once(model, optimizer, 2)
    right = plain_state(base, 3)
    assert same_bits(rayzero.full_state_dict(model), right)
    held = dict(zip((name for name, _ in base.named_parameters()), views, strict=False))
    assert all(torch.equal(view, right[name]) for name, view in held.items())


def test_a_failed_push_is_raised_at_the_step_and_a_discard_starts_over(store: FaultyStore) -> None:
    base = seeded(Net)
    model, optimizer = prepared(base, ZeroConfig())
    store.fail_push = once(lambda contribution: contribution.unit == 1)

    def go_on() -> None:
        token_loss(model, tokens(0)).backward()
        optimizer.step()

    with pytest.raises(TransferError, match="push failed as planned"):
        go_on()
    optimizer.zero_grad()
    go_on()
    assert same_bits(rayzero.full_state_dict(model), plain_state(base, 1))


def test_a_unit_that_is_needed_takes_the_budget_of_prefetches_that_have_not_started(store: FaultyStore) -> None:
    base = seeded(Net)
    model, optimizer = prepared(base, ZeroConfig(gpu_param_memory_budget=150_000, prefetch_buffer_size=1))
    events: list[tuple[str, str]] = []
    optimizer.engine.cache.observers.append(lambda verb, name: events.append((verb, name)))
    store.hold = lambda unit: unit == 2
    model.layers[0](torch.ones(2, 64))  # asks for layers.1, and it is held
    assert ("prefetch", "layers.1") in events
    store.hold = lambda unit: False
    both = torch.stack([model.layers[0].up.bias, model.layers[2].up.bias])  # two of three fit
    assert ("cancel", "layers.1") in events
    assert torch.equal(both, torch.stack([base.layers[0].up.bias, base.layers[2].up.bias]))


def test_an_interrupt_inside_forward_is_forgotten_at_the_next_zero_grad(store: FaultyStore) -> None:
    base = seeded(Net)
    model, optimizer = prepared(base, tight(base, prefetch_buffer_size=1))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.layers[1].up.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens(0)[0])
    handle.remove()
    assert any(unit.open_calls for unit in optimizer.engine.units)
    optimizer.zero_grad()
    assert not any(unit.open_calls for unit in optimizer.engine.units)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    step_once(model, optimizer, 0)
    assert same_bits(rayzero.full_state_dict(model), plain_state(base, 1))


def test_after_the_run_parameters_that_are_not_up_say_so(store: FaultyStore) -> None:
    base = seeded(Net)
    model, optimizer = prepared(base, tight(base, async_prefetch=False))
    step_once(model, optimizer, 0)
    optimizer.engine.close("over")
    assert {unit.state for unit in optimizer.engine.units} == {UnitState.SHARDED}
    with pytest.raises(StoreClosedError):  # of its lane, of its store, or of a fetch that was on its way
        model(tokens(0)[0])
