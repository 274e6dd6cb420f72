"""Turns a loop's own state into JSON and named tensors, and back: what is loaded equals what was saved.

JSON alone would silently change values. It turns a dict's integer keys into text (a MultiStepLR whose milestones are
text never decays) and tuples into lists. Such values are marked; everything that JSON keeps stays as it is.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rayzero.checkpoint.tensor_file import as_bytes
from rayzero.errors import CheckpointError
from rayzero.layout.model_layout import dtype_name

_TUPLE, _ITEMS, _COUNTER, _TENSOR = "~tuple", "~items", "~counter", "~tensor"  # the one key of a marked value
_MOST_NESTED = 100


def pack(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``state`` as a JSON object, and its tensors on the CPU by their number and place in it. The tensors are
    detached, and copied only if they have to be.

    Takes None, numbers, text, dense tensors of any shape and dtype, and lists, tuples, dicts and Counters of these; the
    keys of a dict may be any of them. Subclasses (OrderedDict, namedtuple) come back as the plain kind. Raises
    CheckpointError that names the place of anything else, or of what is nested more than 100 deep."""
    tensors: dict[str, Tensor] = {}
    packed = {str(key): _pack(value, str(key), tensors, 0) for key, value in state.items()}
    return packed, tensors


def unpack(packed: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of ``pack``. Raises CheckpointError if a tensor is missing or a mark is damaged."""
    return {key: _unpack(value, tensors) for key, value in packed.items()}


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """``state`` as bytes: a header's length in eight, the header in JSON, then the tensors. Raises as ``pack``."""
    packed, tensors = pack(state)
    described = [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    header = json.dumps([packed, described], separators=(",", ":")).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *map(as_bytes, tensors.values())])


def from_bytes(content: bytes) -> dict[str, Any]:
    """The inverse of ``to_bytes``; its tensors are copies. Raises CheckpointError for other bytes."""
    at = 8 + int.from_bytes(content[:8], "little")
    try:
        packed, described = json.loads(content[8:at])
        tensors = {}
        for name, dtype_text, shape in described:
            dtype = getattr(torch, dtype_text)  # also one that safetensors has no name for
            size = math.prod(shape) * dtype.itemsize
            bytes_ = bytearray(content[at : at + size])
            flat = (
                torch.frombuffer(bytes_, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            tensors[name] = flat.view(dtype).view(shape)
            at += size
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"a loop's state of {len(content):,} bytes is damaged ({error!r})") from error
    return unpack(packed, tensors)


def is_packable(value: Any) -> bool:
    """Whether ``pack`` accepts the value."""
    try:
        pack({"value": value})
    except CheckpointError:
        return False
    return True


def _pack(value: Any, place: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > _MOST_NESTED:
        raise CheckpointError(f"{place[:100]}... is nested more than {_MOST_NESTED} deep, or contains itself")
    if isinstance(value, Tensor):
        name = f"{len(tensors)}.{place}"  # numbered: different places may read the same
        tensors[name] = _plain_tensor(value, place)
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return _pack_mapping(value, place, tensors, depth)
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{place}[{i}]", tensors, depth + 1) for i, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    raise CheckpointError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot keep; save numbers, text, "
        "tensors, and lists, tuples or dicts of these"
    )


def _plain_tensor(value: Tensor, place: str) -> Tensor:
    if value.layout is not torch.strided or value.is_meta or value.is_nested or value.is_quantized:
        kind = "a meta" if value.is_meta else "a nested" if value.is_nested else "a sparse or quantized"
        raise CheckpointError(
            f"{place} is {kind} tensor, which a checkpoint cannot keep; save a dense one (.to_dense())"
        )
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _pack_mapping(value: Mapping[Any, Any], place: str, tensors: dict[str, Tensor], depth: int) -> dict[str, Any]:
    if type(value) is not Counter and all(isinstance(key, str) and not key.startswith("~") for key in value):
        return {key: _pack(item, f"{place}.{key}", tensors, depth + 1) for key, item in value.items()}
    pairs = [
        [_pack(key, f"a key of {place}", tensors, depth + 1), _pack(item, f"{place}[{key!r}]", tensors, depth + 1)]
        for key, item in value.items()
    ]
    return {_COUNTER if isinstance(value, Counter) else _ITEMS: pairs}


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    try:
        return _REVIVE[mark](value[mark], tensors) if len(value) == 1 and mark in _REVIVE else unpack(value, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the saved state is damaged at {str(value)[:100]}") from error


def _unpack_pairs(pairs: Any, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {_unpack(key, tensors): _unpack(item, tensors) for key, item in pairs}


_REVIVE: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    _TUPLE: lambda items, tensors: tuple(_unpack(item, tensors) for item in items),
    _ITEMS: _unpack_pairs,
    _COUNTER: lambda pairs, tensors: Counter(_unpack_pairs(pairs, tensors)),
    _TENSOR: lambda place, tensors: tensors[place],
}
