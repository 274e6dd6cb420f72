"""Units that are read where the owners write them: nothing is copied, and everything else stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.protocol.messages import COMPUTE
from rayzero.store.inprocess import LocalConnection, LocalOwners
from rayzero.store.rank.rank_store import RankStore
from rayzero.telemetry.names import EXPOSED_WAIT_SECONDS, TRANSFER_BYTES
from rayzero.telemetry.recorder import MemoryRecorder

from .models import Net, fit, prepared_copy, same_bits, seeded, tokens


@pytest.fixture(autouse=True)
def _as_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYZERO_DEBUG", "0")  # debug mode fills buffers of its own with NaN


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


def prepared(base: nn.Module, config: ZeroConfig) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    return prepared_copy(base, torch.optim.SGD, config, lr=0.1)


def plain_state(base: nn.Module, steps: int) -> dict[str, Tensor]:
    model = copy.deepcopy(base)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), range(steps))
    return model.state_dict()


def owners_memory(optimizer: rayzero.ZeroOptimizer, unit: ParamUnit) -> Tensor:
    mapped = optimizer.engine.store.mapped(unit.index)
    assert mapped is not None
    return mapped


def test_a_parameter_is_the_owners_memory_and_nothing_is_fetched(recorder: MemoryRecorder) -> None:
    base = seeded(Net)
    model, optimizer = prepared(base, ZeroConfig())
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
    model, optimizer = prepared(base, ZeroConfig())
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
    model, optimizer = prepared(base, ZeroConfig())

    def scribble(module: nn.Module, _: object) -> None:
        module.up.weight.data.mul_(1.0)

    model.layers[1].register_forward_pre_hook(scribble)
    fit(model, optimizer, range(2))
    assert same_bits(model.state_dict(), plain_state(base, 2))
