"""Other owners while training goes on: the bits of a run whose owners stay, whoever dies at whatever step of the
change."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import Batches, seeded
from engine.test_comeback import Seen, Small
from owner.test_products import Divided
from torch import nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.elastic.scaling import ScaleRequest, ask
from rayzero.engine.context import RankContext
from rayzero.protocol.messages import STEP
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.store.owner.memory.slabs import TENSORS
from rayzero.testing import run_ranks
from tests.support import needs
from tests.support.faults import Fault, Faults
from tests.support.waiting import until

from .disturbed import another_host, differences, missed, slabs_of
from .test_scaling_cases import wait_for_epoch

pytestmark = needs.shared_memory

PAUSE_S = 0.03
MOMENTS = ("exp_avg", "exp_avg_sq", STEP)


def train(
    context: RankContext,
    base: nn.Module,
    folder: Path,
    wanted: Mapping[int, int],
    steps: int,
    avoid: tuple[str, ...] = (),
    on_host: float = 1.0,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    matrix_updates: Any = "owner",
) -> Any:
    """``wanted``: by step, how many owners there are to be from about then on; before the last three steps, they
    are. ``avoid``: owners whose places other processes take with the first change. ``on_host``: the part of the
    optimizer there."""
    torch.set_num_threads(1)
    (folder / "run").write_text(context.run)
    (folder / f"rank-{context.rank}").write_text(str(os.getpid()))
    model, loader, seen = copy.deepcopy(base), Batches(context.rank), Seen()
    config = ZeroConfig(  # each unit has shards of all owners
        units=["Block"], shard_bytes="8KiB", offload_fraction=on_host, matrix_updates=matrix_updates
    )
    model, optimizer = rayzero.prepare(model, make(model.parameters(), lr=1e-2), config)
    rayzero.track(loader=loader, seen=seen)
    batches = iter(loader)
    for step in range(context.step, steps):
        if context.rank == 0 and step in wanted:
            changes = list(wanted).index(step)
            wait_for_epoch(optimizer, changes)
            ask(folder, ScaleRequest(num_optimizers=wanted[step], avoid=() if changes else avoid))
        if step == steps - 3:
            wait_for_epoch(optimizer, len(wanted))
        x, y = next(batches)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        seen.losses = [*seen.losses, loss.detach()]
        if step % 2:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen.means = [*seen.means, rayzero.mean_over_ranks(float(seen.losses[-1]))]
        if step % 6 == 5:
            rayzero.save_checkpoint(optimizer, folder / f"step-{step + 1}")
            with torch.no_grad():
                model.head.bias.fill_(0.01 * step)
        if wanted:
            time.sleep(PAUSE_S)
    engine = optimizer.engine
    kinds = MOMENTS if make is torch.optim.AdamW else ("momentum_buffer", STEP)
    moments = {f"{unit.name} {kind}": engine.cache.fetch_flat(unit, kind) for unit in engine.units for kind in kinds}
    epoch = engine.store.connection.epochs.number
    return epoch, rayzero.full_state_dict(model) | moments, [float(loss) for loss in seen.losses], seen.means


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By number of steps, what a run ends with that nothing happens to."""

    @functools.cache
    def results(steps: int) -> Any:
        folder = tmp_path_factory.mktemp("undisturbed")
        loop = functools.partial(train, base=seeded(Small, 3), folder=folder, wanted={}, steps=steps)
        return run_ranks(loop, 2, 2)

    return results


def scaled(
    folder: Path,
    wanted: Mapping[int, int],
    steps: int,
    avoid: tuple[str, ...] = (),
    loop: Any = train,
    **more: Any,
) -> Any:
    loop = functools.partial(loop, base=seeded(Small, 3), folder=folder, wanted=wanted, steps=steps, avoid=avoid)
    found = run_ranks(loop, 2, 2, "shm", True, run_dir=folder, **more)
    assert [epoch for epoch, *_ in found] == [len(wanted)] * 2
    until(lambda: multiprocessing.active_children() == [])
    run = (folder / "run").read_text()
    for directory in {SHARED_MEMORY, *more.get("hosts", {}).values()}:
        until(lambda there=directory: slabs_of(run, there) == [], what=f"{run} has left slabs in {directory}")
    return found


@pytest.mark.promise("scalable", "transports")
@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("wanted", "steps"),
    [({2: 3}, 9), ({4: 1}, 24), ({4: 5, 10: 1, 16: 3}, 24)],
    ids=["up", "down", "up, to one, up"],
)
def test_owners_come_and_go_and_no_bit_changes(
    tmp_path: Path, undisturbed: Any, wanted: dict[int, int], steps: int
) -> None:
    assert differences(scaled(tmp_path, wanted, steps, max_failures=1), undisturbed(steps)) == []


@pytest.mark.thorough
def test_owners_come_and_go_while_ranks_multiply_for_them_and_no_bit_changes(tmp_path: Path) -> None:
    one = functools.partial(train, make=Divided)
    alone = functools.partial(one, base=seeded(Small, 3), folder=tmp_path, wanted={}, steps=9)
    found = scaled(tmp_path, {2: 3}, 9, loop=functools.partial(one, matrix_updates="rank"), max_failures=1)
    assert differences(found, run_ranks(alone, 2, 2)) == []


@pytest.mark.promise("scalable", "optimizers")
@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("on_host", "wanted", "steps"),
    [(0.6, {2: 3}, 9), (0.6, {4: 5, 10: 1, 16: 3}, 24), (0.0, {4: 5, 10: 1, 16: 3}, 24)],
)
def test_what_is_on_devices_stays_there_while_other_owners_come_and_go(
    tmp_path: Path, undisturbed: Any, on_host: float, wanted: dict[int, int], steps: int
) -> None:
    loop = functools.partial(train, on_host=on_host)
    config = ZeroConfig(offload_fraction=on_host)
    found = scaled(tmp_path, wanted, steps, loop=loop, config=config, max_failures=1)
    assert differences(found, undisturbed(steps)) == []


# ---- to other hosts, from them, and back


THERE = "optimizer 0", "optimizer 1"


@pytest.mark.promise("scalable", "hosts")
@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("there", "ranks_there", "wanted", "avoid", "steps"),
    [
        (("optimizer 2",), (), {2: 3}, (), 9),
        (("optimizer 1",), (), {4: 1}, (), 24),
        (("optimizer 1",), (1,), {4: 3, 10: 1}, (), 24),
        (("optimizer 0 in life 1",), (), {4: 2}, ("optimizer 0",), 24),
        (("optimizer 0 in life 1", "optimizer 1 in life 1"), (), {4: 2}, THERE, 24),
        (("optimizer 0", "optimizer 1"), (0, 1), {4: 3, 10: 1}, ("optimizer 0",), 24),
        (("optimizer 1", "optimizer 3"), (1,), {4: 5, 10: 1, 16: 3}, (), 24),
    ],
    ids=[
        "to an owner there",
        "from an owner there",
        "to one here, and a rank there",
        "the lead goes there",
        "all go there",
        "the lead comes here, and away from the ranks",
        "and back",
    ],
)
def test_shards_move_between_hosts_and_no_bit_changes(
    tmp_path: Path,
    undisturbed: Any,
    there: tuple[str, ...],
    ranks_there: tuple[int, ...],
    wanted: dict[int, int],
    avoid: tuple[str, ...],
    steps: int,
) -> None:
    with another_host(*there, *(f"rank {rank}" for rank in ranks_there)) as hosts:
        found = scaled(tmp_path, wanted, steps, avoid=avoid, hosts=hosts, max_failures=1)
        assert differences(found, undisturbed(steps)) == []


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(256, 256) for _ in range(12)))


def train_and_measure(
    context: RankContext,
    base: nn.Module,
    folder: Path,
    hosts: Sequence[Path],
    steps: int,
    held: Faults | None = None,
) -> Any:
    """Ask for a third owner before step 2, and begin step 4 once it is there; ask for none if there are no ``hosts``.
    ``held``: the first strikes when the lead decides nothing more: begin step 3 then, so that its update is awaited.
    Returns the weights, and what tensors take on each host: before that, and at the end."""
    torch.set_num_threads(1)
    model = copy.deepcopy(base)
    config = ZeroConfig(units=["Linear"], shard_bytes="64KiB")
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    taken = []
    for step in range(steps):
        if context.rank == 0 and step == 2 and hosts:
            taken.append([tensor_bytes(context.run, host) for host in hosts])
            ask(folder, ScaleRequest(num_optimizers=3))
        while held is not None and step == 3 and held.struck(0) is None:
            time.sleep(0.01)
        if step == 4 and hosts:
            wait_for_epoch(optimizer, 1)
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(10 * step + context.rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rayzero.mean_over_ranks(0.0)
    return rayzero.full_state_dict(model), [*taken, [tensor_bytes(context.run, host) for host in hosts]]


TOTALS = 2  # the number of an owner's slabs of totals, which come after those of AdamW's two moments


def tensor_bytes(run: str, directory: Path) -> int:
    """What the slabs with a run's parameters and states take in memory. Totals of gradients are left out: they have
    pages once a round of pushes had to wait in them."""
    slabs = [slab for slab in list_slabs(directory) if slab.header is not None and slab.header.facts.run == run]
    kept = [slab for slab in slabs if slab.header.facts.role in TENSORS and slab.header.facts.number < TOTALS]
    return sum(512 * slab.path.stat().st_blocks for slab in kept)


@pytest.mark.thorough
def test_what_has_moved_to_another_host_takes_no_memory_here(tmp_path: Path) -> None:
    with another_host("optimizer 2") as hosts:
        places = [SHARED_MEMORY, *hosts.values()]
        loop = functools.partial(train_and_measure, base=seeded(Layers, 5), folder=tmp_path, hosts=places, steps=9)
        found = run_ranks(loop, 2, 2, "shm", True, run_dir=tmp_path, max_failures=1, hosts=hosts, stall_timeout=60.0)
    (all_here, nothing), (here, there) = found[0][1]
    assert nothing == 0
    assert there / all_here == pytest.approx(1 / 3, rel=0.1)
    assert (here + there) / all_here == pytest.approx(1.0, rel=0.05)


@pytest.mark.thorough
def test_a_rank_that_waits_for_an_update_hears_first_that_its_owners_have_gone(tmp_path: Path) -> None:
    """They say so before the rank goes over to the next ones: then its wait ends in another way."""
    check_change_in_step_3(
        tmp_path,
        Fault(LEAD, "owner.held", "delay", seconds=0.5),
        *(Fault(f"rank {rank}", "rank.change", "delay", seconds=0.5) for rank in (0, 1)),
    )


@pytest.mark.thorough
def test_an_owner_dies_on_another_host_as_ranks_push_again_to_it(tmp_path: Path) -> None:
    check_change_in_step_3(
        tmp_path, Fault(LEAD, "owner.held", "delay", seconds=0.5), Fault(NEW, "owner.landing"), max_failures=2
    )


def check_change_in_step_3(folder: Path, *planned: Fault, max_failures: int = 1) -> None:
    """An owner on another host joins once all gradients of step 3 are pushed and before it is decided. All faults
    strike, the first when the lead decides nothing more, and no bit changes."""
    faults = Faults(folder, planned)
    loop = functools.partial(train_and_measure, base=seeded(Layers, 5), folder=folder, steps=6)
    with another_host("optimizer 2") as hosts:
        here = functools.partial(loop, hosts=[SHARED_MEMORY], held=faults)
        found = run_ranks(
            here, 2, 2, "shm", True, run_dir=folder, max_failures=max_failures, hosts=hosts, faults=faults
        )
    plain = run_ranks(functools.partial(loop, hosts=[]), 2, 2)
    for (ours, _), (theirs, _) in zip(found, plain, strict=True):
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert missed(faults) == []


# ---- the same, while something happens to the processes


@dataclass(frozen=True)
class Cell:
    """What happens while the owners change, and whether they stay as they are at first."""

    owners: int
    faults: tuple[Fault, ...]
    stay: bool | None  # None: it depends on which of several deaths is first
    meanwhile: int | None = None  # the rank that is killed while the first fault delays its process


def killed(owners: int, stay: bool | None, *faults: tuple[str, str] | Fault) -> Cell:
    return Cell(owners, tuple(fault if isinstance(fault, Fault) else Fault(*fault) for fault in faults), stay)


LEAD, OTHER, NEW = (f"optimizer {owner}" for owner in range(3))
OLD = ("hold", "held", "settle", "settled")  # what owners of the last epoch do
COMING = ("prepare", "preparing", "prepared")  # what those of the next one do
CROSSING = ("enter", "entering", "entered")
RANK = ("change", "take-over", "greeted", "shared", "changed")
CELLS = {
    "up, a new one as it starts": killed(3, True, (NEW, "owner.start")),
    "up, a new one twice": killed(3, True, Fault(NEW, "owner.start"), Fault(NEW, "owner.prepared", life=1)),
    **{f"up, the lead at {at}": killed(3, True, (LEAD, f"owner.{at}")) for at in (*OLD, *COMING)},
    **{f"up, one that stays at {at}": killed(3, True, (OTHER, f"owner.{at}")) for at in (*OLD, *COMING)},
    **{f"up, a new one at {at}": killed(3, True, (NEW, f"owner.{at}")) for at in COMING},
    **{f"up, the lead at {at}": killed(3, False, (LEAD, f"owner.{at}")) for at in ("let-stand", "stands", *CROSSING)},
    **{f"up, one that stays at {at}": killed(3, False, (OTHER, f"owner.{at}")) for at in CROSSING},
    **{f"up, a new one at {at}": killed(3, False, (NEW, f"owner.{at}")) for at in CROSSING},
    **{f"up, a rank at {at}": killed(3, False, ("rank 1", f"rank.{at}")) for at in RANK},
    **{f"down, the lead at {at}": killed(1, True, (LEAD, f"owner.{at}")) for at in (*OLD, *COMING)},
    **{f"down, one that parts at {at}": killed(1, True, (OTHER, f"owner.{at}")) for at in OLD},
    **{f"down, the lead at {at}": killed(1, False, (LEAD, f"owner.{at}")) for at in ("let-stand", "stands", *CROSSING)},
    **{f"down, one that parts at {at}": killed(1, False, (OTHER, f"owner.{at}")) for at in CROSSING},
    **{f"down, a rank at {at}": killed(1, False, ("rank 0", f"rank.{at}")) for at in RANK},
    **{
        f"{who} is stopped at {point}": killed(owners, stay, Fault(who, point, "stop"))
        for owners, stay, who, point in (
            (3, True, LEAD, "owner.held"),
            (1, True, OTHER, "owner.settle"),
            (3, True, NEW, "owner.prepared"),
            (3, False, LEAD, "owner.let-stand"),
            (1, False, OTHER, "owner.entered"),
            (3, False, NEW, "owner.enter"),
            (3, False, "rank 1", "rank.take-over"),
        )
    },
    "both old ones, held": killed(3, True, (LEAD, "owner.held"), (OTHER, "owner.held")),
    "the lead, and its successor before the change is tried again": killed(
        3, True, (LEAD, "owner.prepared"), Fault(LEAD, "owner.hold", life=1)
    ),
    "the lead, and its successor before the next epoch has met it": killed(
        3, False, (LEAD, "owner.stands"), Fault(LEAD, "owner.start", life=1)
    ),
    "the lead, and its successor as it takes over": killed(
        1, False, (LEAD, "owner.let-stand"), Fault(LEAD, "owner.took-over", life=1)
    ),
    "the lead, and its successor as ranks go over": killed(
        3, False, (LEAD, "owner.entered"), Fault(LEAD, "owner.attach", nth=2, life=1)
    ),
    "all owners, entering": killed(3, False, *((owner, "owner.entering") for owner in (LEAD, OTHER, NEW))),
    "all owners, while ranks go over": killed(
        3, False, *(Fault(owner, "owner.took-over") for owner in (LEAD, OTHER, NEW))
    ),
    "the lead, once a rank has told it all": killed(3, False, Fault(LEAD, "owner.attach", nth=4)),
    "one that stays and a rank, as ranks go over": killed(
        3, False, (OTHER, "owner.took-over"), ("rank 1", "rank.greeted")
    ),
    "both ranks, going over": killed(1, False, ("rank 0", "rank.take-over"), ("rank 1", "rank.shared")),
    "a rank, and its successor as it begins": killed(
        3, False, ("rank 1", "rank.change"), Fault("rank 1", "rank.attached", life=1)
    ),
    "everybody": killed(
        3,
        False,
        *((owner, "owner.entered") for owner in (LEAD, OTHER, NEW)),
        *((f"rank {r}", "rank.change") for r in (0, 1)),
    ),
    "a rank, and its successor maps what owners offer when they enter": Cell(
        1,
        (
            Fault(LEAD, "owner.hold", "delay", seconds=1.5),
            Fault("rank 1", "rank.meet", "delay", life=1, seconds=2.5),  # until the lead has entered
            Fault(OTHER, "owner.enter", "delay", seconds=3.0),  # so ranks do not hear of it yet
        ),
        False,
        1,
    ),
    **{
        f"a rank while the lead is at {at}": Cell(
            owners, (Fault(LEAD, f"owner.{at}", "delay", seconds=0.3),), False, rank
        )
        for owners, rank, at in (
            (3, 0, "hold"),
            (1, 1, "held"),
            (3, 1, "settle"),
            (1, 0, "prepare"),
            (3, 0, "prepared"),
            (3, 1, "let-stand"),
            (1, 1, "stands"),
            (3, 0, "enter"),
            (1, 0, "entering"),
            (3, 1, "entered"),
        )
    },
}


@pytest.mark.spread(1, second=45)
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_death_while_owners_change_changes_no_bit(
    cell: Cell, tmp_path: Path, undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(tmp_path, cell.faults)
    stopped = any(fault.act == "stop" for fault in cell.faults)
    if cell.meanwhile is not None:
        threading.Thread(target=kill_meanwhile, args=(faults, tmp_path, cell.meanwhile), daemon=True).start()
    found = scaled(tmp_path, {2: cell.owners}, 9, max_failures=8, faults=faults, stall_timeout=6.0 if stopped else 60.0)
    assert differences(found, undisturbed(9)) == []
    assert missed(faults) == []
    if cell.stay is not None:
        assert any("the owners stay as they are" in line for line in caplog.messages) == cell.stay


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cell",
    [
        killed(3, True, (NEW, "owner.prepared")),
        killed(1, True, (OTHER, "owner.settled")),
        killed(3, False, (OTHER, "owner.entering")),
        killed(3, False, ("rank 1", "rank.take-over")),
        killed(1, False, ("rank 0", "rank.changed"), (LEAD, "owner.entered")),
    ],
    ids=lambda cell: ", ".join(map(str, cell.faults)),
)
def test_a_death_while_owners_change_touches_nothing_on_devices(cell: Cell, tmp_path: Path, undisturbed: Any) -> None:
    loop, config = functools.partial(train, on_host=0.6), ZeroConfig(offload_fraction=0.6)
    faults = Faults(tmp_path, cell.faults)
    more = {"loop": loop, "config": config, "faults": faults, "stall_timeout": 30.0}
    assert differences(scaled(tmp_path, {2: cell.owners}, 9, max_failures=8, **more), undisturbed(9)) == []
    assert missed(faults) == []


MOVES = {
    **{f"up, the lead at {at}": killed(3, True, (LEAD, f"owner.{at}")) for at in ("gives", "prepared")},
    "up, the lead at its second shard": killed(3, True, Fault(LEAD, "owner.gives", nth=2)),
    **{f"up, a new one at {at}": killed(3, True, (NEW, f"owner.{at}")) for at in ("takes-in", "preparing", "prepared")},
    **{f"up, the lead at {at}": killed(3, False, (LEAD, f"owner.{at}")) for at in ("stands", "entered")},
    **{f"up, a new one at {at}": killed(3, False, (NEW, f"owner.{at}")) for at in (*CROSSING, "took-over")},
    **{f"up, a rank at {at}": killed(3, False, ("rank 1", f"rank.{at}")) for at in ("change", "shared", "changed")},
    **{f"down, the lead at {at}": killed(1, True, (LEAD, f"owner.{at}")) for at in ("takes-in", "prepared")},
    **{f"down, one that parts at {at}": killed(1, True, (OTHER, f"owner.{at}")) for at in ("settled", "gives")},
    **{f"down, the lead at {at}": killed(1, False, (LEAD, f"owner.{at}")) for at in ("let-stand", "entering")},
    "down, one that parts as it enters": killed(1, False, (OTHER, "owner.enter")),
    "down, a rank as it takes over": killed(1, False, ("rank 0", "rank.take-over")),
    "up, everybody": killed(
        3,
        False,
        *((owner, "owner.entered") for owner in (LEAD, OTHER, NEW)),
        *((f"rank {r}", "rank.change") for r in (0, 1)),
    ),
}


@pytest.mark.spread(0, second=12)
@pytest.mark.parametrize("cell", MOVES.values(), ids=MOVES)
def test_a_death_while_shards_move_between_hosts_changes_no_bit(
    cell: Cell, tmp_path: Path, undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    faults, moves = Faults(tmp_path, cell.faults), NEW if cell.owners == 3 else OTHER
    with another_host(moves) as hosts:
        terms = {"hosts": hosts, "faults": faults, "max_failures": 8, "stall_timeout": 30.0}
        found = scaled(tmp_path, {2: cell.owners}, 9, **terms)
    assert differences(found, undisturbed(9)) == []
    assert missed(faults) == []
    assert any("the owners stay as they are" in line for line in caplog.messages) == cell.stay


@pytest.mark.thorough
def test_what_a_rank_has_pushed_since_it_came_back_counts_and_not_what_it_left_when_it_died(
    tmp_path: Path, undisturbed: Any
) -> None:
    """It dies between two pushes of the step that is held, and comes back before other owners take over: these find the
    gradients that its first life has left, too."""
    pushing = Fault("rank 1", "rank.pushed", nth=2)
    faults = Faults(
        tmp_path,
        (
            Fault(LEAD, "owner.hold", "delay", seconds=1.0),
            pushing,
            Fault(OTHER, "owner.settle"),  # so that the change waits for both, and is tried again
            Fault(LEAD, "owner.settle", "delay", nth=2, seconds=1.5),  # meanwhile the rank pushes everything again
        ),
        waits=True,
    )
    for index, fault in enumerate(faults.faults):
        if fault is not pushing:
            faults.ask(index)

    def let_it_push() -> None:
        while faults.struck(0) is None:
            time.sleep(0.01)
        faults.ask(1)

    threading.Thread(target=let_it_push, daemon=True).start()
    assert differences(scaled(tmp_path, {2: 1}, 16, max_failures=2, faults=faults), undisturbed(16)) == []
    assert missed(faults) == []


def kill_meanwhile(faults: Faults, folder: Path, rank: int) -> None:
    """Kill a rank while the first fault delays its process."""
    while faults.struck(0) is None:
        time.sleep(0.01)
    os.kill(int((folder / f"rank-{rank}").read_text()), signal.SIGKILL)
