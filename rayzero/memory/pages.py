"""Pages: the pieces in which the kernel maps memory."""

from __future__ import annotations

import mmap

PAGE = mmap.PAGESIZE  # bytes


def whole_pages(size: int) -> int:
    """``size`` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE
