"""One rank's gradients in memory of its own: written here, read by the owners of the same host.

[Note: one writer] The rank copies a unit's first push of a step into its range and adds later ones in fp32, in the
order of its pushes; owners only read. Nothing is written before the unit's present version is published: until then
the owners may still read the last step's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.errors import AccumulationError, StoreError
from rayzero.layout.model_layout import UnitLayout
from rayzero.owner.gradients.landing import add_widened, landing_dtype, unplanned
from rayzero.protocol.messages import Contribution, ModelSpec, Pushed, unpack_presence

Allocate = Callable[[list[tuple[int, int]], torch.dtype], Mapping[int, Tensor]]  # (unit, elements), dtype -> 1D zeros


@dataclass(slots=True)
class _Progress:
    """What is in a unit's range."""

    step: int = -1
    attempt: int = 0
    count: int = 0
    presence: int = 0  # bits

    def is_stale(self, push: Contribution) -> bool:
        """True for a lower attempt, or a repeat."""
        here, its = (self.step, self.attempt), (push.step, push.attempt)
        return its < here or (its == here and push.seq < self.count)


class GradientRegion:
    """All trained units' gradients of one rank, each contiguous.

    Knows units and pushes; not owners, or when their memory is free. Calls for one unit come one after the other."""

    def __init__(self, spec: ModelSpec, allocate: Allocate) -> None:
        accumulate = spec.accumulation_steps > 1
        self._units: dict[int, UnitLayout] = {unit.index: unit for unit in spec.layout.units if unit.trainable}
        dtypes = {index: landing_dtype(unit, accumulate) for index, unit in self._units.items()}
        self.flats: dict[int, Tensor] = {}  # unit -> 1D, unit.numel elements
        for dtype in set(dtypes.values()):
            sizes = [(index, unit.numel) for index, unit in self._units.items() if dtypes[index] is dtype]
            self.flats.update(allocate(sizes, dtype))
        self._progress = {index: _Progress() for index in self._units}

    def is_stale(self, push: Contribution) -> bool:
        """True for a repeat, or a push of a lower attempt: it is dropped."""
        unit = self._units.get(push.unit)
        if unit is None or len(push.presence) != (len(unit.slots) + 7) // 8:
            expected = "is not trained" if unit is None else f"{unit.name!r} has {(len(unit.slots) + 7) // 8}"
            raise StoreError(
                f"rank {push.rank} pushed unit {push.unit} with {len(push.presence)} presence bytes: it {expected}"
            )
        return self._progress[push.unit].is_stale(push)

    def landing(self, push: Contribution) -> Tensor | None:
        """Where the gradients of ``push`` may be gathered before ``put``; None: ``put`` has to convert or add them."""
        flat, progress = self.flats[push.unit], self._progress[push.unit]
        direct = push.seq == 0 and flat.dtype is self._units[push.unit].dtype and not progress.is_stale(push)
        return flat if direct else None

    def holds(self, unit: int, grads: Tensor) -> bool:
        """True where ``grads`` is the unit's range itself."""
        return grads.data_ptr() == self.flats[unit].data_ptr()

    def put(self, push: Contribution, grads: Tensor) -> Pushed | None:
        """Have the gradients of ``push`` (1D, unit.numel) in the region; nothing is copied where they are there.

        Returns what the unit's range holds now, None for a stale push or a repeat. Raises AccumulationError for a
        second push into 16-bit memory."""
        unit, flat, progress = self._units[push.unit], self.flats[push.unit], self._progress[push.unit]
        if progress.is_stale(push):
            return None
        if push.seq > 0 and flat.dtype is not torch.float32:
            raise AccumulationError(unplanned(unit, push))
        if push.seq > 0:
            self._add(flat, grads, unit, push, progress.presence)
        elif not self.holds(push.unit, grads):
            _copy(flat, grads, unit)
        before = progress.presence if push.seq else 0
        presence = before | int.from_bytes(push.presence, "little")
        self._progress[push.unit] = _Progress(push.step, push.attempt, push.seq + 1, presence)
        bits = presence.to_bytes(len(push.presence), "little")
        return Pushed(step=push.step, attempt=push.attempt, count=push.seq + 1, presence=bits)

    def _add(self, flat: Tensor, grads: Tensor, unit: UnitLayout, push: Contribution, before: int) -> None:
        now = unpack_presence(push.presence, len(unit.slots))
        if all(now) and before == (1 << len(unit.slots)) - 1:
            add_widened(flat, grads)  # padding is zero on both sides
            return
        for index, slot in enumerate(unit.slots):
            if now[index]:
                ours, theirs = flat[slot.start : slot.stop], grads[slot.start : slot.stop]
                add_widened(ours, theirs) if before >> index & 1 else ours.copy_(theirs)


def _copy(flat: Tensor, grads: Tensor, unit: UnitLayout) -> None:
    flat.copy_(grads)
    for slot, gap in zip(unit.slots, unit.gaps, strict=True):
        if gap:
            flat[slot.stop : slot.padded_stop].zero_()
