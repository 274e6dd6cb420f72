"""Imports without the search for garbage: to import torch makes half a million objects that stay, and Python would look
through all of them again and again while they grow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A block in which no garbage is collected, in any thread; afterwards it is as it was before. For imports alone:
    what else makes garbage may need much memory."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
