"""Tile stamps say which version each tile's bytes have; an undo log keeps what the native kernel is about to overwrite.
So an update whose process was killed can be called again, in another process, and is then whole.

[Note: killed between two instructions] A stamp is marked as being written before the tile's first byte changes, and as
whole after its last one has. Stamps are read after the writer's death, when every instruction before that point has
taken effect and none after it, so program order is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.errors import StateLostError

STAMP = 1 << 15  # elements of a stamp's tile; a thread of the native kernel claims as many at once
STAMP_BYTES = 8
UNDO_BYTES = 2240  # an entry of the undo log, one for each thread: ENTRY_BYTES in native/adam.c


@dataclass(frozen=True, slots=True)
class UndoCopy:
    """What one shard was before an update that overwrites it all at once.

    [Note: undo copy] A torch class says nothing of the order in which it writes. So masters and states are copied
    first, and the copy is stamped when it is whole; the tiles are marked as being written only then. If the process
    dies, its successor copies all of it back, and the same call makes the update anew."""

    words: Tensor  # 1D int64, two: the stamp of the update (0: the copy is not whole) and the shard's first tile
    memory: Tensor  # 1D uint8, as large as the largest shard with its states

    def keep(self, stamp: int, first: int, tensors: Sequence[Tensor]) -> None:
        """Copy a shard's tensors, 1D each."""
        self.words[0] = 0
        for tensor, kept in self._places(tensors):
            kept.copy_(tensor)
        self.words[1] = first
        self.words[0] = stamp

    def bring_back(self, stamp: int, first: int, tensors: Sequence[Tensor]) -> bool:
        """Copy them back, if they are of this update. Returns whether they are."""
        if self.words.tolist() != [stamp, first]:
            return False
        for tensor, kept in self._places(tensors):
            tensor.copy_(kept)
        return True

    def _places(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        at = 0
        for tensor in tensors:
            flat = tensor.view(torch.uint8)
            yield flat, self.memory[at : at + flat.numel()]
            at += flat.numel()


@dataclass(frozen=True, slots=True)
class TileStamps:
    """The stamps of one shard during one update."""

    words: Tensor  # 1D int64, one for every STAMP elements of the shard; the last may be for fewer
    version: int  # the version that the update makes, from 1
    first: int = 0  # number of the first among all stamps that share the undo log
    undo: Tensor | None = None  # uint8, (entries, UNDO_BYTES); only the native kernel uses it
    copy: UndoCopy | None = None  # of updates that overwrite a shard at once

    @property
    def whole(self) -> int:
        """A tile's stamp when all its bytes have the version. While they are being written, it is one less, and odd."""
        return 2 * self.version

    def are_whole(self, start: int, stop: int) -> bool:
        """Whether a process that died has made elements ``[start, stop)`` of this version. Raises StateLostError if it
        was just writing them: without the undo log nobody knows what they are."""
        words = self.words[start // STAMP : -(-stop // STAMP)].tolist()
        if any(word == self.whole - 1 for word in words):
            raise StateLostError(
                f"v{self.version} was being written when its process died, and only kernel='native' has an undo log: "
                "resume from a checkpoint"
            )
        return all(word == self.whole for word in words)

    def undone(self, tensors: Sequence[Tensor]) -> bool:
        """Let a shard's ``tensors`` be again what they were before the update, if a process has died in the middle of
        it. Returns whether one has."""
        cut = self.copy is not None and any(word == self.whole - 1 for word in self.words.tolist())
        if not cut or self.copy is None or not self.copy.bring_back(self.whole, self.first, tensors):
            return False
        self.words.fill_(self.whole - 2)
        return True

    @contextmanager
    def overwriting(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """``writing`` of all of a shard, whose ``tensors`` are kept before. See [Note: undo copy]."""
        if self.copy is not None:
            self.copy.keep(self.whole, self.first, tensors)
        with self.writing(0, self.words.numel() * STAMP):
            yield

    @contextmanager
    def writing(self, start: int, stop: int) -> Iterator[None]:
        """Stamp the writes to elements ``[start, stop)`` inside this context. ``start`` is a multiple of STAMP, and
        ``stop`` is one too, or the shard's end."""
        words = self.words[start // STAMP : -(-stop // STAMP)]
        words.fill_(self.whole - 1)
        yield
        words.fill_(self.whole)  # not after an error, because then the bytes have no version


def torn(words: Iterable[int]) -> list[int]:
    """The tiles that were being written."""
    return [index for index, word in enumerate(words) if word % 2]
