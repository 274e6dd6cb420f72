"""One rank a process, for packages that keep their state once a process: two ranks would silently share it."""

from __future__ import annotations

import threading

from rayzero.engine.context import RankContext
from rayzero.errors import UnsupportedError

_claimed: dict[str, RankContext] = {}  # package -> the rank of several whose place its state in this process has
_claiming = threading.Lock()


def claim_process(context: RankContext, package: str) -> None:
    """Have ``package``'s state in this process be this rank's, until its context closes; it may claim again.

    The only rank of a run claims nothing. Raises UnsupportedError where another rank has claimed it."""
    if context.world_size == 1:
        return
    with _claiming:
        holder = _claimed.get(package)
        if holder is context:
            return
        if holder is not None:
            raise UnsupportedError(
                f"rank {holder.rank} uses {package} in this process already, which keeps one state a process; "
                "run ranks as processes: run_ranks(..., processes=True), or ZeroTrainer"
            )
        _claimed[package] = context
        context.on_close(lambda _: _claimed.__delitem__(package))
