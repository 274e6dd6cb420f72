"""Tile stamps: say which version each tile's bytes are of, so that a reader of shared memory can tell after its writer
died in an update.

[Note: killed between two instructions] A stamp is marked as being written before the tile's first byte changes, and as
whole after its last one has. Stamps are read after the writer's death, when every instruction before that point has
taken effect and none after it, so program order is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

STAMP = 1 << 15  # elements of a stamp's tile: what a thread of the native kernel claims at once
STAMP_BYTES = 8


@dataclass(frozen=True, slots=True)
class TileStamps:
    """The stamps of one shard during one update."""

    words: Tensor  # 1D int64: one for each STAMP elements of the shard, the last of fewer
    version: int  # that the update makes, from 1

    @property
    def whole(self) -> int:
        """A tile's stamp when all its bytes are of the version; one less, odd, while they are being written."""
        return 2 * self.version

    @contextmanager
    def writing(self, start: int, stop: int) -> Iterator[None]:
        """Around the writes to elements ``[start, stop)``: a multiple of STAMP, and one or the shard's end."""
        words = self.words[start // STAMP : -(-stop // STAMP)]
        words.fill_(self.whole - 1)
        yield
        words.fill_(self.whole)  # not after an error: the bytes are of no version


def torn(words: Iterable[int]) -> list[int]:
    """The tiles that were being written."""
    return [index for index, word in enumerate(words) if word % 2]
