"""Where each tensor of an owner's shards lies, recorded in its control slab.

Tensors stay where they are when shards get another owner, so who owns what does not say where it lies. A successor
reads it here; ranks are told where the parameters lie when they shake hands (``SharedPaths``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rayzero.errors import HandshakeError
from rayzero.layout.model_layout import Shard
from rayzero.slabs.arena import SlabPlace
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import Slab
from rayzero.store.shm.shared_plan import PLACE_BYTES, PLACES
from rayzero.store.shm.words import region

PARAMS = 0  # the number of the published parameters; states follow, in the order in which they are allocated
_WORDS = PLACE_BYTES // 8  # index and number of the slab, its incarnation, the tensor's offset, its bytes + 1


@dataclass(frozen=True, slots=True, order=True)
class SlabId:
    """Which slab of a run and role: whose, of which life, and which of them."""

    index: int
    incarnation: int
    number: int

    @classmethod
    def of(cls, facts: SlabFacts) -> SlabId:
        """That of a slab with these facts."""
        return cls(facts.index, facts.incarnation, facts.number)


class Places:
    """The places of the tensors of one owner's shards. The owner writes them before a shard has values; its successor
    reads them."""

    def __init__(self, control: Slab, shards: Sequence[Shard]) -> None:
        """``shards``: the owner's, in the order of its version lines."""
        found = region(control, "places")
        words = control.tensor(found.offset, len(shards) * PLACES * _WORDS, torch.int64)
        self._words = words.view(len(shards), PLACES, _WORDS)
        self._line = {shard.index: i for i, shard in enumerate(shards)}
        self._who = str(control.path)

    def write(self, shard: int, tensor: int, slab: SlabId, place: SlabPlace) -> None:
        """Record where a shard's tensor lies in a slab."""
        words = slab.index << 32 | slab.number, slab.incarnation, place.offset, place.bytes + 1
        self._words[self._line[shard], tensor] = torch.tensor(words, dtype=torch.int64, device="cpu")

    def read(self, shard: int, tensor: int, shape: SlabPlace) -> tuple[SlabId, int]:
        """The slab of a shard's tensor, and the offset there. Raises HandshakeError if a tensor of this ``shape`` was
        not recorded."""
        owner, incarnation, offset, end = self._words[self._line[shard], tensor].tolist()
        if end != shape.bytes + 1:
            raise HandshakeError(
                f"{self._who} has {f'{end - 1} bytes' if end else 'nothing'} as tensor {tensor} of shard {shard}, "
                f"expected {shape.bytes} bytes of {shape.dtype}: continue with the same model and config"
            )
        return SlabId(owner >> 32, incarnation, owner & 0xFFFFFFFF), offset


def all_places(control: Slab) -> Iterator[tuple[str, SlabId, int, int]]:
    """Every tensor whose place is recorded in an owner's control slab: its slab's role and id, its offset there and its
    bytes."""
    found = region(control, "places")
    words = control.tensor(found.offset, found.bytes // 8, torch.int64).view(-1, PLACES, _WORDS)
    for places in words.tolist():
        for tensor, (owner, incarnation, offset, end) in enumerate(places):
            if end:
                role = "params" if tensor == PARAMS else "state"
                yield role, SlabId(owner >> 32, incarnation, owner & 0xFFFFFFFF), offset, end - 1
