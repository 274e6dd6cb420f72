"""``rayzero.release``: a rank gives back what it holds between two steps, no bit changes, and the next one has it
again."""

from __future__ import annotations

import functools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.units.param_unit import UnitState
from rayzero.errors import MemoryPlanError, UnsupportedError
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import list_slabs
from rayzero.testing import run_ranks
from tests.support import needs

from .models import Net, fit, prepared_copy, same_bits, seeded, tight, token_loss, tokens

PAGES = 16 << 12  # what may stay of a slab: its header, and the last page of each place


def prepared(base: nn.Module, config: ZeroConfig) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    return prepared_copy(base, torch.optim.AdamW, config, lr=1e-2)


def gradient_pages(context: RankContext) -> int:
    """Bytes that this rank's gradients take in shared memory now."""
    mine = [
        slab.path
        for slab in list_slabs(Path("/dev/shm"))
        if slab.header is not None
        and (slab.header.facts.run, slab.header.facts.role, slab.header.facts.index)
        == (context.run, "grads", context.rank)
    ]
    assert mine
    return sum(512 * os.stat(path).st_blocks for path in mine)


def trained(
    context: RankContext, base: nn.Module, config: ZeroConfig, *, release: bool
) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """The weights after some steps, and before and after each release what this rank's gradients took."""
    model, optimizer = prepared(base, config)
    seen = []
    for step in range(4):
        for each in range(config.gradient_accumulation_steps):
            token_loss(model, tokens(4 * step + each, context.rank)).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        if release:
            before = gradient_pages(context)
            rayzero.release(model)
            seen.append((before, gradient_pages(context)))
            engine = optimizer.engine
            assert all(unit.state is UnitState.SHARDED for unit in engine.units)
            assert (engine.residency.allocated, sum(engine.transfers.allocated().values())) == (0, 0)
            with torch.no_grad():
                token_loss(model, tokens(step))  # it takes what it needs, and no gradients
    return rayzero.full_state_dict(model), seen


@needs.shared_memory
@pytest.mark.spread(2, second=8)
@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_leave_no_pages_and_no_bit_changes(world_size: int, backwards: int) -> None:
    base = seeded(lambda: Net(num_layers=4, width=256))
    config = tight(base, gradient_accumulation_steps=backwards)
    plain = run_ranks(lambda context: trained(context, base, config, release=False), world_size, 2, "shm")
    again = run_ranks(lambda context: trained(context, base, config, release=True), world_size, 2, "shm")
    for (expected, _), (state, seen) in zip(plain, again, strict=True):
        assert same_bits(state, expected)
        for before, after in seen:
            assert before > 1 << 20
            assert after <= PAGES


def test_it_is_refused_by_name_within_a_step(alone: RankContext) -> None:
    model, optimizer = prepared(seeded(Net), ZeroConfig())
    caught: list[str] = []

    def release(*_: object) -> None:
        with pytest.raises(UnsupportedError, match=r"it was called in a forward or backward") as error:
            rayzero.release(model)
        caught.append(str(error.value))

    rayzero.release(model)  # nothing has happened yet
    hook = model.norm.register_forward_hook(release)
    loss = token_loss(model, tokens(0))
    hook.remove()
    with pytest.raises(UnsupportedError, match=r"the open step has a graph or gradients: call it between"):
        rayzero.release(model)
    loss.register_hook(release)
    loss.backward()
    assert len(caught) == 2
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(UnsupportedError, match=r"the open step has a graph or gradients"):
        rayzero.release(model)
    optimizer.step()
    rayzero.release(model)
    with torch.no_grad():
        token_loss(model, tokens(1))
    rayzero.release(model)


@needs.shared_memory
def test_gradients_that_find_no_room_again_are_an_error_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(context: RankContext) -> bool:
        model, optimizer = prepared(seeded(Net), ZeroConfig())
        fit(model, optimizer, [0])
        rayzero.release(model)
        allocate = Slab.allocate

        def full(slab: Slab, offset: int, size: int) -> None:
            raise MemoryPlanError("full")

        monkeypatch.setattr(Slab, "allocate", full)
        with pytest.raises(MemoryPlanError, match="full"):
            token_loss(model, tokens(1)).backward()
        monkeypatch.setattr(Slab, "allocate", allocate)
        optimizer.zero_grad()
        token_loss(model, tokens(1)).backward()
        optimizer.step()
        return True

    assert run_ranks(train, 1, 1, "shm") == [True]


def test_views_keep_their_units(alone: RankContext) -> None:
    model, _ = prepared(seeded(Net), ZeroConfig())
    with torch.no_grad():
        view = model.embed.weight[:1]
    rayzero.release(model)
    assert view.isfinite().all()


@pytest.mark.parametrize("stays_up", [False, True])
def test_a_mere_use_of_a_parameter_is_no_graph_of_the_step(stays_up: bool, alone: RankContext) -> None:
    """What a graph has saved of the parameter can still be read, and once the graph is gone the unit is, too."""
    base = seeded(Net)
    model, optimizer = prepared(base, ZeroConfig() if stays_up else tight(base))
    engine = optimizer.engine
    assert engine.resident is stays_up
    weight = model.layers[1].up.weight
    expected = (base.layers[1].up.weight.detach() * 2).clone()
    weight.norm()  # as for a log
    rayzero.release(model)
    assert all(unit.state is UnitState.SHARDED for unit in engine.units)
    square = (weight * weight).sum()
    rayzero.release(model)
    (gradient,) = torch.autograd.grad(square, [weight])
    assert torch.equal(gradient, expected)
    del square, gradient
    rayzero.release(model)
    assert all(unit.state is UnitState.SHARDED for unit in engine.units)


def test_another_thread_than_the_one_that_trains_is_refused_by_name(alone: RankContext) -> None:
    model, optimizer = prepared(seeded(Net), ZeroConfig())

    def step() -> None:
        fit(model, optimizer, [0])

    refused = "called from thread .*, which is not the one that trains"
    with ThreadPoolExecutor(1, "other") as other:
        with pytest.raises(UnsupportedError, match=refused):
            other.submit(rayzero.release, model).result()
        step()
        rayzero.release(model)
        with pytest.raises(UnsupportedError, match=refused):
            other.submit(rayzero.release, model).result()
        other.submit(step).result()  # a loop may move
        other.submit(rayzero.release, model).result()
        with pytest.raises(UnsupportedError, match=refused):
            rayzero.release(model)


def owner_pid(run: str, owner: int) -> int:
    """The process that has the control slab of an owner."""
    headers = [slab.header for slab in list_slabs() if slab.header is not None and slab.alive]
    facts = [(header.pid, header.facts) for header in headers if header.facts.run == run]
    (pid,) = {pid for pid, f in facts if (f.role, f.index) == ("control", owner) and f.kernel != "rank"}
    return pid


KILLS = {1: "optimizer 0", 2: "rank 1", 3: "optimizer 1"}  # once a step's gradients have been given back


def killed(context: RankContext, base: nn.Module, folder: Path) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model, optimizer = prepared(base, ZeroConfig())
    rayzero.track()
    for step in range(context.step, 5):
        fit(model, optimizer, [step], context.rank)
        rayzero.release(model)
        done, whom = folder / str(step), KILLS.get(step)
        if context.rank == 1 and whom is not None and not done.exists():
            done.touch()
            os.kill(os.getpid() if whom == "rank 1" else owner_pid(context.run, int(whom[-1])), signal.SIGKILL)
    return rayzero.full_state_dict(model)


@needs.shared_memory
@pytest.mark.thorough
def test_who_dies_after_it_is_replaced_and_no_bit_changes(tmp_path: Path) -> None:
    base = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))
    one = functools.partial(killed, base=base)
    states = run_ranks(functools.partial(one, folder=tmp_path), 2, 2, "shm", True, stall_timeout=60.0, max_failures=3)
    assert len(list(tmp_path.iterdir())) == len(KILLS)
    expected, _ = run_ranks(functools.partial(one, folder=tmp_path), 2, 2, "shm")  # all have been killed already
    assert all(same_bits(state, expected) for state in states)
