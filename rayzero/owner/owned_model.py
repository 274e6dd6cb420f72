"""An owner's part of a model: created at the first attach, from a plan that fits the host. And what its ranks'
loops need to go on from their latest steps, kept where it outlives a rank."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from rayzero.errors import HandshakeError, StoreError
from rayzero.kernels import ADAMS, Squares, check_moments, choose_squares
from rayzero.kernels.moments import moment_bytes
from rayzero.layout.model_layout import ModelLayout
from rayzero.layout.shard_map import ShardMap
from rayzero.memory.planner import OwnerPlan, check_budget, check_device, check_plan, plan_owner
from rayzero.memory.process_memory import host_limits
from rayzero.owner.checkpoint import restore_checkpoint
from rayzero.owner.memory import DeviceStates, HostMemory, LeftOnDevice, MemoryMaker
from rayzero.owner.rules import AdamRule, ClassRule, UpdateRule
from rayzero.owner.shard import OwnedShard, allocate
from rayzero.protocol.hyper import resolve_optimizer
from rayzero.protocol.messages import (
    LOOP_PARTS,
    LOOP_STEPS,
    MOST_LOOP_STATE,
    FormerShard,
    Hyper,
    LoopState,
    ModelSpec,
    canonical_json,
)
from rayzero.protocol.ownership import Ownership, owner_map
from rayzero.protocol.products import multiplying_ranks
from rayzero.quantities import count, format_bytes

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerTerms:
    """What one owner may use, and what it measures: the same for all prepared models of its process."""

    threads: int = 1  # torch threads that compute updates
    memory_budget: int | None = None  # bytes that the plans of its models may need; None: the host's free memory
    norms_every: int | None = None  # steps between measurements of norms by layer group; None: never
    device: torch.device = CPU  # where masters and states lie if it is one of the owners beside ranks


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnedModel:
    """One owner's part of a model."""

    spec: ModelSpec
    attached_by: int  # the rank that sent the spec
    rule: UpdateRule
    square_sum: Squares
    shards: Mapping[int, OwnedShard]  # by shard index, ascending
    plan: OwnerPlan
    memory: HostMemory
    device: DeviceStates | None  # where masters and states lie; None: in ``memory``
    version: int  # the version that the shards start at: 0, the checkpoint's step, or what a former life has left
    first_version: int  # the version that the run began with
    former: Mapping[int, FormerShard]  # by shard index: what a former life has left; empty: there was none

    @property
    def needs_load(self) -> bool:
        """True when rank 0 must send initial weights."""
        if self.former:
            return len(self.former) < len(self.shards)
        return self.spec.restore_from is None


def build_model(
    spec: ModelSpec,
    rank: int,
    owner: int,
    num_owners: int,
    terms: OwnerTerms,
    maker: MemoryMaker | None,
    *,
    ownership: Ownership | None = None,
    memory_taken: int = 0,
    own_gradients: bool,
    left: LeftOnDevice | None = None,
) -> OwnedModel:
    """Plan, check and allocate; take over what a former life of the owner has left, or restore from a checkpoint if the
    spec names one.

    ``maker``: allocates host memory; None: memory of this process. ``ownership``, ``memory_taken``, ``left``: see
    ``ShardService``. ``own_gradients``: see ``plan_owner``.

    Raises MemoryPlanError before anything is allocated, UnsupportedError for an optimizer that cannot run on
    shards, CheckpointError for a checkpoint of another model."""
    shard_map = owner_map(spec, num_owners, ownership)
    on_device, measures_norms = shard_map.on_device(owner), terms.norms_every is not None
    rule = choose_rule(spec, terms.device if on_device else None)
    plan = _plan(spec, shard_map, owner, rule, own_gradients=own_gradients, measures_norms=measures_norms)
    if maker is None or not maker.takes_over:
        check_plan(plan, host_limits(), terms.memory_budget, taken=memory_taken)
    elif terms.memory_budget is not None:  # what it takes over is part of what its host has in use
        check_budget(plan, terms.memory_budget, taken=memory_taken)
    if left is None:
        check_device(plan, terms.device)
    memory = HostMemory() if maker is None else maker.make_memory(spec, rule.kernel, plan)
    device = DeviceStates(memory, terms.device, left) if on_device else None
    shards = allocate(
        *(spec, shard_map.shards_of(owner), rule.state_kinds, memory),
        room=rule.room,
        splits=rule.splits,
        device=device,
    )
    former = {index: found for index in shards if (found := (device or memory).former(index)) is not None}
    version = 0
    if former:
        for index, found in former.items():
            shards[index].take_over(found)
        version = min(found.published for found in former.values())
    elif spec.restore_from is not None:
        version = restore_checkpoint(spec.restore_from, shards, rule, spec.classes)
    return OwnedModel(
        spec=spec,
        attached_by=rank,
        rule=rule,
        square_sum=choose_squares(rule.kernel),
        shards=shards,
        plan=plan,
        memory=memory,
        device=device,
        version=version,
        first_version=memory.first_version(version),
        former=former,
    )


def _plan(
    spec: ModelSpec,
    shard_map: ShardMap,
    owner: int,
    rule: UpdateRule,
    *,
    own_gradients: bool,
    measures_norms: bool,
) -> OwnerPlan:
    return plan_owner(
        spec.layout,
        shard_map,
        owner,
        spec.world_size,
        spec.accumulation_steps,
        state_bytes=rule.room or len(rule.state_kinds) * moment_bytes(spec.moments),
        splits=rule.splits,
        own_gradients=own_gradients,
        measures_norms=measures_norms,
        copies=spec.checkpoint_copies,
        products=multiplying_ranks(spec),
    )


def plan_change(spec: ModelSpec, owner: int, ownership: Ownership, *, measures_norms: bool) -> OwnerPlan:
    """What an owner needs in another epoch."""
    rule = choose_rule(spec)
    shard_map = owner_map(spec, ownership.num_owners, ownership)
    return _plan(spec, shard_map, owner, rule, own_gradients=True, measures_norms=measures_norms)


def choose_rule(spec: ModelSpec, device: torch.device | None = None) -> UpdateRule:
    """The update rule of a spec: tile kernels for exactly Adam and AdamW, the generic rule for every other class,
    subclasses included. ``device``: where states lie; None: the host."""
    cls = resolve_optimizer(spec.optimizer)
    check_moments(spec.moments, cls, spec.hyper)
    if cls in ADAMS:
        return AdamRule(spec, decoupled=cls is torch.optim.AdamW, device=device)
    return ClassRule(spec, cls)


def check_same(ours: OwnedModel, spec: ModelSpec, rank: int, owner: int, *, comes_back: bool) -> None:
    """Raise HandshakeError, naming both sides and what differs, unless ``spec`` is what was attached before.

    comes_back: the rank has died. Its loop may name a newer checkpoint than the one that the run began with, as may
        that of the first rank to meet an owner that has taken over its shards."""
    if spec is ours.spec:  # a transport that hands the same object to a thousand ranks need not have it compared
        return
    for name in (one.name for one in fields(spec)):
        if name == "restore_from" and (comes_back or ours.former):
            continue
        was, now = getattr(ours.spec, name), getattr(spec, name)
        if name == "layout":
            was, now = _layout_difference(was, now)
        if canonical_json(was) != canonical_json(now):
            what = _hyper_difference(was, now) if name == "hyper" else f"{name}: {now!r} against {was!r}"
            raise HandshakeError(
                f"optimizer {owner}: rank {rank} differs from rank {ours.attached_by} in {what}; all ranks must run "
                f"the same model and config"
            )


def _hyper_difference(ours: Sequence[Hyper], theirs: Sequence[Hyper]) -> str:
    """A description of the options that differ, by parameter group: theirs against ours."""
    if len(ours) != len(theirs):
        return f"hyper: {len(theirs)} against {len(ours)} parameter groups"
    found = []
    for group, (was, now) in enumerate(zip(ours, theirs, strict=True)):
        differing = [
            f"{name} {now.get(name, 'absent')!r} against {was.get(name, 'absent')!r}"
            for name in sorted(was.keys() | now.keys())
            if canonical_json(was.get(name, "absent")) != canonical_json(now.get(name, "absent"))
        ]
        if differing:
            found.append(f"{', '.join(differing)} in parameter group {group}")
    return "; ".join(found)


def _layout_difference(ours: ModelLayout, theirs: ModelLayout) -> tuple[str, str]:
    """Descriptions of the first difference, ours and theirs; two equal texts if nothing differs."""
    if ours.digest == theirs.digest:
        return "", ""
    ours_units, their_units = ours.to_json()["units"], theirs.to_json()["units"]
    for a, b in zip(ours_units, their_units, strict=False):
        if a != b:
            return f"{a} ({ours.digest[:8]})", f"{b} ({theirs.digest[:8]})"
    return (
        f"{count(len(ours_units), 'unit')} in shards of {ours.shard_numel} elements ({ours.digest[:8]})",
        f"{count(len(their_units), 'unit')} in shards of {theirs.shard_numel} elements ({theirs.digest[:8]})",
    )


class LoopStates:
    """The latest loop states of every rank. Knows bytes and steps, not what they hold. Thread-safe."""

    def __init__(self) -> None:
        self._states: dict[int, dict[tuple[int, int], LoopState]] = {}  # rank -> (step, part) -> state
        self._lock = threading.Lock()

    def keep(self, rank: int, state: LoopState) -> None:
        """Keep a state; those of older steps are dropped. States may come in any order. Raises StoreError for one that
        no loop has: each is kept in memory."""
        if state.part not in range(LOOP_PARTS) or len(state.content) > MOST_LOOP_STATE:
            raise StoreError(
                f"rank {rank} has part {state.part} of its loop kept, {format_bytes(len(state.content))}; a loop has "
                f"parts 0 to {LOOP_PARTS - 1}, each of at most {format_bytes(MOST_LOOP_STATE)}"
            )
        with self._lock:
            mine = self._states.setdefault(rank, {})
            mine[state.step, state.part] = state
            newest = max(step for step, _ in mine)
            for key in [key for key in mine if key[0] <= newest - LOOP_STEPS]:
                del mine[key]

    def of(self, rank: int) -> list[LoopState]:
        """A rank's states, oldest first."""
        with self._lock:
            return [state for _, state in sorted(self._states.get(rank, {}).items())]
