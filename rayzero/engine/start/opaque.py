"""What must hold before opaque parameters get their bytes from somewhere, so that these still mean the same.

Their class may keep the key to them among the attributes of the Parameter (bitsandbytes' ``quant_state``). Neither
checkpoints nor owners have it: it is the model's own, on every rank, so the bytes must be the model's own, too.
[Note: opaque] in units/partition.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.tensor_file import as_bytes
from rayzero.codecs.record import codec_of
from rayzero.engine.units.partition import UnitPlan, is_opaque
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.layout.model_layout import ParamSlot, UnitLayout, dtype_name
from rayzero.protocol.bits import same_bits
from rayzero.protocol.messages import COMPUTE
from rayzero.tensor_metadata import class_name, own_class

_SEEN = 1 << 16  # elements; of 4-bit codes viewed as floats, at least one of some thousand is NaN


def refuse_apart(plan: UnitPlan, params: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """Raise UnsupportedError for an opaque parameter with a key that is not on ``device``, where the rank computes:
    only its class can move the key."""
    for name in (slot.name for unit in plan.layout.units if unit.opaque for slot in unit.slots):
        param = params[name]
        if _has_key(param) and param.device != device:
            raise UnsupportedError(
                f"parameter {name!r} is a {class_name(param)} on {param.device}, and this rank computes on {device}: "
                f"its attributes ({_keys(param)}) cannot be moved by rayzero.prepare(); call model.to({str(device)!r}) "
                "before"
            )


def refuse_codes(plan: UnitPlan, params: Mapping[str, nn.Parameter]) -> None:
    """Raise UnsupportedError for a frozen plain Parameter with NaN among its first elements whose values would not be
    kept as they are: weights have none, but codes that are viewed as floats do."""
    for unit in plan.layout.units:
        for slot in () if unit.trainable or unit.opaque else unit.slots:
            param = params[slot.name]
            changes = param.dtype is not unit.dtype or codec_of(unit).lossy
            if changes and not param.is_meta and bool(param.detach().reshape(-1)[:_SEEN].isnan().any()):
                kept = f"{dtype_name(unit.dtype)}{f' by {unit.codec!r}' if unit.is_coded else ''}"
                raise UnsupportedError(
                    f"parameter {slot.name!r} is frozen and has NaN, as codes have that are viewed as "
                    f"{dtype_name(param.dtype)}, and would be kept as {kept}; give codes a class of their own (class "
                    "Codes(nn.Parameter)), whose bytes are never converted, or compute in their dtype"
                )


def require_own_bytes(source: object, name: str, param: nn.Parameter, value: Tensor) -> None:
    """Raise CheckpointError if ``value`` (of the parameter's shape and dtype) would give other bytes to a parameter
    whose key is the model's own."""
    if not is_opaque(param) or not _has_key(param):
        return
    if not same_bits(value.cpu(), param.detach().cpu()).all():
        raise _other_bytes(source, name, param)


def require_same_form(reader: CheckpointReader, unit: UnitLayout, slot: ParamSlot, param: nn.Parameter) -> None:
    """Raise CheckpointError if the checkpoint's values of a parameter are bytes and the model's are not, if the model
    reads those bytes as another dtype, or by a key of its own that belongs to others. ``unit``: the checkpoint's."""
    saved, ours = _form(unit.opaque, unit.dtype), _form(is_opaque(param), param.dtype)
    if saved != ours:
        raise CheckpointError(
            f"{slot.name!r} is {saved} in {reader.directory}, but {ours} in the model (a {class_name(param)}), and "
            "bytes are not converted; build the model as the run that saved it did"
        )
    if not unit.opaque or not _has_key(param) or tuple(param.shape) != slot.shape:
        return
    flat = param.detach().reshape(-1)
    for piece in reader.manifest.pieces.get((slot.name, COMPUTE), ()):
        if hashlib.sha256(as_bytes(flat[piece.start : piece.stop])).hexdigest() != piece.sha256:
            raise _other_bytes(reader.directory, slot.name, param)


def _form(opaque: bool, dtype: torch.dtype) -> str:
    return f"bytes of {dtype_name(dtype)}" if opaque else "a plain parameter"


def _has_key(param: nn.Parameter) -> bool:
    return own_class(param) is not nn.Parameter and bool(vars(param)) and not param.is_meta


def _keys(param: nn.Parameter) -> str:
    return ", ".join(vars(param))


def _other_bytes(source: object, name: str, param: nn.Parameter) -> CheckpointError:
    return CheckpointError(
        f"{name!r} is a {class_name(param)} and has other bytes in {source} than in the model; what tells their "
        f"meaning is on the model's Parameter ({_keys(param)}) and nowhere else, so build the model from the same base"
    )
