"""Records: how an owner keeps a frozen shard encoded, in memory that others read.

Each parameter's part of the shard is encoded by itself, so that no scale is shared with a neighbour. A lossy codec
leaves parameters of fewer than two dimensions (biases, norms) as they are: they have few bytes, and models are
sensitive to them. A part that would not get smaller stays as it is, too.

A record has room for the longest encodings, because lossless ones are not known before they are made. It starts with
little-endian int64 numbers: the bytes of the record that are used, then the length of each part's encoding. Encodings
start at multiples of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayzero.codecs import RAW, Codec, codec_for
from rayzero.errors import StoreError
from rayzero.layout.model_layout import Shard, SlotSlice, UnitLayout, slices_of

_ALIGN = 64  # bytes
LENGTH = 8  # bytes of a number: the first says how many bytes are used


def codec_of(unit: UnitLayout) -> Codec:
    """How a unit's published parameters are kept."""
    return codec_for(unit.codec, unit.dtype)


def kept_bytes(unit: UnitLayout, shard: Shard) -> int:
    """The most bytes in which a shard's published parameters are kept."""
    if not unit.is_coded:
        return shard.numel * unit.dtype.itemsize
    parts = slices_of(unit, shard)
    return _header(parts) + sum(_aligned(_codec(unit, part).most_bytes(part.numel, unit.dtype)) for part in parts)


def write_record(record: Tensor, unit: UnitLayout, shard: Shard, values: Tensor) -> None:
    """Encode ``values`` (1D, the shard's elements, the unit's dtype) into ``record`` (1D uint8, ``kept_bytes``).

    Raises StoreError if a finite value would come back as inf or nan."""
    parts = slices_of(unit, shard)
    at = _header(parts)
    lengths = record[: LENGTH * (1 + len(parts))].view(torch.int64)
    for i, part in enumerate(parts):
        codec, wanted = _codec(unit, part), values[part.start : part.stop]
        encoded = codec.encode(wanted)
        if codec.lossy:
            _check(unit, part, codec, wanted, encoded)
        record[at : at + encoded.numel()].copy_(encoded)
        lengths[1 + i] = encoded.numel()
        at += _aligned(encoded.numel())
    lengths[0] = at


def read_record(record: Tensor, unit: UnitLayout, shard: Shard, values: Tensor) -> None:
    """Decode ``record`` into ``values`` (1D, the shard's elements, the unit's dtype), with zeros as padding. Raises
    StoreError where the bytes are damaged."""
    parts = slices_of(unit, shard)
    lengths = record[: LENGTH * (1 + len(parts))].view(torch.int64).tolist()[1:]
    at = _header(parts)
    if min(lengths, default=0) < 0 or at + sum(map(_aligned, lengths)) > record.numel():
        raise StoreError(f"a record of {unit.name!r} is damaged: its parts do not fit its {record.numel():,} bytes")
    end = 0
    for part, length in zip(parts, lengths, strict=True):
        values[end : part.start].zero_()
        _codec(unit, part).decode(record[at : at + length], values[part.start : part.stop])
        at, end = at + _aligned(length), part.stop
    values[end:].zero_()


def used_bytes(record: Tensor) -> int:
    """The bytes of a record without the room that is not used; 0 before it is written. ``record``: ``LENGTH`` bytes of
    it at least."""
    return int(record[:LENGTH].view(torch.int64).item())


def _codec(unit: UnitLayout, part: SlotSlice) -> Codec:
    codec = codec_of(unit)
    small = codec.most_bytes(part.numel, unit.dtype) >= part.numel * unit.dtype.itemsize
    return RAW if codec.lossy and (small or len(unit.slots[part.slot].shape) < 2) else codec


def _check(unit: UnitLayout, part: SlotSlice, codec: Codec, values: Tensor, encoded: Tensor) -> None:
    back = torch.empty_like(values)
    codec.decode(encoded, back)
    finite = values.isfinite()
    if not bool(back.isfinite().logical_or_(~finite).all()):
        raise StoreError(
            f"cpu_compression={unit.codec!r} cannot hold {unit.slots[part.slot].name!r}, whose largest finite "
            f"magnitude is {values[finite].abs().max():.6g}; use 'bf16' or 'lossless'"
        )


def _header(parts: Sequence[SlotSlice]) -> int:
    return _aligned(LENGTH * (1 + len(parts)))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
