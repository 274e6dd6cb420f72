"""Carves many tensors out of as few slabs as hold them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import HandshakeError
from rayzero.slabs.header import SlabFacts, header_bytes, lay_out_slab
from rayzero.slabs.slab import SLAB_BYTES, Progress, Slab, create_slabs
from rayzero.slabs.sweep import SHARED_MEMORY

REGION = "tensors"  # kind of the region that holds them
_ELEMENTS = 64  # a tensor starts at a multiple of this many elements, as shards do


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabPiece:
    """A tensor to place: 1D, ``numel`` elements of ``dtype``."""

    key: Hashable
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabGroup:
    """Pieces that lie in one slab, one after the other."""

    pieces: tuple[SlabPiece, ...]
    align: int = 1  # the first piece starts at a multiple of this many bytes: a power of two, at most a page


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabPlace:
    """Where a tensor lies."""

    slab: int
    offset: int  # bytes from the slab's start
    numel: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of the tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlan:
    """The places of all pieces, and the size of each slab. Equal groups give equal plans in every process."""

    places: dict[Hashable, SlabPlace]
    slabs: tuple[int, ...]  # bytes of each slab's region


def plan_arena(groups: Sequence[SlabGroup], slab_bytes: int = SLAB_BYTES) -> ArenaPlan:
    """Put groups into slabs in order. A slab has at most ``slab_bytes``, unless one group alone is larger."""
    first = header_bytes(num_regions=1)
    places: dict[Hashable, SlabPlace] = {}
    ends: list[int] = []  # bytes from each slab's start
    for group in groups:
        offsets, end = _lay_out(group, ends[-1] if ends else first)
        if not ends or (end > slab_bytes and ends[-1] > first):
            offsets, end = _lay_out(group, first)
            ends.append(first)
        ends[-1] = end
        for piece, offset in zip(group.pieces, offsets, strict=True):
            assert piece.key not in places, f"two pieces have key {piece.key!r}"
            places[piece.key] = SlabPlace(slab=len(ends) - 1, offset=offset, numel=piece.numel, dtype=piece.dtype)
    return ArenaPlan(places=places, slabs=tuple(end - first for end in ends))


def _lay_out(group: SlabGroup, start: int) -> tuple[list[int], int]:
    """The pieces' offsets and the group's end, in bytes, if the slab is free from ``start`` on."""
    at, offsets = _align(start, group.align), []
    for piece in group.pieces:
        at = _align(at, _ELEMENTS * piece.dtype.itemsize)
        offsets.append(at)
        at += piece.numel * piece.dtype.itemsize
    return offsets, at


def _align(offset: int, to: int) -> int:
    return -(-offset // to) * to


class Arena:
    """Tensors by key, in slabs.

    Knows where each tensor lies; not what it is for. Tensors stay readable after ``close()``."""

    def __init__(self, plan: ArenaPlan, slabs: Sequence[Slab]) -> None:
        """``slabs``: made or attached, in the plan's order."""
        self.plan, self.slabs = plan, tuple(slabs)

    @classmethod
    def create(
        cls,
        plan: ArenaPlan,
        facts: SlabFacts,
        directory: Path | None = SHARED_MEMORY,
        *,
        on_progress: Progress | None = None,
        sparse: bool = False,
    ) -> Arena:
        """Make the slabs, zeroed; each has ``facts`` with its own number. ``sparse``: no tensor has pages yet; call
        ``allocate``. Raises what ``create_slabs`` raises."""
        headers = [
            lay_out_slab(replace(facts, number=facts.number + number), [(REGION, size, 0)])
            for number, size in enumerate(plan.slabs)
        ]
        later = (REGION,) if sparse else ()
        return cls(plan, create_slabs(headers, directory, later=later, on_progress=on_progress))

    @classmethod
    def adopt(cls, places: Mapping[Any, SlabPlace], paths: Sequence[Path], *, with_others: bool = False) -> Arena:
        """Take over the slabs of dead processes; see ``Slab.adopt``. Raises HandshakeError unless every place is in its
        slab."""
        slabs: list[Slab] = []
        try:
            for path in paths:
                slabs.append(Slab.adopt(path, with_others=with_others))
            return cls.over(places, slabs)
        except BaseException:
            for slab in slabs:
                slab.close(unlink=False)
            raise

    @classmethod
    def over(cls, places: Mapping[Any, SlabPlace], slabs: Sequence[Slab]) -> Arena:
        """Tensors at these places of slabs. Raises HandshakeError unless every place is in its slab."""
        for key, place in places.items():
            _check_within(key, place, slabs)
        sizes = tuple(sum(region.bytes for region in slab.header.regions_of(REGION)) for slab in slabs)
        return cls(ArenaPlan(places=dict(places), slabs=sizes), slabs)

    def tensor(self, key: Hashable) -> Tensor:
        """1D, the piece's numel and dtype, in shared memory."""
        place = self.plan.places[key]
        return self.slabs[place.slab].tensor(place.offset, place.numel, place.dtype)

    def allocate(self, key: Hashable) -> None:
        """Give a tensor pages; see ``Slab.allocate``."""
        place = self.plan.places[key]
        self.slabs[place.slab].allocate(place.offset, place.bytes)

    def punch(self, key: Hashable) -> None:
        """Give a tensor's pages back; see ``Slab.punch``."""
        place = self.plan.places[key]
        self.slabs[place.slab].punch(place.offset, place.bytes)

    def close(self, *, unlink: bool = True) -> None:
        """Close all slabs; see ``Slab.close``."""
        for slab in self.slabs:
            slab.close(unlink=unlink)


def _check_within(key: Hashable, place: SlabPlace, slabs: Sequence[Slab]) -> None:
    end = place.offset + place.bytes
    slab = slabs[place.slab] if 0 <= place.slab < len(slabs) else None
    regions = slab.header.regions_of(REGION) if slab is not None else ()
    if not any(region.offset <= place.offset and end <= region.offset + region.bytes for region in regions):
        raise HandshakeError(
            f"tensor {key!r} is said to be at bytes {place.offset} to {end} of "
            f"{'a slab that is not there' if slab is None else slab.path}, which has no such tensors"
        )
