"""An owner's file of a checkpoint, and its way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rayzero.checkpoint.manifest import owner_file_name, slots_of
from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.writer import staging_path, write_tensors
from rayzero.errors import CheckpointError
from rayzero.owner.shard import OwnedShard
from rayzero.owner.update.rules import UpdateRule
from rayzero.protocol.messages import COMPUTE, MASTER, FileEntry

Piece = tuple[str, Tensor, dict[str, Any]]  # name in the file, 1D values, what they are


def write_snapshot(shards: Iterable[OwnedShard], rule: UpdateRule, owner: int, directory: Path) -> FileEntry:
    """Write the shards as they are now into ``staging_path(directory)``. The caller keeps them still."""
    pieces = [piece for owned in shards for piece in _pieces(owned, rule)]
    tensors = {name: tensor for name, tensor, _ in pieces}
    content = {name: described for name, _, described in pieces}
    return write_tensors(staging_path(directory), owner_file_name(owner), tensors, content)


def _pieces(owned: OwnedShard, rule: UpdateRule) -> Iterator[Piece]:
    for index, part in enumerate(owned.slices):
        slot = owned.unit.slots[part.slot]
        described: dict[str, Any] = {
            "param": slot.name,
            "start": part.param_start,
            "stop": part.param_start + part.numel,
            "shape": list(slot.shape),
        }
        if owned.master is None:
            kinds = {COMPUTE: owned.params[part.start : part.stop]}
        else:
            kinds = {MASTER: owned.master[part.start : part.stop]}
        if owned.trainable:
            described["step"] = owned.steps[index]
            kinds |= rule.slice_states(owned, index)
        for kind, tensor in kinds.items():
            yield f"{slot.name}/{kind}/{part.param_start}", tensor, described | {"kind": kind}


def restore_snapshot(path: str, shards: Mapping[int, OwnedShard], rule: UpdateRule, optimizer: str) -> int:
    """Fill shards from a checkpoint, whatever owners and grid it was written with; returns its step.

    ``optimizer``: this run's class, as ``ModelSpec.optimizer`` has it. Raises CheckpointError, before anything is
    filled, where a parameter of these shards is missing there, has another shape, or is frozen on one side and
    trained on the other, and where the optimizer's class differs; then where its states do. Hyper-parameters and the
    number of parameter groups may differ: they come with each decision from the run's own optimizer, and what is
    restored here belongs to parameters, not to groups."""
    with CheckpointReader(path) as reader:
        _check_optimizer(reader, optimizer)
        _check_parameters(reader, shards)
        for owned in shards.values():
            for index in range(len(owned.slices)):
                _restore_slice(reader, owned, index, rule)
            owned.publish_master()
        return reader.step


def _check_optimizer(reader: CheckpointReader, ours: str) -> None:
    saved = reader.spec.optimizer
    if saved != ours:
        raise CheckpointError(
            f"{reader.directory} was written with optimizer {saved!r}, this run has {ours!r}; use the same class"
        )


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


def _restore_slice(reader: CheckpointReader, owned: OwnedShard, index: int, rule: UpdateRule) -> None:
    part = owned.slices[index]
    slot = owned.unit.slots[part.slot]
    start, stop = part.param_start, part.param_start + part.numel
    wanted = MASTER if MASTER in reader.kinds(slot.name) else COMPUTE  # what is kept of frozen ones may have changed
    target = owned.params if owned.master is None else owned.master
    target[part.start : part.stop].copy_(reader.read_slice(slot.name, wanted, start, stop))
    if owned.trainable:
        owned.steps[index] = reader.slot_step(slot.name)
        states = set(reader.kinds(slot.name)) - {MASTER}
        if rule.state_kinds:
            _check_states(reader, slot.name, states, rule.state_kinds)
        rule.restore(owned, index, {kind: reader.read_slice(slot.name, kind, start, stop) for kind in states})
        if not rule.state_kinds:  # the class makes its own: known once they are there
            _check_states(reader, slot.name, states, rule.slice_states(owned, index))


def _check_states(reader: CheckpointReader, param: str, saved: Iterable[str], ours: Iterable[str]) -> None:
    if sorted(saved) != sorted(ours):
        raise CheckpointError(
            f"{reader.directory} has the optimizer states {sorted(saved)} of {param!r}, this run keeps {sorted(ours)}; "
            "use the options that make the same states (amsgrad, momentum, ...)"
        )
