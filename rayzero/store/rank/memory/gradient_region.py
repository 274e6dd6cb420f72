"""One rank's gradients in its own memory, where the owners of its host read them. For other owners they are kept there
until they are published: an owner that is replaced needs them again.

[Note: one writer] The rank copies a unit's first push of a step into its range and adds later ones in fp32, in the
order of its pushes; owners only read. Nothing is written before the unit's current version is published: until then
the owners may still read the last step's gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from weakref import ref

import torch
from torch import Tensor

from rayzero.errors import StoreError
from rayzero.layout.model_layout import Shard
from rayzero.memory.page_lock import host_zeros
from rayzero.protocol.gradient_sum import GradientSum, gradient_sizes
from rayzero.protocol.messages import Contribution, ModelSpec, Pushed
from rayzero.protocol.scattered import ScatteredUnit


def gradient_memory(spec: ModelSpec, *, pinned_for: torch.device | None) -> dict[int, Tensor]:
    """Zeroed memory of this process for a rank's gradients, by trained unit: 1D, unit.numel elements, one block for
    each dtype. ``pinned_for``: page-locked, for copies from this CUDA device."""
    found: dict[int, Tensor] = {}
    for dtype, sizes in gradient_sizes(spec).items():
        block = host_zeros(sum(numel for _, numel in sizes), dtype, pinned_for=pinned_for)
        found |= zip([unit for unit, _ in sizes], torch.split(block, [numel for _, numel in sizes]), strict=True)
    return found


class GradientRegion:
    """All trained units' gradients of one rank, each contiguous.

    Knows units and pushes; not owners, or when a range is free. Calls for one unit must not overlap, but for those of
    ``pushed`` and ``copy``."""

    def __init__(self, spec: ModelSpec, flats: Mapping[int, Tensor]) -> None:
        """``flats``: by trained unit, 1D, unit.numel elements of ``gradient_dtype``."""
        self.flats = flats
        self._scattered: dict[int, ref[ScatteredUnit]] = {}  # units of which nothing is in the region
        trained = [unit for unit in spec.layout.units if unit.trainable]
        self._sums = {unit.index: GradientSum.of_unit(unit, flats[unit.index]) for unit in trained}
        self._locks = {unit.index: threading.Lock() for unit in trained}  # each held while its unit's sum changes

    def is_stale(self, push: Contribution) -> bool:
        """Whether ``push`` is a repeat or from an older attempt, so that it is dropped. Raises StoreError for a push
        that no trained unit can have."""
        found = self._sums.get(push.unit)
        expected = None if found is None else (len(found.unit.slots) + 7) // 8
        if found is None or len(push.presence) != expected:
            what = "it is not trained" if found is None else f"{found.unit.name!r} has {expected}"
            raise StoreError(
                f"rank {push.rank} pushed unit {push.unit} with {len(push.presence)} presence bytes: {what}"
            )
        return found.is_stale(push)

    def landing(self, push: Contribution) -> Tensor | None:
        """Where the gradients of ``push`` may be gathered before ``put`` (1D, unit.numel elements, the unit's dtype);
        None: ``put`` has to convert or add them."""
        found = self._sums[push.unit]
        return found.memory if found.lands(push) and not found.is_stale(push) else None

    def holds(self, unit: int, grads: Tensor) -> bool:
        """Whether ``grads`` is the unit's range itself."""
        return self._sums[unit].holds(grads)

    def put(self, push: Contribution, grads: Tensor | ScatteredUnit) -> Pushed | None:
        """Write the gradients of ``push`` (1D, unit.numel elements, the unit's dtype) into the region; those that were
        gathered there are not copied, and a first push may stay scattered.

        Returns what the unit's range holds now, None for a stale push or a repeat. Raises AccumulationError for a
        second push into 16-bit memory."""
        found = self._sums[push.unit]
        if found.is_stale(push):
            return None
        found.require_room(push)
        with self._locks[push.unit]:
            found.open(push)
            before = self.scattered(push.unit) if found.count else None
            self._scattered.pop(push.unit, None)
            if isinstance(grads, ScatteredUnit):
                assert not found.count, push
                self._scattered[push.unit] = ref(grads)
            else:
                if before is not None:
                    before.copy_to(found.memory, found.unit)
                found.add(push, grads)
            return found.close(push)

    def scattered(self, unit: int) -> ScatteredUnit | None:
        """What the unit's gradients are, if they were not written into the region and an owner still holds them."""
        found = self._scattered.get(unit)
        return None if found is None else found()

    @property
    def held_bytes(self) -> int:
        """Bytes of the gradients that are kept, in the region or scattered."""
        scattered = {unit: found() for unit, found in self._scattered.copy().items()}
        kept = sum(flat.nbytes for unit, flat in self.flats.items() if unit not in scattered)
        return kept + sum(each.nbytes for each in scattered.values() if each is not None)

    def pushed(self, unit: int) -> Pushed | None:
        """What the unit's range holds now; None before the first push."""
        with self._locks[unit]:
            return self._sums[unit].pushed()

    def copy(self, unit: int, shards: Sequence[Shard]) -> tuple[Pushed | None, Tensor]:
        """The same, with a copy of the shards' elements in memory for the whole unit (1D, unit.numel elements, the
        dtype of the sum), of which the rest stays untouched."""
        with self._locks[unit]:
            found = self._sums[unit]
            values = torch.empty_like(found.memory)
            for shard in shards:
                values[shard.start : shard.stop] = found.memory[shard.start : shard.stop]
            return found.pushed(), values
