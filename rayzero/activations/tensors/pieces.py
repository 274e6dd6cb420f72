"""Decides which bytes of a storage travel for the views of it that were saved. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 512  # bytes; a piece begins at a multiple, so that what comes back has its old alignment


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a storage."""

    start: int  # bytes from the storage's first byte
    size: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    itemsize: int  # bytes

    @property
    def nbytes(self) -> int:
        """The bytes of the elements that it shows. An expanded element counts every time."""
        count = self.itemsize
        for length in self.size:
            count *= length
        return count

    @property
    def stop(self) -> int:
        """One past the last byte that it touches, counted from the storage's first."""
        if 0 in self.size:
            return self.start
        reach = sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))
        return self.start + (reach + 1) * self.itemsize

    @property
    def dense(self) -> bool:
        """Whether it shows every element between start and stop once: it is contiguous, or a permutation of that."""
        return self.nbytes == self.stop - self.start and all(
            step > 0 or length <= 1 for length, step in zip(self.size, self.stride, strict=True)
        )


@dataclass(frozen=True, slots=True)
class StoragePiece:
    """Bytes that travel together: an interval of the storage, or the gathered elements of one view."""

    start: int
    stop: int
    gathered: View | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that it has on the device."""
        return self.stop - self.start if self.gathered is None else self.gathered.nbytes

    def covers(self, view: View) -> bool:
        """Whether ``view`` can be shown from this piece alone."""
        if self.gathered is not None:
            return self.gathered == view
        return self.start <= view.start and view.stop <= self.stop


def plan_pieces(storage_bytes: int, views: Sequence[View], coverage: float = 0.5) -> list[StoragePiece]:
    """Pieces that cover all ``views`` of a storage, each byte at most once unless it is gathered.

    A dense view takes its own interval. A strided view with at least ``coverage`` of the storage's bytes takes the
    whole storage; any other is gathered unless an interval holds it anyway. Touching intervals become one."""
    spread = [view for view in views if not view.dense]
    if any(min(view.nbytes, storage_bytes) >= coverage * storage_bytes for view in spread):
        return [StoragePiece(0, storage_bytes)]
    pieces = _merged(sorted((view.start // ALIGN * ALIGN, view.stop) for view in views if view.dense))
    for view in dict.fromkeys(spread):
        if not any(piece.covers(view) for piece in pieces):
            pieces.append(StoragePiece(view.start, view.stop, view))
    return pieces


def _merged(intervals: Sequence[tuple[int, int]]) -> list[StoragePiece]:
    pieces: list[StoragePiece] = []
    for start, stop in intervals:
        if pieces and start <= pieces[-1].stop:
            pieces[-1] = StoragePiece(pieces[-1].start, max(stop, pieces[-1].stop))
        else:
            pieces.append(StoragePiece(start, stop))
    return pieces
