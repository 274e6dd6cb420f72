"""Tile stamps say which version each tile's bytes have, so that a reader of shared memory can tell after its writer has
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

STAMP = 1 << 15  # elements of a stamp's tile; a thread of the native kernel claims as many at once
STAMP_BYTES = 8


@dataclass(frozen=True, slots=True)
class TileStamps:
    """The stamps of one shard during one update."""

    words: Tensor  # 1D int64, one for every STAMP elements of the shard; the last may be for fewer
    version: int  # the version that the update makes, from 1

    @property
    def whole(self) -> int:
        """A tile's stamp when all its bytes have the version. While they are being written, it is one less, and odd."""
        return 2 * self.version

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
