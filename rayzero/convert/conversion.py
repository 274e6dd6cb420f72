"""``rayzero convert`` and ``rayzero export``: a checkpoint of one format becomes one of another, in bounded memory,
complete or not at all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from rayzero.checkpoint.tensor_file import TensorDecl
from rayzero.convert.formats import Format, open_reader
from rayzero.convert.formats.content import Content, Reader, listed
from rayzero.convert.formats.rayzero_format import RayZeroReader, write_rayzero
from rayzero.convert.formats.safetensors_folder import WHOLE_FILE, SafetensorsReader, write_file, write_safetensors
from rayzero.convert.remote_checkpoints import nearby
from rayzero.convert.translated_reader import (
    CONFIG_FILE,
    Named,
    as_published,
    find_config,
    published,
    read_config,
    unpublished,
)
from rayzero.errors import CheckpointError, CheckpointWriteError, ConfigError
from rayzero.files import fsync, new_folder
from rayzero.quantities import count

TARGETS = (Format.HF, Format.DCP, Format.RAYZERO)
MAX_SHARD_BYTES = 5_000_000_000  # as Hugging Face's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion wrote."""

    path: Path
    size_bytes: int
    files: int
    content: Content
    states: bool  # optimizer states were written; for RayZero perhaps zeros
    names: str = ""  # whose names the tensors have, where a model's config lets one choose

    def __str__(self) -> str:
        held, written = self.content.has_states, "with" if self.states else "without"
        dropped = ", which the source has and this format or --weights-only leaves out" if held > self.states else ""
        named = f", {self.names}" if self.names else ""
        left_out = f"; left out: {listed(self.content.left_out)}" if self.content.left_out else ""
        params, buffers = count(len(self.content.params), "parameter"), count(len(self.content.buffers), "buffer")
        return (
            f"{self.path}  {count(self.files, 'file')}, {count(self.size_bytes, 'byte')}: {params} and {buffers} "
            f"of step {self.content.step}, {written} optimizer states{dropped}{named}{left_out}"
        )


def convert(
    source: Path | str,
    dest: Path | str,
    *,
    to: str = Format.HF,
    dtype: torch.dtype | None = None,
    max_bytes: int = MAX_SHARD_BYTES,
    optimizer: str = "",
    weights_only: bool = False,
    config: Path | None = None,
) -> Converted:
    """Write the checkpoint ``source``, of any format that ``open_reader`` knows, as the new folder ``dest``. A URL is
    first copied beside ``dest``.

    to: "hf" (safetensors with an index; weights only), "dcp" (``torch.distributed.checkpoint``) or "rayzero" (a run
    resumes from it). dtype: of floating-point weights in "hf" and "dcp"; None keeps the source's. max_bytes: of one
    file, where a single tensor is not larger. optimizer: for "rayzero", the import path of the class that resumes, if
    the source does not say; "": AdamW. weights_only: leave optimizer states out. config: transformers' config.json of
    the model; by default one that lies beside the source, in its folder or one of the two above. With it, "hf" gets
    the names that transformers publishes, tied tensors once, and the config; "dcp" and "rayzero" get the names of the
    model's parameters if the source has published ones.

    Memory: a few pieces of at most 16 MiB, and of a DCP source the chunks of one tensor. Values keep their bits, unless
    ``dtype`` rounds them. Raises ConfigError for a wrong argument, CheckpointError if the source is damaged, if
    ``dest`` exists or cannot be written, and UnsupportedError for what is refused by name. Until everything is durable,
    nothing exists under the name ``dest``."""
    dest = Path(dest)
    require_target(to)
    if to == Format.RAYZERO and dtype is not None:
        raise ConfigError("a RayZero checkpoint holds fp32 masters; leave dtype out")
    if max_bytes < 1:
        raise ConfigError(f"a file of at most {max_bytes} bytes holds nothing; give a larger size")
    if dest.exists() or dest.is_symlink():
        raise CheckpointError(f"{dest} exists; give the name of a new folder")
    _require_folders(dest)
    if config is not None and config.is_dir():
        config /= CONFIG_FILE  # as transformers takes it
    if config is not None and read_config(config) is None:
        raise ConfigError(f"{config} names no model_type; give the config.json of a model of transformers")
    with nearby(os.fspath(source), dest) as path:
        reader = open_reader(path, states=not weights_only)
        try:
            named = _named(reader, config or find_config(path), to)
            if to == Format.RAYZERO:
                write_rayzero(named.reader, dest, optimizer=optimizer, max_bytes=max_bytes)
            else:
                _write_folder(named, dest, to, dtype, max_bytes)
        except OSError as exc:
            raise CheckpointWriteError(f"cannot convert to {dest}: {exc.strerror or exc}") from exc
    sizes = [path.stat().st_size for path in dest.iterdir()]
    return Converted(
        path=dest,
        size_bytes=sum(sizes),
        files=len(sizes),
        content=reader.content,
        states=to == Format.RAYZERO or (to == Format.DCP and named.reader.content.has_states),
        names=named.says,
    )


def require_target(to: str) -> None:
    """Raise ConfigError unless ``to`` is a format that ``convert`` writes."""
    if to not in TARGETS:
        raise ConfigError(f"cannot write {to!r}; choose one of {', '.join(TARGETS)}")


def _named(source: Reader, config: Path | None, to: str) -> Named:
    """The source with the names to write: safetensors have published ones, other formats a model's own."""
    if isinstance(source, SafetensorsReader):
        return as_published(source, config) if to == Format.HF else unpublished(source, config)
    return published(source, config) if to == Format.HF else Named(reader=source, says="")


def _write_folder(named: Named, dest: Path, to: str, dtype: torch.dtype | None, max_bytes: int) -> None:
    with new_folder(dest) as folder:
        if to == Format.DCP:
            from rayzero.convert.formats.dcp_writer import write_dcp  # imports torch.distributed.checkpoint

            write_dcp(named.reader, folder, dtype=dtype, max_bytes=max_bytes)
        else:
            write_safetensors(named.reader, folder, dtype=dtype, max_bytes=max_bytes)
            if (text := named.config(dtype)) is not None:
                (folder / CONFIG_FILE).write_text(text)
        for path in (*folder.iterdir(), folder):
            fsync(path)


def _require_folders(dest: Path) -> None:
    """Raise CheckpointError if ``dest`` is below a file."""
    if in_the_way := next((above for above in dest.parents if above.exists() and not above.is_dir()), None):
        raise CheckpointError(f"cannot write {dest}: {in_the_way} is a file, not a folder; give another name")


# ---- one file ---------------------------------------------------------------------------------------------------


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
        _require_folders(target)
        if target.is_dir():
            raise CheckpointError(
                f"{target} is a folder; give the name of a file, or of a folder to put {WHOLE_FILE} in"
            )
        if target.exists() and not overwrite:
            raise CheckpointError(f"{target} exists; give another name or ask to overwrite it (--overwrite)")
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
