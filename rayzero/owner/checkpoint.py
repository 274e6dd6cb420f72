"""Writes an owner's file of a checkpoint, of a version that is held while later updates overwrite the shards.

[Note: copy before update] The file's writer takes the shards in the order in which updates overwrite them, so that many
are written before an update comes to them. What is not, the update copies first. Once the copies take their budget, it
waits for the writer, which needs nothing that an update has. The writer takes pieces of ``PIECE_BYTES`` out of the
shards under the lock, and hashes and writes them outside of it: a disk that stands still holds no update up before the
budget is full. (Copy-on-write of a running program's state: Li, Naughton, Plank, "Real-time, concurrent checkpoint for
parallel programs", 1990.)
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.checkpoint.manifest import owner_file_name
from rayzero.checkpoint.tensor_file import DeferredTensor, StreamedTensor, TensorDecl, declare
from rayzero.checkpoint.writer import staging_path, write_tensors
from rayzero.concurrency.futures import DONE, fail, failed, settle
from rayzero.errors import CheckpointAbandonedError, RayZeroError, StoreClosedError, StoreError
from rayzero.layout.model_layout import SlotSlice
from rayzero.owner.owned_model import OwnedModel
from rayzero.owner.rules import UpdateRule
from rayzero.owner.shard import OwnedShard, Updater
from rayzero.protocol.messages import COMPUTE, MASTER, FileEntry
from rayzero.telemetry.names import (
    CHECKPOINT_BYTES,
    CHECKPOINT_FAILURES,
    CHECKPOINT_SECONDS,
    CHECKPOINT_STALL_SECONDS,
)
from rayzero.telemetry.recorder import Recorder

PIECE_BYTES = 1 << 20  # that the writer copies at once


@dataclass(eq=False)
class _Entry:
    """One tensor of the file."""

    decl: TensorDecl
    values: Tensor | DeferredTensor | None  # None: written
    live: bool = True  # the values are the shard's memory, or are made from it
    copied: int = 0  # bytes of the copy

    @property
    def copy_bytes(self) -> int:
        """What a copy takes."""
        kept = self.values.kept_bytes if isinstance(self.values, DeferredTensor) else 0
        return kept or self.decl.size_bytes

    def make(self) -> Tensor:
        """The values now: a view of the shard's memory, or decoded from it."""
        assert self.values is not None
        return self.values.make() if isinstance(self.values, DeferredTensor) else self.values


class HeldVersion:
    """The tensors of a file, by name, each of one shard; they stay while the shards change.

    Knows tensors, shards and bytes; not files. One thread streams, another one overwrites shards."""

    def __init__(self, tensors: Mapping[str, tuple[int, Tensor | DeferredTensor]], budget: int) -> None:
        """``tensors``: by name, (shard, 1D values in its memory). ``budget``: the most bytes of copies at a time."""
        self._budget = budget
        self._entries = {name: _Entry(declare(values), values) for name, (_, values) in tensors.items()}
        self._of_shard: dict[int, list[_Entry]] = {}
        for name, (shard, _) in tensors.items():
            self._of_shard.setdefault(shard, []).append(self._entries[name])
        self._changed = threading.Condition()
        self.over = False  # nothing has to be held any more
        self._error: BaseException | None = None
        self.copied = self.most_copied = 0  # bytes: now, and the most at a time

    # ---- the file's thread

    def streamed(self) -> dict[str, StreamedTensor]:
        """The tensors for a file, each to be taken once. Taking one raises the error of ``cancel``."""
        return {
            name: StreamedTensor(numel=entry.decl.shape[0], dtype=entry.decl.dtype, parts=partial(self._parts, entry))
            for name, entry in self._entries.items()
        }

    def _parts(self, entry: _Entry) -> Iterator[Tensor]:
        """Pieces, all in one buffer."""
        numel, dtype = entry.decl.shape[0], entry.decl.dtype
        buffer = torch.empty(min(PIECE_BYTES // dtype.itemsize, numel), dtype=dtype, device="cpu")
        for start in range(0, numel, len(buffer)):
            piece = buffer[: numel - start]
            self._take(entry, start, piece)
            yield piece
        with self._changed:
            entry.values, entry.live = None, False
            self.copied -= entry.copied
            self._changed.notify_all()

    def _take(self, entry: _Entry, start: int, piece: Tensor) -> None:
        with self._changed:
            if self._error is not None:
                raise self._error
            if isinstance(entry.values, DeferredTensor):  # decoded once, for all pieces
                entry.values, entry.live = entry.make(), False
            piece.copy_(entry.make()[start : start + len(piece)])

    def end(self) -> None:
        """The file is written, or never will be: nothing has to be held any more. Idempotent."""
        with self._changed:
            self.over = True
            for entry in self._entries.values():
                entry.values, entry.live, entry.copied = None, False, 0
            self.copied = 0
            self._changed.notify_all()

    def cancel(self, error: BaseException) -> None:
        """The file is wanted no more: its stream fails with ``error``."""
        with self._changed:
            self._error = error
        self.end()

    # ---- the updater's thread

    def protect(self, shard: int) -> None:
        """A shard is about to be overwritten: copy what is not written of it. Waits while the budget has no room."""
        for entry in self._of_shard.get(shard, ()):
            self._copy(entry)

    def _copy(self, entry: _Entry) -> None:
        size = entry.copy_bytes
        with self._changed:
            self._changed.wait_for(lambda: self.over or not entry.live or self.copied + size <= self._budget)
            if self.over or not entry.live:
                return
            entry.copied = size
            self.copied += size
            self.most_copied = max(self.most_copied, self.copied)
            values = entry.values
        copy = _copy_of(values)  # nobody else overwrites it
        with self._changed:
            if entry.live:
                entry.values, entry.live = copy, False


def _copy_of(values: Tensor | DeferredTensor | None) -> Tensor | DeferredTensor:
    assert values is not None
    if isinstance(values, DeferredTensor):
        return values.make() if values.keep is None else values.keep()
    return values.to("cpu", copy=True)


@dataclass(frozen=True, eq=False)
class _Request:
    """A file that was asked for."""

    version: int
    directory: Path
    written: Future[FileEntry]


class CheckpointWriter:
    """Writes an owner's file of each requested version, in a thread of its own, while later updates go on.

    Knows shards and versions; not what else belongs to a checkpoint. Any thread may ask. The updater's thread, which
    makes versions, opens each requested one as it is there, and calls ``protect`` before it overwrites a shard
    ([Note: copy before update]). One file is written at a time: a newer request ends an older one, which only a lead
    can have asked for that is dead."""

    def __init__(self, model: OwnedModel, updater: Updater, recorder: Recorder) -> None:
        self._owner, self._shards, self._rule = model.owner, model.shards, model.rule
        self._updater, self._recorder = updater, recorder
        self._version = model.version  # the newest version whose update has run
        self._copies = model.plan.copies  # bytes, the most at a time; 0: an update waits until its shard is written
        self._lock = threading.Lock()
        self._asked: list[_Request] = []  # of versions that are not opened yet
        self._begun: dict[tuple[int, Path], Future[FileEntry]] = {}  # whose files nobody has asked for yet
        self._held: HeldVersion | None = None  # what is being written
        self._writer = Updater(f"checkpoint-{self._owner}", 1, self._on_error)
        self._error: StoreError | None = None

    @property
    def copied_bytes(self) -> int:
        """Bytes of copies now."""
        return 0 if self._held is None else self._held.copied

    # ---- requests

    def begin(self, version: int, directory: Path) -> Future[None]:
        """See ``ShardService.begin_checkpoint``."""
        asked = self._request(version, directory)
        if asked.done() and (error := asked.exception()) is not None:
            return failed(error)
        with self._lock:
            self._begun = {(version, directory): asked}
        return DONE

    def ask(self, version: int, directory: Path) -> Future[FileEntry]:
        """See ``ShardService.write_checkpoint``."""
        with self._lock:
            begun = self._begun.pop((version, directory), None)
        return self._request(version, directory) if begun is None else begun

    def _request(self, version: int, directory: Path) -> Future[FileEntry]:
        request = _Request(version, directory, Future())
        with self._lock:
            if self._error is not None:
                return failed(self._error)
            self._asked.append(request)
        self._updater.submit(self._open_due)
        return request.written

    # ---- the updater's thread

    def reached(self, version: int) -> None:
        """Every shard is published at ``version``. Called before a later update."""
        self._version = version
        self._open_due()

    def protect(self, owned: OwnedShard) -> None:
        """A shard is about to be overwritten."""
        held = self._held
        if held is not None and not held.over:
            started = time.perf_counter()
            held.protect(owned.shard.index)
            self._recorder.add(CHECKPOINT_STALL_SECONDS, time.perf_counter() - started)

    def _open_due(self) -> None:
        with self._lock:
            due = sorted((each for each in self._asked if each.version <= self._version), key=lambda r: r.version)
            self._asked = [each for each in self._asked if each.version > self._version]
        for request in due:
            if request.version == self._version:
                self._open(request)
            else:
                fail(request.written, self._gone(request.version))

    def _gone(self, version: int) -> CheckpointAbandonedError:
        return CheckpointAbandonedError(
            f"v{version} cannot be saved: optimizer {self._owner} has decided step {self._version - 1}; if it has "
            "taken the place of one that died, that one had not finished its file"
        )

    def _open(self, request: _Request) -> None:
        """Hold a version that all shards have, and let its file be written."""
        stale = [owned for owned in self._shards.values() if owned.published != request.version]
        if stale:
            at = f"{stale[0].unit.name!r} is at v{stale[0].published}"
            fail(request.written, StoreError(f"{at}, v{request.version} cannot be saved"))
            return
        try:
            entries = [(owned, *entry) for owned in self._shards.values() for entry in self._entries_of(owned)]
        except RayZeroError as exc:
            fail(request.written, exc)
            return
        held = HeldVersion({name: (owned.shard.index, tensor) for owned, name, tensor, _ in entries}, self._copies)
        if self._held is not None:
            newer = f"optimizer {self._owner} was asked to write v{request.version} before an older version was written"
            self._held.cancel(CheckpointAbandonedError(newer))
        self._held = held
        self._recorder.add(CHECKPOINT_STALL_SECONDS, 0.0)  # so that a file that held nothing up has a rate, of zero
        content = {name: described for _, name, _, described in entries}
        self._writer.submit(lambda: self._write(request, held, content))

    def _entries_of(self, owned: OwnedShard) -> Iterator[_Described]:
        whole = lru_cache(maxsize=1)(lambda: owned.read(COMPUTE))  # entries of a shard follow each other
        return _entries(owned, self._rule, lambda part: whole()[part.start : part.stop])

    # ---- the writer's thread

    def _write(self, request: _Request, held: HeldVersion, content: Mapping[str, Mapping[str, Any]]) -> None:
        started = time.perf_counter()
        over = self._recorder.spans.begin("checkpoint", request.directory.name, request.version - 1)
        try:
            entry = self._write_file(request.directory, held, content)
        except (OSError, RayZeroError) as exc:
            self._recorder.add(CHECKPOINT_FAILURES)
            fail(request.written, exc)
        except Exception as exc:  # ends the run, but who waits for the file would hear nothing of that
            fail(request.written, StoreError(f"optimizer {self._owner} failed: {exc!r}"))
            raise
        else:
            self._recorder.observe(CHECKPOINT_SECONDS, time.perf_counter() - started, phase="write")
            self._recorder.set(CHECKPOINT_BYTES, entry.size_bytes)
            settle(request.written, entry)
        finally:
            held.end()
            over()

    def _write_file(self, directory: Path, held: HeldVersion, content: Mapping[str, Mapping[str, Any]]) -> FileEntry:
        name = owner_file_name(self._owner)
        return write_tensors(staging_path(directory), name, held.streamed(), content, again=False)

    def _on_error(self, error: BaseException) -> None:
        def again() -> None:
            raise error

        self._updater.submit(again)  # whose owner ends the run

    # ---- the end

    def fail(self, error: StoreError, last_version: int) -> None:
        """No version after ``last_version`` will be made: every request for one, made before or later, fails with
        ``error``."""
        with self._lock:
            self._error = self._error or error
            never = [each for each in self._asked if each.version > last_version]
            self._asked = [each for each in self._asked if each.version <= last_version]
        for request in never:
            fail(request.written, error)

    def cancel(self) -> None:
        """End the file that is being written: the owner is closing, and no update may wait for it."""
        if self._held is not None:
            self._held.cancel(StoreClosedError(f"optimizer {self._owner} was closed"))

    def close(self) -> None:
        """End the thread, once nothing is updated any more. Idempotent."""
        self.cancel()
        self._writer.close()


_Described = tuple[str, Tensor | DeferredTensor, dict[str, Any]]  # name in the file, 1D values, their description


def _entries(owned: OwnedShard, rule: UpdateRule, decoded: Callable[[SlotSlice], Tensor]) -> Iterator[_Described]:
    """The entries of a shard. ``decoded``: a slice of a coded one."""
    for index, part in enumerate(owned.slices):
        slot = owned.unit.slots[part.slot]
        described: dict[str, Any] = {
            "param": slot.name,
            "start": part.param_start,
            "stop": part.param_start + part.numel,
            "shape": list(slot.shape),
        }
        kinds: dict[str, Tensor | DeferredTensor]
        if owned.split is not None:
            make = partial(owned.masters, part.start, part.stop)
            kinds = {MASTER: DeferredTensor(numel=part.numel, dtype=torch.float32, make=make)}
        elif owned.master is not None:
            kinds = {MASTER: owned.master[part.start : part.stop]}
        elif owned.unit.is_coded:
            make = partial(decoded, part)
            kinds = {COMPUTE: DeferredTensor(numel=part.numel, dtype=owned.unit.dtype, make=make)}
        else:
            kinds = {COMPUTE: owned.params[part.start : part.stop]}
        if owned.trainable:
            described["step"] = owned.steps[index]
            kinds |= rule.slice_states(owned, index)
        own = rule.own_shapes(owned, index) if owned.trainable else {}
        for kind, tensor in kinds.items():
            more: dict[str, Any] = {"moments": rule.packs} if rule.packs and tensor.dtype is torch.uint8 else {}
            if kind in own:
                more = {"start": 0, "stop": math.prod(own[kind]), "own_shape": list(own[kind])}
            yield f"{slot.name}/{kind}/{part.param_start}", tensor, described | more | {"kind": kind}
