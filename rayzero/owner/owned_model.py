"""An owner's part of a model: created at the first attach, from a plan that fits the host; how it is restored from a
checkpoint. And what its ranks' loops need to go on from their latest steps, kept where it outlives a rank."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rayzero.checkpoint.manifest import slots_of
from rayzero.checkpoint.reader import CheckpointReader
from rayzero.errors import CheckpointError, HandshakeError, StoreError
from rayzero.kernels import ADAMS, Squares, check_moments, choose_squares
from rayzero.kernels.moments import moment_bytes
from rayzero.layout.model_layout import ModelLayout
from rayzero.layout.shard_map import ShardMap
from rayzero.memory.planner import OwnerPlan, check_budget, check_device, check_host, plan_owner
from rayzero.memory.process_memory import host_limits
from rayzero.owner.memory import DeviceStates, HostMemory, LeftOnDevice, MemoryMaker
from rayzero.owner.rules import AdamRule, ClassRule, UpdateRule
from rayzero.owner.shard import OwnedShard, allocate
from rayzero.protocol.hyper import resolve_optimizer
from rayzero.protocol.messages import (
    COMPUTE,
    LOOP_PARTS,
    LOOP_STEPS,
    MASTER,
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

    owner: int  # its index
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
    if terms.memory_budget is not None:
        check_budget(plan, terms.memory_budget, taken=memory_taken)
    if maker is None or not maker.takes_over:  # what it takes over is part of what its host has in use
        check_host(plan, host_limits())
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
        owner=owner,
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


def restore_checkpoint(path: str, shards: Mapping[int, OwnedShard], rule: UpdateRule, optimizer: str) -> int:
    """Fill shards from a checkpoint that any number of owners wrote, with any shard size; returns its step.

    ``optimizer``: this run's ``ModelSpec.classes``. Raises CheckpointError, before anything is filled,
    if a parameter of these shards is missing, has another shape, or is frozen in one and trained in the other, or if
    the optimizer's class differs; later if its states do. Hyper-parameters and the number of parameter groups may
    differ: they come with each decision from the run's own optimizer, and the restored values belong to parameters, not
    to groups."""
    with CheckpointReader(path) as reader:
        reader.require_classes(optimizer)
        _check_parameters(reader, shards)
        for owned in shards.values():
            values = owned.widest()
            for index in range(len(owned.slices)):
                _restore_slice(reader, owned, index, rule, values)
            owned.publish(values)
        return reader.step


def _check_parameters(reader: CheckpointReader, shards: Mapping[int, OwnedShard]) -> None:
    saved = {slot.name: (slot.shape, unit.trainable) for unit, slot in slots_of(reader.layout)}
    for unit in {owned.unit.index: owned.unit for owned in shards.values()}.values():
        for slot in unit.slots:
            if slot.name not in saved:
                raise CheckpointError(
                    f"{reader.directory} has no parameter {slot.name!r}, which the model has with shape {slot.shape}"
                )
            shape, trained = saved[slot.name]
            if shape != slot.shape:
                raise CheckpointError(
                    f"{slot.name!r} has shape {shape} in {reader.directory}, but {slot.shape} in the model"
                )
            if trained != unit.trainable:
                raise CheckpointError(
                    f"{slot.name!r} is {_mode(trained)} in {reader.directory}, but {_mode(unit.trainable)} in this run"
                )


def _mode(trained: bool) -> str:
    return "trained" if trained else "frozen"


def _restore_slice(reader: CheckpointReader, owned: OwnedShard, index: int, rule: UpdateRule, values: Tensor) -> None:
    """Fill one slice of ``values`` (the shard's master or published values), and its states."""
    part = owned.slices[index]
    slot = owned.unit.slots[part.slot]
    start, stop = part.param_start, part.param_start + part.numel
    # whether frozen parameters have masters may have changed since the save
    wanted = MASTER if MASTER in reader.kinds(slot.name) else COMPUTE
    values[part.start : part.stop].copy_(reader.read_slice(slot.name, wanted, start, stop))
    if owned.trainable:
        owned.steps[index] = reader.slot_step(slot.name)
        states = set(reader.kinds(slot.name)) - {MASTER}
        if rule.state_kinds:
            _check_states(reader, slot.name, states, rule.state_kinds)
        rule.adopt(owned, index, states)
        own, ours = reader.own_shapes(slot.name), rule.own_shapes(owned, index)
        if differing := sorted(kind for kind in states & {*own, *ours} if own.get(kind) != ours.get(kind)):
            raise CheckpointError(
                f"{reader.directory} has {differing[0]} of {slot.name!r} in shape {own.get(differing[0], slot.shape)}, "
                f"but this run keeps it in {ours.get(differing[0], slot.shape)}; use the same options"
            )
        saved = {k: reader.read_whole(slot.name, k) for k in states & own.keys()}
        saved |= {k: reader.read_slice(slot.name, k, start, stop) for k in states - own.keys()}
        rule.restore(owned, index, saved)
        if not rule.state_kinds:  # the class creates these states itself, so they are known only now
            _check_states(reader, slot.name, states, rule.slice_states(owned, index))


def _check_states(reader: CheckpointReader, param: str, saved: Iterable[str], ours: Iterable[str]) -> None:
    if sorted(saved) != sorted(ours):
        raise CheckpointError(
            f"{reader.directory} has the optimizer states {sorted(saved)} of {param!r}, but this run keeps "
            f"{sorted(ours)}; use the options that give the same states (amsgrad, momentum, ...)"
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
