"""Tells whether two processes can share memory: the same kernel, the same mount, the same user."""

from __future__ import annotations

import os
from pathlib import Path

from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.shm import signals


def host_identity(directory: Path = SHARED_MEMORY) -> str:
    """Equal in processes that can map each other's slabs in ``directory``; "" if this one cannot share memory.

    Containers on one host have the same boot id, but different mounts."""
    if why_no_sharing(directory) is not None:
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    mount = directory.stat()
    return f"{boot}:{mount.st_dev}:{mount.st_ino}:{os.geteuid()}"


def why_no_sharing(directory: Path = SHARED_MEMORY) -> str | None:
    """Why this process cannot share memory, in a few words; None if it can."""
    reason = signals.available()
    if reason is None and not os.access(directory, os.W_OK | os.X_OK):
        reason = f"{directory} cannot be written to"
    return reason
