"""Allows one rank per process for packages that keep one state per process: two ranks would silently share it."""

from __future__ import annotations

import threading

from rayzero.engine.context import RankContext
from rayzero.errors import UnsupportedError

_claimed: dict[str, RankContext] = {}  # package -> the rank that its state in this process belongs to
_claiming = threading.Lock()


def claim_process(context: RankContext, package: str) -> None:
    """Reserve ``package``'s state in this process for this rank until its context closes. The rank may claim it again.

    The only rank of a run claims nothing. Raises UnsupportedError if another rank has claimed it."""
    if context.world_size == 1:
        return
    with _claiming:
        holder = _claimed.get(package)
        if holder is context:
            return
        if holder is not None:
            raise UnsupportedError(
                f"rank {holder.rank} uses {package} in this process already, and {package} keeps one state per "
                "process; run ranks as processes, with run_ranks(..., processes=True) or ZeroTrainer"
            )
        _claimed[package] = context
        context.on_close(lambda _: _claimed.__delitem__(package))
