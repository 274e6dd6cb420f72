"""One unit's bytes on their way to or from one owner over the network."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rayzero.codecs import Codec
from rayzero.codecs.record import kept_bytes, read_record
from rayzero.concurrency.futures import Gather
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.store.wire.payload import Assembly, byte_view

Range = tuple[int, int]  # start, stop


@dataclass(eq=False, slots=True, kw_only=True)
class Download:
    """One unit's shards of one owner, on their way into memory."""

    gather: Gather
    awaited: str  # "layers.7 v42", for messages
    shards: list[Shard]
    version: int
    what: str  # the tensor kind
    dtype: torch.dtype  # of the values
    place: Callable[[Shard], Tensor]  # where a shard goes: its values, or, of records that stay encoded, its record
    kept: UnitLayout | None  # the unit, if records of it come: it is kept encoded
    decode: bool = True  # records that come
    filled: int = 0  # shards
    received: int = 0  # bytes
    ended: bool = False

    @property
    def size(self) -> int:
        """Bytes on the wire, at most."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The same of each shard."""
        if self.kept is not None:
            return [kept_bytes(self.kept, shard) for shard in self.shards]
        return [shard.numel * self.dtype.itemsize for shard in self.shards]

    @property
    def kind(self) -> Hashable:
        """See ``Part``."""
        return self.version, self.what

    def fill(self, take: Callable[[Assembly], None]) -> None:
        """Have all shards filled, or decode them, from the first one on. ``take``: adds the next bytes to a shard's."""
        self.filled = self.received = 0
        for shard in self.shards:
            memory = self.place(shard)
            if self.kept is None or not self.decode:
                self._receive(take, shard, memory)
            else:
                record = torch.empty(kept_bytes(self.kept, shard), dtype=torch.uint8, device="cpu")
                self._receive(take, shard, record)
                read_record(record, self.kept, shard, memory)
            self.filled += 1

    def _receive(self, take: Callable[[Assembly], None], shard: Shard, memory: Tensor) -> None:
        assembly = Assembly(shard.index, memory.nbytes, byte_view(memory), is_record=self.kept is not None)
        while not assembly.complete:
            take(assembly)
        self.received += assembly.filled

    def end(self, error: Exception | None) -> None:
        """It has moved, or never will."""
        self.ended = True
        self.gather.end(error)


def holes_of(unit: UnitLayout, presence: bytes) -> list[Range]:
    """The ranges of a unit's flat vector that hold no gradient: padding, and slots without one."""
    holes, end = [], 0
    for i, slot in enumerate(unit.slots):
        if presence[i // 8] >> i % 8 & 1:
            holes.append((end, slot.start))
            end = slot.start + slot.numel
    return [(start, stop) for start, stop in [*holes, (end, unit.numel)] if start < stop]


@dataclass(eq=False, slots=True, kw_only=True)
class Sending:
    """One unit's shards of ``values``, on their way to one owner."""

    gather: Gather
    shards: list[Shard]
    values: Tensor  # the whole unit
    codec: Codec  # on the wire
    holes: Sequence[Range] = ()  # of the unit: what has no values, where that would change how others are encoded
    request: Any  # the message that announces its bytes
    on_end: Callable[[Exception | None], None] = field(default=lambda _: None)
    ended: bool = False

    @property
    def size(self) -> int:
        """Bytes on the wire, at most."""
        return sum(self.codec.most_bytes(shard.numel, self.values.dtype) for shard in self.shards)

    @property
    def kind(self) -> Hashable:
        """See ``Part``."""
        return None

    def contents(self) -> Iterator[tuple[Shard, Tensor]]:
        """What travels of each shard: 1D, its own memory unless it is compressed."""
        for shard in self.shards:
            yield shard, self.codec.encode(self._values_of(shard))

    def _values_of(self, shard: Shard) -> Tensor:
        values = self.values[shard.start : shard.stop]
        inside = [(start, stop) for start, stop in self.holes if start < shard.stop and stop > shard.start]
        if inside:
            values = values.clone()
            for start, stop in inside:
                values[max(0, start - shard.start) : stop - shard.start] = 0.0
        return values

    def end(self, error: Exception | None) -> None:
        """It has moved, or never will."""
        self.ended = True
        self.on_end(error)
        self.gather.end(error)
