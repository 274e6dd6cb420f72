"""``rayzero export``: writes one complete model.safetensors from a checkpoint's shards, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from rayzero.checkpoint.files.tensor_file import TensorDecl, TensorFileWriter, declare, fsync_directory
from rayzero.checkpoint.manifest import slots_of
from rayzero.checkpoint.reader import CheckpointReader
from rayzero.errors import CheckpointError
from rayzero.layout.model_layout import ParamSlot, UnitLayout
from rayzero.protocol.messages import COMPUTE, MASTER

MODEL_FILE = "model.safetensors"
_PART = 1 << 20  # elements of a parameter read at once


def export_full(
    directory: Path | str, out: Path | str, *, dtype: torch.dtype | None = None, overwrite: bool = False
) -> Path:
    """Write the checkpoint's parameters and persistent buffers under their plain names; returns the file.

    ``out``: a file ending in .safetensors, or a folder to put model.safetensors in. ``dtype``: what the fp32 masters
    are cast to; None keeps fp32. Frozen parameters without a master keep their own dtype, and buffers are rank 0's.
    Tied parameters are written under each of their names, so that ``load_state_dict(strict=True)`` accepts the file.
    Parameters pass through memory in parts of 1,048,576 elements, a few at a time. A rename makes the complete file
    appear. Raises CheckpointError if the file exists and ``overwrite`` is False, if ``out`` looks like a file of
    another format, if the file cannot be written there, and if the checkpoint is damaged.
    """
    target = _target(Path(out))
    try:
        _check_target(target, overwrite)
        with CheckpointReader(directory) as reader:
            _write_and_rename(reader, target, dtype)
    except OSError as exc:
        raise CheckpointError(f"cannot export to {target}: {exc.strerror or exc}") from exc
    return target


def _check_target(target: Path, overwrite: bool) -> None:
    if in_the_way := next((folder for folder in target.parents if folder.exists() and not folder.is_dir()), None):
        raise CheckpointError(f"cannot write {target}: {in_the_way} is a file, not a folder; give another name")
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder; give the name of a file, or of a folder to put {MODEL_FILE} in")
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists; give another name or ask to overwrite it (--overwrite)")


def _write_and_rename(reader: CheckpointReader, target: Path, dtype: torch.dtype | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.tmp")
    try:
        _write_model(reader, staging, dtype)
        staging.rename(target)
    except BaseException:
        with suppress(OSError):
            staging.unlink(missing_ok=True)
        raise
    fsync_directory(target.parent)


def _target(out: Path) -> Path:
    """The file to write. Raises CheckpointError for a name that looks like a file of another format."""
    if out.suffix == ".safetensors":
        return out
    if out.suffix[1:].isalpha() and not out.is_dir():
        raise CheckpointError(
            f"{out} ends in {out.suffix}, but an export is a .safetensors file; give such a name, or an existing "
            f"folder to put {MODEL_FILE} in"
        )
    return out / MODEL_FILE


def _write_model(reader: CheckpointReader, path: Path, dtype: torch.dtype | None) -> None:
    buffers = reader.buffers()
    params = _named_slots(reader)
    decls = {name: TensorDecl(slot.shape, _stored_dtype(unit, dtype)) for name, (unit, slot) in params.items()}
    decls |= {name: declare(buffer) for name, buffer in buffers.items()}
    with TensorFileWriter(path, decls, {"format": "pt"}) as file:
        for name in file.order:
            if name in buffers:
                file.write(name, [buffers[name]])
            else:
                file.write(name, _param_parts(reader, *params[name], decls[name].dtype))


def _named_slots(reader: CheckpointReader) -> dict[str, tuple[UnitLayout, ParamSlot]]:
    """Every name of every parameter, tied names included -> its unit and slot."""
    by_name = {slot.name: (unit, slot) for unit, slot in slots_of(reader.layout)}
    return by_name | {alias: by_name[name] for alias, name in reader.tied().items()}


def _stored_dtype(unit: UnitLayout, dtype: torch.dtype | None) -> torch.dtype:
    return (dtype or torch.float32) if unit.has_master else unit.dtype


def _param_parts(reader: CheckpointReader, unit: UnitLayout, slot: ParamSlot, dtype: torch.dtype) -> Iterator[Tensor]:
    kind = MASTER if unit.has_master else COMPUTE
    for start in range(0, slot.numel, _PART):
        yield reader.read_slice(slot.name, kind, start, min(start + _PART, slot.numel)).to(dtype)
