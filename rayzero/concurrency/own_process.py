"""What this process asks of the kernel and of Python for itself: open files, and so connections; imports without the
search for garbage."""

from __future__ import annotations

import gc
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 1 << 20  # that a process asks for: what Linux lets it have unless somebody has changed fs.nr_open

log = logging.getLogger(__name__)


def open_files_allowed(soft: int, hard: int) -> int:
    """How many files a process may have open once it has raised its soft limit (RLIMIT_NOFILE). A negative limit is
    none."""
    return MOST if soft < 0 else max(soft, MOST if hard < 0 else min(hard, MOST))


def raise_open_files() -> int:
    """Raise this process's soft limit of open files as far as it may; returns how many it may have open then.
    Idempotent.

    Many systems give a process 1,024, for programs that use select(2), and a much higher hard limit for all others.
    Ray raises the limit of a driver, and so of the cluster that ``ray.init`` starts, to 65,536, but not that of a node
    that ``ray start`` makes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = open_files_allowed(soft, hard)
    if 0 <= soft < allowed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        except (OSError, ValueError) as error:  # beyond fs.nr_open, or forbidden here
            log.warning("the limit of open files stays at %d: %s", soft, error)
            return soft
    return allowed


@contextmanager
def uncollected() -> Iterator[None]:
    """A block in which no garbage is collected, in any thread; afterwards it is as it was before. For imports alone: to
    import torch makes half a million objects that stay, and Python would look through all of them again and again while
    they grow. What else makes garbage may need much memory."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
