"""``rayzero convert``: a checkpoint of one format becomes one of another, in bounded memory, complete or not at all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from rayzero.convert.formats import Format, open_reader
from rayzero.convert.formats.content import Content, Reader, listed
from rayzero.convert.formats.rayzero_writer import write_rayzero
from rayzero.convert.formats.safetensors_folder import SafetensorsReader, write_safetensors
from rayzero.convert.published.config import CONFIG_FILE, find_config, read_config
from rayzero.convert.published.translated_reader import Named, as_published, published, unpublished
from rayzero.convert.remote_checkpoints import nearby
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
    _check_arguments(to, dtype, max_bytes)
    _check_dest(dest)
    if config is not None and config.is_dir():
        config /= CONFIG_FILE  # as transformers takes it
    if config is not None and read_config(config) is None:
        raise ConfigError(f"{config} names no model_type; give the config.json of a model of transformers")
    with nearby(os.fspath(source), dest) as path:
        reader = open_reader(path, states=not weights_only)
        return _convert(reader, config or find_config(path), dest, Format(to), dtype, max_bytes, optimizer)


def _convert(
    source: Reader,
    config: Path | None,
    dest: Path,
    to: Format,
    dtype: torch.dtype | None,
    max_bytes: int,
    optimizer: str,
) -> Converted:
    try:
        named = _named(source, config, to)
        reader = named.reader
        if to == Format.RAYZERO:
            write_rayzero(reader, dest, optimizer=optimizer, max_bytes=max_bytes)
        else:
            with new_folder(dest) as folder:
                if to == Format.DCP:
                    from rayzero.convert.formats.dcp_writer import write_dcp  # imports torch.distributed.checkpoint

                    write_dcp(reader, folder, dtype=dtype, max_bytes=max_bytes)
                else:
                    write_safetensors(reader, folder, dtype=dtype, max_bytes=max_bytes)
                    if (text := named.config(dtype)) is not None:
                        (folder / CONFIG_FILE).write_text(text)
                for path in (*folder.iterdir(), folder):
                    fsync(path)
    except OSError as exc:
        raise CheckpointWriteError(f"cannot convert to {dest}: {exc.strerror or exc}") from exc
    sizes = [path.stat().st_size for path in dest.iterdir()]
    return Converted(
        path=dest,
        size_bytes=sum(sizes),
        files=len(sizes),
        content=source.content,
        states=to == Format.RAYZERO or (to == Format.DCP and reader.content.has_states),
        names=named.says,
    )


def _named(source: Reader, config: Path | None, to: Format) -> Named:
    """The source with the names to write: safetensors have published ones, other formats a model's own."""
    if isinstance(source, SafetensorsReader):
        return as_published(source, config) if to == Format.HF else unpublished(source, config)
    return published(source, config) if to == Format.HF else Named(reader=source, says="")


def _check_arguments(to: str, dtype: torch.dtype | None, max_bytes: int) -> None:
    if to not in TARGETS:
        raise ConfigError(f"cannot write {to!r}; choose one of {', '.join(TARGETS)}")
    if to == Format.RAYZERO and dtype is not None:
        raise ConfigError("a RayZero checkpoint holds fp32 masters; leave dtype out")
    if max_bytes < 1:
        raise ConfigError(f"a file of at most {max_bytes} bytes holds nothing; give a larger size")


def _check_dest(dest: Path) -> None:
    if dest.exists() or dest.is_symlink():
        raise CheckpointError(f"{dest} exists; give the name of a new folder")
    require_folders(dest)


def require_folders(dest: Path) -> None:
    """Raise CheckpointError if ``dest`` is below a file."""
    if in_the_way := next((above for above in dest.parents if above.exists() and not above.is_dir()), None):
        raise CheckpointError(f"cannot write {dest}: {in_the_way} is a file, not a folder; give another name")
