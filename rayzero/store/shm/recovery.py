"""Decides what can be recovered from a dead run's shared memory, from its files alone.

An update overwrites masters and moments tile by tile. So an owner that dies in the middle leaves tiles of version n,
tiles of n + 1, and the tiles that its threads were writing, which are of neither, but have an entry in the native
kernel's undo log. The update can be finished: the decision was recorded before any tile changed, and the ranks'
gradients stay in their memory until n + 1 is published.

The states of a rank's loop at its latest three steps lie in a slab that the rank writes, for its next life, which
begins on the same host.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import torch

from rayzero.errors import HandshakeError
from rayzero.kernels.stamps import torn
from rayzero.protocol.gradient_sum import FormerRank
from rayzero.protocol.messages import (
    AT_HOME,
    LOOP_PARTS,
    LOOP_STEPS,
    Action,
    Decision,
    LoopState,
    ModelSpec,
    SharedPaths,
)
from rayzero.protocol.ownership import Ownership
from rayzero.slabs.arena import Arena
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import FoundSlab
from rayzero.store.shm.shard_lines import APPLIED, DECIDED, INDEX, PUBLISHED, TILES, tile_stamps, undo_copy
from rayzero.store.shm.shared_plan import ON_DEVICE, RANK, SharedPlan, life_of, of_lineage
from rayzero.store.shm.signals import Cell, load_acquire_64
from rayzero.store.shm.words import Stamps, cells_in, leads, read_ownership, read_records, region, stands

_HEAD = struct.Struct("<qI")  # step, part
_LEAST = 32 << 10  # bytes of a state that the first slab has room for


class LoopSlab:
    """One slab: a cell for each part of each of ``LOOP_STEPS`` steps."""

    def __init__(self, slab: Slab) -> None:
        self.slab, self._cells = slab, cells_in(slab, "states")

    @classmethod
    def create(cls, plan: SharedPlan, rank: int, incarnation: int, room: int, directory: Path) -> LoopSlab:
        """Make a slab for states of at most ``room`` bytes. ``incarnation``: of the rank's slabs.

        Raises MemoryPlanError if there is no room."""
        capacity = _HEAD.size + max(_LEAST, 1 << (room - 1).bit_length())
        stride = Cell.bytes_for(capacity)
        facts = plan.facts("loop", rank, RANK, incarnation)
        return cls(Slab.create(lay_out_slab(facts, [("states", stride * LOOP_STEPS * LOOP_PARTS, stride)]), directory))

    def takes(self, state: LoopState) -> bool:
        """Whether the state fits."""
        return _HEAD.size + len(state.content) <= self._cells[0].capacity

    def write(self, state: LoopState) -> None:
        """Keep a state over the one of ``LOOP_STEPS`` steps before."""
        cell = self._cells[state.step % LOOP_STEPS * LOOP_PARTS + state.part]
        cell.write(_HEAD.pack(state.step, state.part) + state.content)

    def states(self) -> Iterator[LoopState]:
        """The states that are whole."""
        for cell in self._cells:
            if (found := cell.read()) is not None:
                step, part = _HEAD.unpack_from(found[1])
                yield LoopState(step=step, part=part, content=found[1][_HEAD.size :])

    def close(self) -> None:
        """Unmap the slab; its maker removes it."""
        self.slab.close()


def loop_states(plan: SharedPlan, rank: int, directory: Path) -> list[LoopState]:
    """What the lives of a rank have kept of its loop on this host: the states of the newest ``LOOP_STEPS`` steps, in
    their order, each part once, as the last life has it. Raises HandshakeError if a slab cannot be read."""
    found = [(facts, slab.path) for slab, facts in of_lineage(plan.spec, directory)]
    mine = [(facts.incarnation, path) for facts, path in found if (facts.role, facts.index) == ("loop", rank)]
    parts: dict[tuple[int, int], LoopState] = {}
    for _, path in sorted(mine):
        if (there := _attached(plan, f"rank {rank}", path)) is not None:
            parts |= {(state.step, state.part): state for state in LoopSlab(there).states()}
            there.close()
    oldest = max((step for step, _ in parts), default=0) - LOOP_STEPS
    return [state for (step, _), state in sorted(parts.items()) if step > oldest]


def _attached(plan: SharedPlan, who: str, path: Path) -> Slab | None:
    """None: the life that made it has ended meanwhile, and has removed it."""
    try:
        return plan.attach(str(path), who, writable=False)
    except HandshakeError:
        if path.exists():
            raise
        return None


class Outcome(StrEnum):
    """What is left of a run."""

    WHOLE = "whole"  # every shard has all bytes of one version, and no later decision was made
    REDO = "redo"  # the recorded decision can bring the tiles that are behind to its version
    REFUSED = "refused"  # no version can be recovered here: use a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadShard:
    """What the line and the stamps of a shard say. A version that never was is -1."""

    shard: int
    owner: int
    published: int
    decided: int
    applied: int
    tiles: tuple[int, ...]  # stamps (kernels/stamps.py); empty: frozen, or on_device
    undone: frozenset[int] = frozenset()  # of the tiles that were being written, those in the undo log
    on_device: bool = False  # its masters and states were in a device's memory

    @property
    def version(self) -> int:
        """The newest version of which all bytes were there."""
        return max(self.published, self.applied)

    @property
    def begun(self) -> bool:
        """Some tiles may be of the next version."""
        return any(stamp > 2 * self.version for stamp in self.tiles)

    @property
    def behind(self) -> tuple[int, ...]:
        """Tiles that the next version has not reached."""
        return tuple(tile for tile, stamp in enumerate(self.tiles) if stamp < 2 * (self.version + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadRun:
    """What this host still has of a run that has lost an owner."""

    run: str
    num_owners: int
    shards: tuple[DeadShard, ...]
    records: tuple[Decision, ...]  # whole slots of the lead's record
    ranks: frozenset[int]  # ranks whose gradients are here
    lives: tuple[int, ...]  # owner index of each control slab; a repeated index has slabs of two lives
    ownership: Ownership | None = None  # who owned what; None: it was the run's first epoch
    world_size: int = 0
    began: int = 0  # the version with which the run began
    loops: Mapping[int, frozenset[tuple[int, int]]] = field(default_factory=dict)  # rank -> (step, part) that is kept
    rank_life: int = 0  # the highest life of a rank

    @property
    def doors(self) -> range:
        """The owners without shards, of which nothing is needed."""
        return range(0) if self.ownership is None else self.ownership.door_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryVerdict:
    """What can be recovered, and why."""

    outcome: Outcome
    version: int  # the version that WHOLE has, or that REDO makes; -1 for REFUSED
    reason: str
    behind: tuple[tuple[int, tuple[int, ...]], ...] = ()  # REDO: (shard, tiles to update); no tiles: publish it


def assess(run: DeadRun) -> RecoveryVerdict:
    """Decide what can be recovered of a run."""
    refusal = next(_refusals(run), None)
    if refusal is not None:
        return RecoveryVerdict(outcome=Outcome.REFUSED, version=-1, reason=refusal)
    version, record = _target(run), _record(run, _target(run))
    late = [shard for shard in run.shards if shard.version < version]
    if not late:
        return RecoveryVerdict(
            outcome=Outcome.WHOLE, version=version, reason=f"all {len(run.shards)} shards have v{version}"
        )
    behind = tuple((s.shard, s.behind if record is None or record.action is Action.APPLY else ()) for s in late)
    tiles = sum(len(tiles) for _, tiles in behind)
    reason = f"step {version - 1} was decided; {tiles} tiles of {len(late)} of {len(run.shards)} shards lack its update"
    return RecoveryVerdict(outcome=Outcome.REDO, version=version, reason=reason, behind=behind)


def _target(run: DeadRun) -> int:
    """The newest version that a shard has or has begun, or that was decided."""
    reached = [shard.version + shard.begun for shard in run.shards]
    return max([*reached, *(shard.decided for shard in run.shards), *(r.step + 1 for r in run.records)])


def _record(run: DeadRun, version: int) -> Decision | None:
    return next((record for record in run.records if record.step == version - 1), None)


def _refusals(run: DeadRun) -> Iterator[str]:
    """Every reason why no version can be recovered, the most telling first."""
    twice = sorted({owner for owner in run.lives if run.lives.count(owner) > 1})
    if twice:
        yield f"optimizers {twice} left slabs of two lives"
    missing = sorted(set(range(run.num_owners)) - set(run.lives) - set(run.doors))
    if missing:
        yield f"optimizers {missing} left nothing on this host"
    for shard in run.shards:
        if shard.version < 0:
            yield f"shard {shard.shard} of optimizer {shard.owner} never had values"
        if shard.on_device:
            yield f"masters and states of shard {shard.shard} of optimizer {shard.owner} were in a device's memory"
        if cut := sorted(set(torn(shard.tiles)) - shard.undone):
            where = f"shard {shard.shard} of optimizer {shard.owner}"
            yield f"tiles {cut} of {where} were being written, without an undo log"
    version = _target(run)
    late = [shard for shard in run.shards if shard.version < version]
    if any(shard.version < version - 1 for shard in late):
        yield f"shard {late[0].shard} is at v{late[0].version}, more than one decision behind v{version}"
    record = _record(run, version)
    if late and record is None:
        yield f"the decision of step {version - 1} is not recorded on this host"
    if late and record is not None and record.action is Action.APPLY:
        gone = sorted(set(range(len(record.attempts))) - run.ranks)
        if gone:
            yield f"gradients of ranks {gone} are not on this host"


# ---- reading the files


def dead_runs(slabs: Sequence[FoundSlab]) -> list[DeadRun]:
    """Every run that has lost an owner, by name. What its other processes still write may be missed."""
    by_run: dict[tuple[str, str], list[FoundSlab]] = defaultdict(list)
    for slab in slabs:
        if slab.header is not None:
            by_run[slab.header.facts.run, slab.header.facts.lineage].append(slab)
    lost = {run for run, found in by_run.items() if any(not s.alive and _is_owner(s) for s in found)}
    return [read for run in sorted(lost) if (read := read_run(run[0], by_run[run])) is not None]


def _is_owner(slab: FoundSlab) -> bool:
    return slab.header is not None and bool(slab.header.regions_of("versions"))


def read_run(run: str, found: Sequence[FoundSlab]) -> DeadRun | None:
    """What the slabs of one run say, all of one lineage; None if no owner's control slab is among them."""
    with ExitStack() as stack:
        small = [
            entry for entry in found if entry.header is not None and entry.header.facts.role in ("control", "loop")
        ]
        slabs = [slab for entry in small if (slab := opened(stack, entry)) is not None]
        owners = standing([slab for slab in slabs if slab.header.regions_of("versions")])
        if not owners:
            return None
        orders = region(owners[0], "orders")
        return DeadRun(
            run=run,
            num_owners=orders.bytes // orders.stride,
            shards=tuple(sorted((s for slab in owners for s in _read_lines(slab)), key=lambda s: s.shard)),
            records=tuple(record.decision for slab in owners for record in read_records(slab)),
            ranks=frozenset(slab.header.facts.index for slab in slabs if slab.header.regions_of("stamps")),
            lives=tuple(slab.header.facts.index for slab in owners),
            ownership=read_ownership(owners[0]),
            world_size=region(owners[0], "joined").bytes // 8,
            began=max(load_acquire_64(slab.address(region(slab, "began").offset)) for slab in owners) - 1,
            loops=_read_loops(slabs),
            rank_life=max(
                (life_of(s.header.facts.incarnation) for s in slabs if s.header.facts.kernel == RANK), default=0
            ),
        )


def standing(owners: Sequence[Slab]) -> list[Slab]:
    """The control slabs of the epoch that stands: those of the one before are removed later, and those of the next one
    are made before it does."""
    epochs = [slab.header.facts.epoch for slab in owners if leads(slab) and stands(slab)]
    return [slab for slab in owners if slab.header.facts.epoch == max(epochs)] if epochs else []


def _read_loops(slabs: Sequence[Slab]) -> dict[int, frozenset[tuple[int, int]]]:
    found: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for slab in slabs:
        if slab.header.facts.role == "loop":
            found[slab.header.facts.index] |= {(each.step, each.part) for each in LoopSlab(slab).states()}
    return {rank: frozenset(parts) for rank, parts in found.items()}


def opened(stack: ExitStack, found: FoundSlab) -> Slab | None:
    """A slab, mapped for reading until the stack ends; None: it is gone."""
    assert found.header is not None
    facts = found.header.facts
    try:
        slab = Slab.attach(found.path, writable=False, run=facts.run, layout_digest=facts.layout_digest)
    except HandshakeError:  # gone since it was listed
        return None
    stack.callback(slab.close)
    return slab


def _read_lines(slab: Slab) -> Iterator[DeadShard]:
    """What an owner's control slab says of its shards. A dead owner's slab no longer changes."""
    found, undo = region(slab, "versions"), region(slab, "undo")
    words = slab.tensor(undo.offset, undo.bytes // 8, torch.int64).view(-1, undo.stride // 8)
    copy = undo_copy(slab)
    entries = {(tile, stamp) for tile, stamp in words[:, :2].tolist()}
    for line in range(slab.address(found.offset), slab.address(found.offset) + found.bytes, found.stride):
        first = load_acquire_64(line + TILES) - 1
        tiles = tuple(tile_stamps(slab, line, first).tolist()) if 0 <= first < ON_DEVICE else ()
        cut = torn(tiles)
        kept = copy is not None and any(copy.words.tolist() == [tiles[tile] + 1, first] for tile in cut)
        yield DeadShard(
            shard=load_acquire_64(line + INDEX),
            owner=slab.header.facts.index,
            published=load_acquire_64(line + PUBLISHED) - 1,
            decided=load_acquire_64(line + DECIDED) - 1,
            applied=load_acquire_64(line + APPLIED) // 2 - 1,
            tiles=tiles,
            undone=frozenset(tile for tile in cut if kept or (first + tile, tiles[tile]) in entries),
            on_device=first == ON_DEVICE,
        )


# ---- dead ranks, for the living processes of their run


def former_ranks(plan: SharedPlan, who: str, directory: Path, step: int) -> Mapping[int, FormerRank]:
    """What dead ranks have pushed of ``step``, by rank. If several lives of a rank have, only the last one counts.
    ``who``: the process that maps it, for messages."""
    lives: dict[int, dict[int, dict[str, list[Path]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for slab, facts in of_lineage(plan.spec, directory):
        if not slab.alive and _is_of_rank(facts):
            lives[facts.index][facts.incarnation][facts.role].append(slab.path)
    found = {}
    for rank, slabs in lives.items():
        for incarnation in sorted(slabs, reverse=True):
            control, grads = slabs[incarnation]["control"], slabs[incarnation]["grads"]
            if not control or len(grads) < len(plan.gradients().slabs):
                continue  # it died while it made them
            try:
                left = _former_rank(plan, who, SharedPaths(str(control[0]), tuple(map(str, grads))))
            except HandshakeError:
                if all(path.exists() for path in (control[0], *grads)):
                    raise
                continue  # the rank's present life has removed it: all that was pushed there is applied
            if any(pushed.step == step for _, pushed in left.pushed):
                found[rank] = left
                break
    return found


def _former_rank(plan: SharedPlan, who: str, files: SharedPaths) -> FormerRank:
    control = plan.attach(files.control, who, writable=False)
    slabs = [plan.attach(path, who, writable=False, life=control.header.facts) for path in files.tensors]
    slabs.sort(key=lambda slab: slab.header.facts.number)
    gradients, announced = Arena(plan.gradients(), slabs), Stamps(control, plan).news()
    memory = plan.gradient_memory(gradients)
    pushed = [(unit, each) for unit, pushes in announced for each in pushes]
    homes = {(unit, AT_HOME - each.place) for unit, each in pushed if each.place < AT_HOME}
    more = {key: gradients.tensor(key) for key in homes}
    left = FormerRank(replace(memory, more=lambda unit, number: more[unit, number]), pushed)
    for slab in (control, *slabs):
        slab.close()  # the tensors keep what is mapped
    return left


def remove_former_lives(spec: ModelSpec, rank: int, life: int, directory: Path) -> None:
    """Remove what the lives of a rank before ``life`` have left. What is mapped stays mapped."""
    for slab, facts in of_lineage(spec, directory):
        theirs = _is_of_rank(facts) or facts.role == "loop"
        if not slab.alive and theirs and facts.index == rank and life_of(facts.incarnation) < life:
            Slab.adopt(slab.path).close()


def _is_of_rank(facts: SlabFacts) -> bool:
    return facts.role == "grads" or (facts.role, facts.kernel) == ("control", RANK)
