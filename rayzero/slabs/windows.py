"""Maps parts of several slabs side by side into one range of addresses, so that they are one tensor without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.errors import MemoryPlanError, StoreClosedError, UnsupportedError
from rayzero.memory.mapping import Mapping
from rayzero.memory.page_lock import PageLock
from rayzero.memory.pages import PAGE, whole_pages
from rayzero.slabs.slab import Slab


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPiece:
    """Part of a slab."""

    slab: Slab
    offset: int  # bytes from the slab's start
    bytes: int


def can_map(pieces: Sequence[tuple[int, int, int]]) -> bool:
    """Whether pieces (window offset, file offset, bytes), in window order, fill a window from its start without a gap,
    and each starts at a page in both the window and the file."""
    end = 0
    for window_offset, file_offset, size in pieces:
        if window_offset != end or window_offset % PAGE or file_offset % PAGE or size <= 0:
            return False
        end += size
    return end > 0


class Window:
    """Parts of slabs, one after the other, as one 1D tensor.

    Knows the range it maps; not what the bytes mean. Slabs may be closed while it is open. Its pages are shared with
    every process that maps the slabs. With ``private=True``, a page that this process writes to becomes its own copy
    until ``revert()``: it does not see what others write there meanwhile."""

    def __init__(self, pieces: Sequence[WindowPiece], *, private: bool) -> None:
        """Map the pieces. Raises UnsupportedError unless ``can_map`` and each piece lies within its slab, OSError if
        a slab was attached read-only and ``private`` is False."""
        starts = [sum(piece.bytes for piece in pieces[:index]) for index in range(len(pieces))]
        _check([(at, piece.offset, piece.bytes) for at, piece in zip(starts, pieces, strict=True)], pieces)
        self.private, self.bytes = private, sum(piece.bytes for piece in pieces)
        self._parts = [(at, piece.bytes) for at, piece in zip(starts, pieces, strict=True)]  # (offset, bytes)
        mapping = Mapping.reserve(whole_pages(self.bytes))
        for at, piece in zip(starts, pieces, strict=True):
            mapping.place(at, piece.slab.fileno(), piece.offset, piece.bytes, private=private)
        self._mapping: Mapping | None = mapping

    def tensor(self, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The whole window, 1D. The tensor stays readable after ``close()``. Raises StoreClosedError after that."""
        return self._open().tensor(0, self.bytes // dtype.itemsize, dtype)

    def page_lock(self, device: torch.device) -> PageLock:
        """Lock the window's pages, so that a CUDA device copies from it directly. See :class:`PageLock`."""
        mapping = self._open()
        try:
            return PageLock([(mapping.address, mapping.size)], mapping.keeper, read_only=False, device=device)
        except MemoryPlanError:
            if len(self._parts) == 1:
                raise
        parts = [(mapping.address + at, whole_pages(size)) for at, size in self._parts]  # a driver may want one a file
        return PageLock(parts, mapping.keeper, read_only=False, device=device)

    def revert(self) -> None:
        """Discard what this process wrote, so that the window shows the slabs again. Costs little if nothing was
        written. Raises UnsupportedError for a window that is not private."""
        if not self.private:
            raise UnsupportedError("a shared window cannot be reverted: what was written to it is in the slabs")
        mapping = self._open()
        if mapping.has_private(0, mapping.size):
            mapping.drop_private(0, mapping.size)

    def empty(self) -> None:
        """Show no slab any more: the window is memory of this process from now on, zeros at first, also where a tensor
        has it. Only for a private window, while nobody computes with it."""
        mapping = self._open()
        mapping.place_nothing(0, mapping.size)

    def close(self) -> None:
        """Unmap as soon as no tensor uses it. Idempotent."""
        self._mapping = None

    def _open(self) -> Mapping:
        if self._mapping is None:
            raise StoreClosedError("a window was used after close()")
        return self._mapping


def _check(offsets: Sequence[tuple[int, int, int]], pieces: Sequence[WindowPiece]) -> None:
    if not can_map(offsets):
        raise UnsupportedError(
            f"pieces (window offset, file offset, bytes) {offsets} cannot be mapped side by side: all but the last "
            f"must be whole pages of {PAGE} bytes and begin at one"
        )
    for piece in pieces:
        if piece.offset + piece.bytes > piece.slab.header.bytes:
            raise UnsupportedError(
                f"bytes {piece.offset} to {piece.offset + piece.bytes} are not all in slab {piece.slab.path}, "
                f"which has {piece.slab.header.bytes}"
            )
