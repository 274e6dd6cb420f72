"""What ranks' loops need to go on from their latest steps, kept where it outlives a rank."""

from __future__ import annotations

import threading

from rayzero.errors import StoreError
from rayzero.protocol.messages import LOOP_PARTS, LOOP_STEPS, MOST_LOOP_STATE, LoopState
from rayzero.quantities import format_bytes


class LoopStates:
    """The latest loop states of every rank. Knows bytes and steps, not what they hold. Thread-safe."""

    def __init__(self) -> None:
        self._states: dict[int, dict[tuple[int, int], LoopState]] = {}  # rank -> (step, part) -> state
        self._lock = threading.Lock()

    def keep(self, rank: int, state: LoopState) -> None:
        """Keep a state; those of older steps are dropped. States may come in any order. Raises StoreError for one that
        no loop has: each is kept in memory."""
        if state.part not in range(LOOP_PARTS) or len(state.content) > MOST_LOOP_STATE:
            raise StoreError(
                f"rank {rank} has part {state.part} of its loop kept, {format_bytes(len(state.content))}; a loop has "
                f"parts 0 to {LOOP_PARTS - 1}, each of at most {format_bytes(MOST_LOOP_STATE)}"
            )
        with self._lock:
            mine = self._states.setdefault(rank, {})
            mine[state.step, state.part] = state
            newest = max(step for step, _ in mine)
            for key in [key for key in mine if key[0] <= newest - LOOP_STEPS]:
                del mine[key]

    def of(self, rank: int) -> list[LoopState]:
        """A rank's states, oldest first."""
        with self._lock:
            return [state for _, state in sorted(self._states.get(rank, {}).items())]
