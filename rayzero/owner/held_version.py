"""One version of an owner's shards, held for its file of a checkpoint while later updates overwrite the shards.

[Note: copy before update] The file's writer takes the shards in the order in which updates overwrite them, so that many
are written before an update comes to them. What is not, the update copies first. Once the copies take their budget, it
waits for the writer, which needs nothing that an update has. The writer takes pieces of ``PIECE_BYTES`` out of the
shards under the lock, and hashes and writes them outside of it: a disk that stands still holds no update up before the
budget is full. (Copy-on-write of a running program's state: Li, Naughton, Plank, "Real-time, concurrent checkpoint for
parallel programs", 1990.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rayzero.checkpoint.files.tensor_file import DeferredTensor, StreamedTensor, TensorDecl, declare

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
