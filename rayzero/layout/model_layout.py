"""Where every parameter is: units, slots and shards, as plain numbers.

A *unit* has one flat vector of one dtype. A *slot* is one parameter's range in it. It starts at a multiple of ``ALIGN``
elements and is padded to one, so that no kernel ever sees a tail and bits never depend on how work is split. A *shard*
is a fixed-size part of the flat vector, or some whole parameters of it, if the optimizer needs these whole. The grid of
shards depends on the layout alone, never on the number of owners.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, GetCoreSchemaHandler, Strict
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from rayzero.errors import ConfigError
from rayzero.records import JsonRecord, Several, Whole

ALIGN = 64  # elements


def _holdable(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(shape) >= 1 << 62:
        raise ValueError("must have fewer than 2**62 elements")
    return shape


Shape = Annotated[Several[Whole], Field(max_length=64), AfterValidator(_holdable)]
"""Of a tensor that torch can have, read from JSON."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BYTES = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool, torch.float64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip
_OPAQUE_DTYPES = _DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in _BYTES}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch.", as layouts, manifests and messages write it."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str, *, opaque: bool = False) -> torch.dtype:
    """The inverse of ``dtype_name`` for the dtypes that a unit may have, or an opaque unit. Raises ConfigError for any
    other name."""
    known = _OPAQUE_DTYPES if opaque else _DTYPES
    try:
        return known[name]
    except KeyError:
        raise ConfigError(f"dtype {name!r} is not one of {sorted(known)}") from None


def is_unit_dtype(dtype: torch.dtype, *, opaque: bool = False) -> bool:
    """Whether a unit may have ``dtype``, or an opaque unit."""
    return dtype_name(dtype) in (_OPAQUE_DTYPES if opaque else _DTYPES)


def loses_bits(values: torch.dtype, kept: torch.dtype) -> bool:
    """Whether ``kept`` cannot hold every value of the dtype ``values``. bfloat16 and float16 lose each other's."""
    try:
        return torch.promote_types(values, kept) is not kept
    except RuntimeError:  # float8 and quantized numbers have no dtype in common with others
        return values is not kept


def aligned(numel: int) -> int:
    """``numel`` rounded up to a multiple of ``ALIGN``."""
    return -(-numel // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlot:
    """One parameter's range in its unit's flat vector, in elements. ``start`` is a multiple of ``ALIGN``."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """The number of elements of the parameter: 1 for a 0-dim one, 0 for an empty one."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The end of the parameter itself, without padding."""
        return self.start + self.numel

    @property
    def padded_stop(self) -> int:
        """The end of the slot's range, padding included."""
        return self.start + aligned(self.numel)


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """Parameters that are gathered and released together. They have one dtype and are all trained or all frozen."""

    index: int
    name: str
    dtype: torch.dtype  # of the published parameters and of the gradients
    trainable: bool  # False: it has no moments or gradients, and a master only with frozen_master
    slots: tuple[ParamSlot, ...]
    frozen_master: bool = False  # frozen, and ``dtype`` cannot hold its values exactly: owners keep them in fp32 too
    codec: str = "none"  # codecs/: how owners keep its published parameters; only frozen units have one
    opaque: bool = False  # frozen, and its bytes need not be its values: neither converted nor encoded with loss

    @property
    def is_coded(self) -> bool:
        """Whether owners keep its published parameters encoded, in records (codecs/record.py)."""
        return self.codec != "none"

    @property
    def has_master(self) -> bool:
        """Whether owners keep its values in fp32."""
        return self.trainable or self.frozen_master

    @property
    def can_split(self) -> bool:
        """Whether a kernel may keep its masters split (kernels/split_master.py)."""
        return self.trainable and self.dtype is torch.bfloat16

    @property
    def initial_dtype(self) -> torch.dtype:
        """The dtype of the values that owners get at the start: the widest that they keep."""
        return torch.float32 if self.has_master else self.dtype

    @cached_property
    def numel(self) -> int:
        """The number of elements of the flat vector, padding included."""
        return self.slots[-1].padded_stop if self.slots else 0

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """For each slot, how many elements of padding follow it."""
        return tuple(slot.padded_stop - slot.stop for slot in self.slots)

    @cached_property
    def size_bytes(self) -> int:
        """The bytes of the flat vector in the unit's dtype."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A contiguous range of a unit's flat vector, owned by one optimizer actor."""

    index: int  # over the whole model, in forward order
    unit: int
    start: int  # elements of the unit's flat vector, a multiple of ALIGN
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements, padding included."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSlice:
    """The part of one slot that lies in one shard."""

    slot: int  # index in the unit's slots
    start: int  # elements from the shard's start
    stop: int  # padding excluded
    param_start: int  # elements from the parameter's start

    @property
    def numel(self) -> int:
        """The number of elements, without padding."""
        return self.stop - self.start


def whole_ends(unit: UnitLayout, shard_numel: int) -> list[int]:
    """Where shards of whole parameters end: each has as many as fit into ``shard_numel`` elements, or one."""
    ends, start = list[int](), 0
    for slot in unit.slots:
        if slot.padded_stop - start > shard_numel and slot.start > start:
            ends.append(slot.start)
            start = slot.start
    return [*ends, unit.numel] if unit.numel > start else ends


def slices_of(unit: UnitLayout, shard: Shard) -> tuple[SlotSlice, ...]:
    """The parts of slots inside ``shard``, in order, without padding and empty parameters."""
    parts = []
    for i, slot in enumerate(unit.slots):
        start, stop = max(slot.start, shard.start), min(slot.stop, shard.stop)
        if start < stop:
            parts.append(
                SlotSlice(slot=i, start=start - shard.start, stop=stop - shard.start, param_start=start - slot.start)
            )
    return tuple(parts)


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """All units in forward order and the shard grid over them.

    Knows names, shapes, dtypes and offsets; not who owns a shard or where bytes are. Raises ConfigError if
    ``shard_numel`` is not a positive multiple of ``ALIGN``."""

    units: tuple[UnitLayout, ...]
    shard_numel: int  # elements, a multiple of ALIGN
    whole_parameters: bool = False  # no shard of a trained unit cuts a parameter: the optimizer updates whole ones

    def __post_init__(self) -> None:
        if self.shard_numel <= 0 or self.shard_numel % ALIGN:
            raise ConfigError(f"shard_numel must be a positive multiple of {ALIGN} elements, got {self.shard_numel}")

    @cached_property
    def shards_by_unit(self) -> tuple[tuple[Shard, ...], ...]:
        """For each unit, its shards in order."""
        grid: list[tuple[Shard, ...]] = []
        index = count()
        for unit in self.units:
            if self.whole_parameters and unit.trainable:
                ends = whole_ends(unit, self.shard_numel)
            else:
                ends = [*range(self.shard_numel, unit.numel, self.shard_numel), *([unit.numel] if unit.numel else [])]
            cuts = pairwise((0, *ends))
            grid.append(tuple(Shard(index=next(index), unit=unit.index, start=at, stop=stop) for at, stop in cuts))
        return tuple(grid)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Every shard, in forward order; ``shards[i].index == i``."""
        return tuple(shard for shards in self.shards_by_unit for shard in shards)

    def slices(self, shard: Shard) -> tuple[SlotSlice, ...]:
        return slices_of(self.units[shard.unit], shard)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of names, shapes, dtypes and the shard grid. Two sides with the same digest agree on all of
        them."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """A JSON-able description, which ``parse_record`` reads."""
        return ({"whole_parameters": True} if self.whole_parameters else {}) | {
            "shard_numel": self.shard_numel,
            "units": [
                {
                    "name": unit.name,
                    "dtype": dtype_name(unit.dtype),
                    "trainable": unit.trainable,
                    "params": [[slot.name, list(slot.shape)] for slot in unit.slots],
                }
                | ({"frozen_master": True} if unit.frozen_master else {})
                | ({"codec": unit.codec} if unit.is_coded else {})
                | ({"opaque": True} if unit.opaque else {})
                for unit in self.units
            ],
        }

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """``parse_record`` reads what ``to_json()`` gave."""
        return no_info_after_validator_function(_LayoutRecord.layout, handler.generate_schema(_LayoutRecord))


class _UnitRecord(JsonRecord):
    """A unit in JSON."""

    name: str
    dtype: str
    trainable: bool
    params: Several[Annotated[tuple[str, Shape], Strict(False)]]
    frozen_master: bool = False
    codec: str = "none"
    opaque: bool = False


class _LayoutRecord(JsonRecord):
    """A layout in JSON."""

    shard_numel: Whole
    units: Several[_UnitRecord]
    whole_parameters: bool = False

    def layout(self) -> ModelLayout:
        """Raises ConfigError for an unknown dtype and a wrong size of shards, ValueError for a name that is not one
        parameter's."""
        units = tuple(
            lay_out_unit(
                index,
                unit.name,
                dtype_from_name(unit.dtype, opaque=unit.opaque),
                unit.trainable,
                list(unit.params),
                frozen_master=unit.frozen_master,
                codec=unit.codec,
                opaque=unit.opaque,
            )
            for index, unit in enumerate(self.units)
        )
        names = Counter(slot.name for unit in units for slot in unit.slots)
        if twice := next((name for name, times in names.items() if times > 1), None):
            raise ValueError(f"parameter {reprlib.repr(twice)} comes twice")
        return ModelLayout(units=units, shard_numel=self.shard_numel, whole_parameters=self.whole_parameters)


def lay_out_unit(
    index: int,
    name: str,
    dtype: torch.dtype,
    trainable: bool,
    params: list[tuple[str, tuple[int, ...]]],
    *,
    frozen_master: bool = False,
    codec: str = "none",
    opaque: bool = False,
) -> UnitLayout:
    """Place parameters (name, shape) one after another, with each slot aligned and padded to ``ALIGN``."""
    slots: list[ParamSlot] = []
    start = 0
    for param_name, shape in params:
        slot = ParamSlot(name=param_name, shape=shape, start=start)
        slots.append(slot)
        start = slot.padded_stop
    return UnitLayout(
        index=index,
        name=name,
        dtype=dtype,
        trainable=trainable,
        slots=tuple(slots),
        frozen_master=frozen_master,
        codec=codec,
        opaque=opaque,
    )


def runs(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Group shards that directly follow each other in a unit."""
    found: list[list[Shard]] = []
    for shard in shards:
        follows = found and found[-1][-1].unit == shard.unit and found[-1][-1].stop == shard.start
        found[-1].append(shard) if follows else found.append([shard])
    return found


def layer_groups(units: Sequence[UnitLayout], most: int) -> tuple[str, ...]:
    """The label of each unit's group. Up to ``most`` units are groups by themselves; more are grouped with their
    neighbours in forward order, as evenly as possible, with labels such as ``"blocks.0..blocks.3"``."""
    names = [unit.name for unit in units]
    num = min(most, len(names))
    bounds = [len(names) * group // num for group in range(num + 1)] if names else []
    found: list[str] = []
    for start, stop in pairwise(bounds):
        label = names[start] if stop == start + 1 else f"{names[start]}..{names[stop - 1]}"
        found += [label] * (stop - start)
    return tuple(found)
