"""Writes an owner's file of a checkpoint, and restores shards from a checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.checkpoint.files.tensor_file import DeferredTensor
from rayzero.checkpoint.manifest import owner_file_name, slots_of
from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.writer import staging_path, write_tensors
from rayzero.concurrency.futures import fail, failed, settle
from rayzero.errors import CheckpointError, RayZeroError, StoreError
from rayzero.layout.model_layout import SlotSlice
from rayzero.owner.shard import OwnedShard
from rayzero.owner.update.rules import UpdateRule
from rayzero.owner.updater import Updater
from rayzero.protocol.messages import COMPUTE, MASTER, FileEntry
from rayzero.telemetry.names import (
    CHECKPOINT_BYTES,
    CHECKPOINT_FAILURES,
    CHECKPOINT_SECONDS,
    CHECKPOINT_STALL_SECONDS,
)
from rayzero.telemetry.recorder import Recorder


class CheckpointWriter:
    """Writes an owner's file of each requested version, once that version is published and before a later update.

    Knows shards and versions; not what else belongs to a checkpoint. Any thread may ask; the updater's thread, which
    makes versions, writes the files."""

    def __init__(
        self,
        owner: int,
        shards: Mapping[int, OwnedShard],
        rule: UpdateRule,
        updater: Updater,
        recorder: Recorder,
        *,
        version: int,
    ) -> None:
        """``version``: the version that the shards start at."""
        self._owner, self._shards, self._rule = owner, shards, rule
        self._updater, self._recorder = updater, recorder
        self._version = version  # the newest version whose update has run
        self._lock = threading.Lock()
        self._asked: dict[int, list[tuple[Path, Future[FileEntry]]]] = {}  # by version
        self._error: StoreError | None = None

    def ask(self, version: int, directory: Path) -> Future[FileEntry]:
        """See ``ShardService.write_checkpoint``."""
        future: Future[FileEntry] = Future()
        with self._lock:
            if self._error is not None:
                return failed(self._error)
            self._asked.setdefault(version, []).append((directory, future))
        self._updater.submit(self._write_due)
        return future

    def reached(self, version: int) -> None:
        """Every shard is published at ``version``. Called in the updater's thread, before a later update."""
        self._version = version
        self._write_due()

    def _write_due(self) -> None:
        with self._lock:
            due = [(version, *asked) for version in sorted(self._asked) for asked in self._asked[version]]
            self._asked = {version: asked for version, asked in self._asked.items() if version > self._version}
        for version, directory, future in due:
            if version == self._version:
                self._write(version, directory, future)
            elif version < self._version:
                decided = f"optimizer {self._owner} has decided step {self._version - 1}"
                fail(future, StoreError(f"v{version} cannot be saved: {decided}"))

    def _write(self, version: int, directory: Path, future: Future[FileEntry]) -> None:
        started = time.perf_counter()
        over = self._recorder.spans.begin("checkpoint", directory.name, version - 1)
        try:
            entry = self._write_file(version, directory)
        except (OSError, RayZeroError) as exc:
            self._recorder.add(CHECKPOINT_FAILURES)
            fail(future, exc)
        except Exception as exc:  # ends the run, but who waits for the file would hear nothing of that
            fail(future, StoreError(f"optimizer {self._owner} failed: {exc!r}"))
            raise
        else:
            self._recorder.observe(CHECKPOINT_SECONDS, time.perf_counter() - started, phase="write")
            self._recorder.set(CHECKPOINT_BYTES, entry.size_bytes)
            settle(future, entry)
        over()
        self._recorder.add(CHECKPOINT_STALL_SECONDS, time.perf_counter() - started)

    def _write_file(self, version: int, directory: Path) -> FileEntry:
        stale = [owned for owned in self._shards.values() if owned.published != version]
        if stale:
            raise StoreError(f"{stale[0].unit.name!r} is at v{stale[0].published}, v{version} cannot be saved")
        whole = lru_cache(maxsize=1)(lambda owned: owned.read(COMPUTE))  # entries of a shard follow each other

        def decoded(owned: OwnedShard, part: SlotSlice) -> Tensor:
            values: Tensor = whole(owned)
            return values[part.start : part.stop]

        entries = [entry for owned in self._shards.values() for entry in _entries(owned, self._rule, decoded)]
        tensors = {name: tensor for name, tensor, _ in entries}
        content = {name: described for name, _, described in entries}
        return write_tensors(staging_path(directory), owner_file_name(self._owner), tensors, content)

    def fail(self, error: StoreError, last_version: int) -> None:
        """No version after ``last_version`` will be made: every request for one, made before or later, fails with
        ``error``."""
        with self._lock:
            self._error = self._error or error
            never = [asked for version in self._asked if version > last_version for asked in self._asked[version]]
            self._asked = {version: asked for version, asked in self._asked.items() if version <= last_version}
        for _, future in never:
            fail(future, error)


def _entries(
    owned: OwnedShard, rule: UpdateRule, decoded: Callable[[OwnedShard, SlotSlice], Tensor]
) -> Iterator[tuple[str, Tensor | DeferredTensor, dict[str, Any]]]:
    """(name in the file, 1D values, their description) of each entry. ``decoded``: a slice of a coded shard."""
    for index, part in enumerate(owned.slices):
        slot = owned.unit.slots[part.slot]
        described: dict[str, Any] = {
            "param": slot.name,
            "start": part.param_start,
            "stop": part.param_start + part.numel,
            "shape": list(slot.shape),
        }
        kinds: dict[str, Tensor | DeferredTensor]
        if owned.master is not None:
            kinds = {MASTER: owned.master[part.start : part.stop]}
        elif owned.unit.is_coded:
            make = partial(decoded, owned, part)
            kinds = {COMPUTE: DeferredTensor(numel=part.numel, dtype=owned.unit.dtype, make=make)}
        else:
            kinds = {COMPUTE: owned.params[part.start : part.stop]}
        if owned.trainable:
            described["step"] = owned.steps[index]
            kinds |= rule.slice_states(owned, index)
        for kind, tensor in kinds.items():
            packed = {"moments": rule.packs} if rule.packs and tensor.dtype is torch.uint8 else {}
            yield f"{slot.name}/{kind}/{part.param_start}", tensor, described | packed | {"kind": kind}


def restore_checkpoint(path: str, shards: Mapping[int, OwnedShard], rule: UpdateRule, optimizer: str) -> int:
    """Fill shards from a checkpoint that any number of owners wrote, with any shard size; returns its step.

    ``optimizer``: this run's class, as in ``ModelSpec.optimizer``. Raises CheckpointError, before anything is filled,
    if a parameter of these shards is missing, has another shape, or is frozen in one and trained in the other, or if
    the optimizer's class differs; later if its states do. Hyper-parameters and the number of parameter groups may
    differ: they come with each decision from the run's own optimizer, and the restored values belong to parameters, not
    to groups."""
    with CheckpointReader(path) as reader:
        _check_optimizer(reader, optimizer)
        _check_parameters(reader, shards)
        for owned in shards.values():
            values = owned.widest()
            for index in range(len(owned.slices)):
                _restore_slice(reader, owned, index, rule, values)
            owned.publish(values)
        return reader.step


def _check_optimizer(reader: CheckpointReader, ours: str) -> None:
    saved = reader.spec.optimizer
    if saved != ours:
        raise CheckpointError(
            f"{reader.directory} was written with optimizer {saved!r}, but this run has {ours!r}; use the same class"
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
        rule.restore(owned, index, {kind: reader.read_slice(slot.name, kind, start, stop) for kind in states})
        if not rule.state_kinds:  # the class creates these states itself, so they are known only now
            _check_states(reader, slot.name, states, rule.slice_states(owned, index))


def _check_states(reader: CheckpointReader, param: str, saved: Iterable[str], ours: Iterable[str]) -> None:
    if sorted(saved) != sorted(ours):
        raise CheckpointError(
            f"{reader.directory} has the optimizer states {sorted(saved)} of {param!r}, but this run keeps "
            f"{sorted(ours)}; use the options that give the same states (amsgrad, momentum, ...)"
        )
