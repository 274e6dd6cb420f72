"""``rayzero export``: writes one complete model.safetensors from a checkpoint's shards, parameter by parameter."""

from __future__ import annotations

from pathlib import Path

import torch

from rayzero.checkpoint.files.tensor_file import TensorDecl
from rayzero.convert.conversion import require_folders
from rayzero.convert.formats.rayzero_reader import RayZeroReader
from rayzero.convert.formats.safetensors_folder import WHOLE_FILE, write_file
from rayzero.errors import CheckpointError
from rayzero.files import fsync


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
    staging = target.with_name(f".{target.name}.tmp")
    try:
        _check_target(target, overwrite)
        reader = RayZeroReader(directory, states=False)
        content = reader.content
        decls = {}
        for name, decl in content.decls.items():
            cast = dtype if reader.has_master(content.tied.get(name, name)) else None
            decls[name] = TensorDecl(decl.shape, cast or decl.torch_dtype(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_file(reader, staging, decls)
            staging.rename(target)
        finally:
            staging.unlink(missing_ok=True)
        fsync(target.parent)
    except OSError as exc:
        raise CheckpointError(f"cannot export to {target}: {exc.strerror or exc}") from exc
    return target


def _check_target(target: Path, overwrite: bool) -> None:
    require_folders(target)
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder; give the name of a file, or of a folder to put {WHOLE_FILE} in")
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists; give another name or ask to overwrite it (--overwrite)")


def _target(out: Path) -> Path:
    """The file to write. Raises CheckpointError for a name that looks like a file of another format."""
    if out.suffix == ".safetensors":
        return out
    if out.suffix[1:].isalpha() and not out.is_dir():
        raise CheckpointError(
            f"{out} ends in {out.suffix}, but an export is a .safetensors file; give such a name, or an existing "
            f"folder to put {WHOLE_FILE} in"
        )
    return out / WHOLE_FILE
