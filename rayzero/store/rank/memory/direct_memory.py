"""The part of a store that hands out memory itself, instead of moving bytes."""

from __future__ import annotations

from torch import Tensor

from rayzero.protocol.messages import Contribution
from rayzero.store.rank.memory.gradient_writer import GradientWriter
from rayzero.store.rank.memory.unit_windows import UnitWindows
from rayzero.telemetry.recorder import End


class DirectMemory:
    """Three verbs of ``ParameterStore`` for stores whose rank shares memory with owners: a base of theirs.

    Both members are made at attach; None where no memory is shared."""

    _windows: UnitWindows | None = None  # over owners' parameters
    _writer: GradientWriter | None = None  # of gradients that owners read
    _unwatch: End = staticmethod(lambda: None)  # ends telling of their memory

    def mapped(self, unit: int) -> Tensor | None:
        """See ``ParameterStore.mapped``; None also where one of the unit's owners is elsewhere."""
        return self._windows.tensor(unit) if self._windows is not None else None

    def revert(self, unit: int) -> None:
        """See ``ParameterStore.revert``."""
        if self._windows is not None:
            self._windows.revert(unit)

    def landing(self, contribution: Contribution) -> Tensor | None:
        """See ``ParameterStore.landing``."""
        return self._writer.landing(contribution) if self._writer is not None else None

    def _close_memory(self) -> None:
        """End the writer, then let go of the windows. Idempotent."""
        self._unwatch()
        if self._writer is not None:
            self._writer.close()
        if self._windows is not None:
            self._windows.close()
