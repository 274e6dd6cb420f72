"""Checkpoints of other systems: what each holds, as one ``Content``, and its values in bounded memory.

A format is a ``Reader`` (``formats/content.py``) in a file of its own, known by what is in a folder (``format_of``),
and perhaps a function that writes it. Nothing in a source is run: see ``formats/pickles.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from pathlib import Path

from rayzero.checkpoint.manifest import MANIFEST
from rayzero.convert.formats.content import Content, Reader, WeightDecl, damaged
from rayzero.convert.formats.deepspeed_reader import Stage0Reader, ZeroReader, has_model_files, has_zero_files
from rayzero.convert.formats.pickles import METADATA_FILE
from rayzero.convert.formats.rayzero_format import RayZeroReader
from rayzero.convert.formats.safetensors_folder import INDEX_FILE, WHOLE_FILE, SafetensorsReader
from rayzero.convert.formats.universal_reader import ZERO_FOLDER, UniversalReader
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.files import read_text

__all__ = ["Content", "Format", "Reader", "WeightDecl", "format_of", "open_reader"]

_LATEST = ("latest", "latest_universal")  # DeepSpeed's files that name the newest folder beside them
_MAX_TAG = 1 << 12  # bytes


class Format(StrEnum):
    """A format that can be read."""

    RAYZERO = "rayzero"
    HF = "hf"
    DCP = "dcp"
    DEEPSPEED = "deepspeed"
    STAGE0 = "deepspeed-stage-0"
    UNIVERSAL = "deepspeed-universal"


def _open_dcp(path: Path, *, states: bool) -> Reader:
    from rayzero.convert.formats.dcp_reader import DcpReader  # imports torch.distributed.checkpoint

    return DcpReader(path, states=states)


_READERS: dict[Format, Callable[..., Reader]] = {
    Format.RAYZERO: RayZeroReader,
    Format.HF: SafetensorsReader,
    Format.DCP: _open_dcp,
    Format.DEEPSPEED: ZeroReader,
    Format.STAGE0: Stage0Reader,
    Format.UNIVERSAL: UniversalReader,
}


def format_of(names: Collection[str]) -> Format:
    """The format of a folder by the names in it; safetensors if it is none of the others."""
    if MANIFEST in names:
        return Format.RAYZERO
    if METADATA_FILE in names:
        return Format.DCP
    if has_zero_files(sorted(names)):
        return Format.DEEPSPEED
    if WHOLE_FILE in names or INDEX_FILE in names:
        return Format.HF
    if ZERO_FOLDER in names:
        return Format.UNIVERSAL
    return Format.STAGE0 if has_model_files(sorted(names)) else Format.HF


def open_reader(path: Path, *, states: bool = True) -> Reader:
    """Open a checkpoint of any format: a safetensors file, or a folder; of DeepSpeed also the folder above, whose
    ``latest`` names one.

    states: False leaves optimizer states out, and what is wrong with them. Raises CheckpointError if nothing is there
    or it is damaged, UnsupportedError if it needs what is refused by name."""
    try:
        folder = _tagged(path) if path.is_dir() else path
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    except OSError as exc:
        raise CheckpointError(f"weights cannot be read from {path}: {exc.strerror}") from exc
    format_ = format_of(names)
    try:
        return _READERS[format_](folder, states=states)
    except (CheckpointError, UnsupportedError) as exc:
        if str(folder) in str(exc):
            raise
        raise type(exc)(f"{folder}: {exc}") from exc
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as exc:  # a field may hold anything
        raise damaged(folder, f"it lacks or misstates a field of the format {format_} ({exc!r})") from exc


def _tagged(folder: Path) -> Path:
    """The folder that DeepSpeed's ``latest`` names; ``folder`` itself if it has none."""
    for name in _LATEST:
        if not (folder / name).is_file():
            continue
        try:
            tag = read_text(folder / name, at_most=_MAX_TAG).strip()
        except ValueError as exc:
            raise CheckpointError(f"{folder / name} is not text: {exc}") from exc
        if not tag or tag in (".", "..") or "/" in tag or "\0" in tag or not (folder / tag).is_dir():
            raise CheckpointError(f"{folder / name} names {tag[:200]!r}, which is no folder beside it")
        return folder / tag
    return folder
