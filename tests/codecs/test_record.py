"""How an owner keeps a frozen shard encoded."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayzero.codecs import CODECS, RAW
from rayzero.codecs.record import codec_of, kept_bytes, read_record, used_bytes, write_record
from rayzero.config.choices import CpuCompressionMethod
from rayzero.errors import StoreError
from rayzero.layout.model_layout import ModelLayout, Shard, UnitLayout, lay_out_unit, slices_of
from tests.codecs.bounds import stated_error

METHODS = [method.value for method in CpuCompressionMethod if method is not CpuCompressionMethod.NONE]


def unit_of(shapes: list[tuple[int, ...]], method: str, dtype: torch.dtype = torch.float32) -> UnitLayout:
    params = [(f"p{i}", shape) for i, shape in enumerate(shapes)]
    return lay_out_unit(0, "unit", dtype, False, params, codec=method)


def whole(unit: UnitLayout) -> tuple[Shard, ...]:
    """One shard."""
    return ModelLayout(units=(unit,), shard_numel=1 << 20).shards


def values_of(unit: UnitLayout) -> Tensor:
    """Each parameter of another size, zeros as padding."""
    values, generator = torch.zeros(unit.numel, dtype=unit.dtype), torch.Generator().manual_seed(1)
    for i, slot in enumerate(unit.slots):
        values[slot.start : slot.stop] = torch.randn(slot.numel, generator=generator) * 10.0 ** (i % 5 - 3)
    return values


def kept(unit: UnitLayout, shard: Shard, values: Tensor) -> tuple[Tensor, Tensor]:
    record = torch.full((kept_bytes(unit, shard),), 0xAB, dtype=torch.uint8)
    write_record(record, unit, shard, values[shard.start : shard.stop])
    assert 0 < used_bytes(record) <= record.numel()
    back = torch.full((shard.numel,), 7.0, dtype=unit.dtype)
    read_record(record[: used_bytes(record)], unit, shard, back)
    return record, back


@given(
    st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6),
    st.sampled_from(METHODS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([64, 256, 4096]),
)
def test_parameters_of_any_shape_come_back_within_the_error_of_their_own_blocks(shapes, method, dtype, shard_numel):
    unit = unit_of(shapes, method, dtype)
    values, codec = values_of(unit), codec_of(unit)
    for shard in ModelLayout(units=(unit,), shard_numel=shard_numel).shards:
        _, back = kept(unit, shard, values)
        wanted, seen = values[shard.start : shard.stop], torch.zeros(shard.numel, dtype=torch.bool)
        for part in slices_of(unit, shard):
            here = slice(part.start, part.stop)
            seen[here] = True
            exact = len(unit.slots[part.slot].shape) < 2 or codec is RAW
            bound = torch.zeros(part.numel) if exact else stated_error(codec, wanted[here].contiguous())
            assert bool(((back[here].double() - wanted[here].double()).abs() <= bound).all())
        assert not back[~seen].any(), "padding is zero"


@pytest.mark.parametrize("method", METHODS)
def test_a_record_takes_what_its_codec_takes(method):
    unit = unit_of([(512, 512), (512,)], method)
    (shard,) = whole(unit)
    values, codec = values_of(unit), CODECS[CpuCompressionMethod(method)]
    record, _ = kept(unit, shard, values)
    exact = codec.encode(values[: 512 * 512]).numel() + (
        512 * 4 if codec.lossy else codec.encode(values[-512:]).numel()
    )
    assert exact <= used_bytes(record) <= exact + 3 * 64
    assert used_bytes(record) / values.nbytes == pytest.approx(CpuCompressionMethod(method).ratio(), abs=0.01)


def test_a_scale_is_never_shared_between_parameters():
    unit = unit_of([(8, 8), (8, 8)], "int8", torch.float32)
    values = values_of(unit)
    values[unit.slots[0].start : unit.slots[0].stop] = 1e6
    (shard,) = whole(unit)
    _, back = kept(unit, shard, values)
    assert torch.equal(back, values), "64 elements would take more bytes encoded than as they are"
    unit = unit_of([(32, 32), (32, 32)], "int8")
    values = values_of(unit)
    alone = kept(unit, shard := whole(unit)[0], values)[1][unit.slots[1].start :]
    values[: unit.slots[0].stop] = 1e6
    assert torch.equal(kept(unit, shard, values)[1][unit.slots[1].start :], alone)


@pytest.mark.parametrize(("at", "value"), [(1, -1), (1, 1 << 40), (2, 1 << 40), (1, 3)])
def test_a_damaged_record_is_refused(at, value):
    unit = unit_of([(32, 32), (32, 32)], "int8")
    (shard,) = whole(unit)
    record, back = kept(unit, shard, values_of(unit))
    record[8 * at : 8 * at + 8].view(torch.int64).fill_(value)
    with pytest.raises(StoreError):
        read_record(record, unit, shard, back)


def test_nan_stays_and_what_would_become_infinite_is_refused():
    unit = unit_of([(32, 32)], "fp16")
    (shard,) = whole(unit)
    values = values_of(unit)
    values[5], values[6] = math.nan, math.inf
    _, back = kept(unit, shard, values)
    assert back[5].isnan()
    assert back[6].isinf()
    values[7] = 1e5
    with pytest.raises(StoreError, match="cannot hold 'p0', whose largest finite magnitude is 100000; use 'bf16'"):
        kept(unit, shard, values)
