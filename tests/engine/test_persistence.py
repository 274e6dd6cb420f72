"""What is fetched: nothing that did not change, nothing that is read where the owners write it, and never more at once
than the budget."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.memory.pool import buffer_bytes
from rayzero.protocol.messages import COMPUTE, Contribution
from rayzero.store.inprocess import LocalConnection, LocalOwners
from rayzero.store.rank.rank_store import RankStore
from rayzero.telemetry.names import EXPOSED_WAIT_SECONDS, PREFETCH_DEPTH, TRANSFER_BYTES
from rayzero.telemetry.recorder import MemoryRecorder

from .models import Net, fit, plain_state, prepared_copy, same_bits, seeded, tight, token_loss, tokens


@pytest.fixture(autouse=True)
def _as_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYZERO_DEBUG", "0")  # debug mode keeps no out-of-date memory


class FarStore(RankStore):
    """A store over owners of this process, without their memory; it notes what is fetched."""

    def __init__(self, owners: LocalOwners, recorder: MemoryRecorder) -> None:
        super().__init__(LocalConnection(0, owners, recorder=recorder))
        self.fetched: list[int] = []

    def mapped(self, unit: int) -> Tensor | None:
        return None

    def landing(self, contribution: Contribution) -> Tensor | None:
        return None

    def fetch(self, unit: int, version: int, kind: str, out: Tensor) -> Future[None]:
        if kind == COMPUTE:
            self.fetched.append(unit)
        return super().fetch(unit, version, kind, out)


@pytest.fixture
def store() -> Iterator[FarStore]:
    owners, recorder = LocalOwners(2), MemoryRecorder()
    store = FarStore(owners, recorder)
    with running_in(RankContext(connect=lambda _: store, recorder=recorder)):
        yield store
    owners.close()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.01)


def prepared(base: nn.Module, config: ZeroConfig) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    model = copy.deepcopy(base)
    return rayzero.prepare(model, sgd(model), config)


@pytest.mark.usefixtures("full_depth")
def test_frozen_units_stay_up_over_steps(store: FarStore) -> None:
    base = seeded(lambda: Net(num_layers=4))
    base.layers[1].requires_grad_(False)
    base.layers[3].requires_grad_(False)
    model, optimizer = prepared(base, ZeroConfig())
    fit(model, optimizer, range(3))
    model(tokens(0)[0])
    names = [optimizer.engine.units[unit].name for unit in store.fetched]
    assert names.count("layers.1:frozen") == names.count("layers.3:frozen") == 1
    assert names.count("layers.0") == 4  # versions 0 to 3
    assert torch.equal(model.layers[1].up.weight, base.layers[1].up.weight)


@pytest.mark.parametrize("ahead", [True, False])
def test_units_of_a_skipped_step_are_not_fetched_again(ahead: bool, store: FarStore) -> None:
    base = seeded(Net)
    model, optimizer = prepared(base, ZeroConfig(async_prefetch=ahead))
    fit(model, optimizer, range(1))
    model(tokens(0)[0])
    before = len(store.fetched)
    (token_loss(model, tokens(1)) * float("nan")).backward()
    optimizer.step()
    optimizer.zero_grad()
    fit(model, optimizer, range(1, 2))
    model(tokens(0)[0])
    assert len(store.fetched) - before == len(optimizer.engine.units)  # once, after the step that was applied
    plain = copy.deepcopy(base)
    fit(plain, sgd(plain), range(2))
    assert same_bits(rayzero.full_state_dict(model), plain.state_dict())


def test_the_depth_follows_what_was_measured_up_to_the_setting(store: FarStore) -> None:
    base = seeded(lambda: Net(num_layers=6))
    model, optimizer = prepared(base, tight(base, prefetch_buffer_size=3))
    pace = optimizer.engine.cache.times.pace
    assert optimizer.engine.cache.depth == 3
    fit(model, optimizer, range(3))
    for seconds, depth in ((0.0, 1), (1e6, 3)):
        for _ in range(64):
            pace.fetched(seconds)
        model(tokens(0)[0])
        assert optimizer.engine.cache.depth == depth


# ---- where the owners write ------------------------------------------------------------------------------------


@pytest.fixture
def recorder() -> Iterator[MemoryRecorder]:
    """Of a rank alone, whose one owner is in this process."""
    recorder = MemoryRecorder()
    owners = LocalOwners(2)
    with running_in(
        RankContext(connect=lambda _: RankStore(LocalConnection(0, owners, recorder=recorder)), recorder=recorder)
    ):
        yield recorder
    owners.close()


def owners_memory(optimizer: rayzero.ZeroOptimizer, unit: ParamUnit) -> Tensor:
    mapped = optimizer.engine.store.mapped(unit.index)
    assert mapped is not None
    return mapped


def test_a_parameter_is_the_owners_memory_and_nothing_is_fetched(recorder: MemoryRecorder) -> None:
    base = seeded(Net)
    model, optimizer = prepared_copy(base, torch.optim.SGD, ZeroConfig(), lr=0.1)
    fit(model, optimizer, range(2))
    model(tokens(0)[0])
    for unit in optimizer.engine.units:
        mapped = owners_memory(optimizer, unit)
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            assert param.data_ptr() == mapped[slot.start :].data_ptr()
    assert recorder.total(TRANSFER_BYTES, direction="fetch") == 0
    assert recorder.total(EXPOSED_WAIT_SECONDS, cause="fetch") == 0
    assert same_bits(rayzero.full_state_dict(model), plain_state(base, 2))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("seen", [False, True])
def test_a_write_is_this_ranks_until_the_step_and_the_owners_from_then_on(
    held: bool, seen: bool, recorder: MemoryRecorder
) -> None:
    base = seeded(Net)
    model, optimizer = prepared_copy(base, torch.optim.SGD, ZeroConfig(), lr=0.1)
    fit(model, optimizer, range(1))
    weight = model.layers[1].up.weight
    view = weight.detach()
    if seen:
        with torch.no_grad():
            weight.mul_(2)
    else:
        view.numpy()[:] *= 2
    if not held:
        del view
    unit = type(weight).unit.index
    published = torch.empty_like(owners_memory(optimizer, optimizer.engine.units[unit]))
    optimizer.engine.store.fetch(unit, 1, COMPUTE, published).result()
    plain = copy.deepcopy(base)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    fit(plain, sgd, range(1))
    slot = next(slot for slot in optimizer.engine.units[unit].layout.slots if slot.name == "layers.1.up.weight")
    assert torch.equal(published[slot.start : slot.stop].view(slot.shape), plain.layers[1].up.weight)
    plain.layers[1].up.weight.data.mul_(2)
    assert same_bits(model.state_dict(), plain.state_dict())
    for m, sgd_of in ((model, optimizer), (plain, sgd)):
        fit(m, sgd_of, [1])
    assert same_bits(rayzero.full_state_dict(model), plain.state_dict())
    assert not held or torch.equal(view, plain.layers[1].up.weight)
    for param, its_slot in zip(
        optimizer.engine.units[unit].params, optimizer.engine.units[unit].layout.slots, strict=True
    ):
        param.detach().sum()
        assert param.data_ptr() == owners_memory(optimizer, optimizer.engine.units[unit])[its_slot.start :].data_ptr()


def test_a_write_inside_forward_that_nobody_sees_does_not_hide_later_versions(recorder: MemoryRecorder) -> None:
    """A private page that shadowed the owners' for good would freeze its weights without a word."""
    base = seeded(Net)
    model, optimizer = prepared_copy(base, torch.optim.SGD, ZeroConfig(), lr=0.1)

    def scribble(module: nn.Module, _: object) -> None:
        module.up.weight.data.mul_(1.0)

    model.layers[1].register_forward_pre_hook(scribble)
    fit(model, optimizer, range(2))
    assert same_bits(model.state_dict(), plain_state(base, 2))


# ---- any schedule -----------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """A unit of ``size`` parameters."""

    def __init__(self, size: int, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight * self.weight).mean() + 1.0


class Path(nn.Module):
    """Calls its layers in whatever order it is told."""

    def __init__(self, sizes: list[int], frozen: set[int]) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(Scale(size, i not in frozen) for i, size in enumerate(sizes))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        x = x * self.first
        for layer in order:
            x = self.layers[layer](x)
        return x


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], set[int], list[list[int]], int, int]:
    """Unit sizes in elements, frozen units, the layers of each step, bytes of budget beyond the least, depth."""
    sizes = draw(st.lists(st.sampled_from([64, 128, 300, 1000, 1100, 4096]), min_size=2, max_size=7))
    frozen = draw(st.sets(st.integers(0, len(sizes) - 1), max_size=len(sizes) - 1))
    order = st.lists(st.integers(0, len(sizes) - 1), max_size=10)
    steps = draw(st.lists(order, min_size=1, max_size=4))
    return sizes, frozen, steps, draw(st.integers(0, 40_000)), draw(st.integers(1, 8))


@settings(max_examples=min(settings.default.max_examples, 40))
@given(plans(), st.booleans())
def test_no_schedule_has_more_up_than_the_budget_or_other_bits(
    plan: tuple[list[int], set[int], list[list[int]], int, int], far: bool
) -> None:
    sizes, frozen, steps, spare, depth = plan
    base = Path(sizes, frozen)
    plain = copy.deepcopy(base)
    least = buffer_bytes(4) + buffer_bytes(4 * max(sizes))
    config = ZeroConfig(gpu_param_memory_budget=least + spare, prefetch_buffer_size=depth)
    owners, recorder = LocalOwners(2), MemoryRecorder()
    store = FarStore(owners, recorder) if far else RankStore(LocalConnection(0, owners, recorder=recorder))
    with running_in(RankContext(connect=lambda _: store, recorder=recorder)):
        model, optimizer = prepared(base, config)
        plain_optimizer = sgd(plain)
        for order in steps:
            for twin, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
                twin(torch.ones(2), order).sum().backward()
                its_optimizer.step()
                its_optimizer.zero_grad()
        assert optimizer.engine.residency.budget.peak <= config.gpu_param_memory_budget
        assert recorder.gauge(PREFETCH_DEPTH) == optimizer.engine.cache.depth
        assert same_bits(rayzero.full_state_dict(model), plain.state_dict())
    owners.close()
