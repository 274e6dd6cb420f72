"""Lives: how often a rank has died and come back. What an earlier life did counts only where it was decided."""

from __future__ import annotations

from collections.abc import Mapping

from rayzero.errors import StoreClosedError

ATTEMPTS = 1 << 16  # of each life within a step: a later life's pushes replace those of earlier ones


def require_life(rank: int, life: int, lives: Mapping[int, int]) -> None:
    """Raise StoreClosedError if ``rank`` has a later life than ``life``. ``lives``: the present ones of ranks that have
    died."""
    if lives.get(rank, 0) > life:
        raise life_is_over(rank, life, lives[rank])


def life_is_over(rank: int, life: int, present: int) -> StoreClosedError:
    """The error of what a rank asked in a ``life`` before its ``present`` one."""
    return StoreClosedError(f"rank {rank} was replaced: its life {life} is over, {present} is its present one")
