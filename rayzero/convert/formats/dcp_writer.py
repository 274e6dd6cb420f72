"""Writes torch.distributed.checkpoint folders (DCP) of a single process, a chunk of rows at a time.

torch's own writer keeps every tensor of a file until the file is complete, and needs the state dict in memory. The
format is simple: ``.metadata`` is a pickle of public dataclasses, and each chunk is what ``torch.save`` writes,
somewhere in a file. The names are those of ``{"model": ..., "optim": ...}`` with the dicts of
``torch.distributed.checkpoint.state_dict.get_state_dict``.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rayzero.convert.formats.content import PART, Content, Reader
from rayzero.convert.formats.dcp_reader import rows_of
from rayzero.convert.formats.pickles import METADATA_FILE

_MODEL, _OPTIM = "model", "optim"
_VERSION = "1.0.0"  # of the metadata, as torch 2.13 writes it


def write_dcp(reader: Reader, folder: Path, *, dtype: torch.dtype | None, max_bytes: int) -> None:
    """Write weights and optimizer states into ``folder``, which exists.

    dtype: what floating-point parameters are cast to; None keeps them. States stay fp32, and each has its step count
    as torch's Adam keeps it: one fp32 number. max_bytes: a file begins once the last one has that many. Chunks have
    whole rows and about ``PART`` elements. ``.metadata`` comes last; each file is fsynced."""
    files = _Files(folder, max_bytes)
    metadata = Metadata(state_dict_metadata={}, planner_data={}, storage_data={}, storage_meta=StorageMeta())
    metadata.version = _VERSION
    with files:
        for keys, value in _entries(reader, dtype):
            entry = ".".join(map(str, keys))
            metadata.planner_data[entry] = keys
            if isinstance(value, _Values):
                metadata.state_dict_metadata[entry] = _write_tensor(entry, value, files, metadata.storage_data)
            else:
                metadata.state_dict_metadata[entry] = BytesStorageMetadata()
                metadata.storage_data[MetadataIndex(entry)] = files.add(value)
    with (folder / METADATA_FILE).open("wb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class _Values:
    """A tensor that is read in parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]  # a range of its elements in C order


def _entries(reader: Reader, dtype: torch.dtype | None) -> Iterator[tuple[tuple[str | int, ...], _Values | Any]]:
    """(keys in the state dict, a tensor to read or a plain value)."""
    content = reader.content
    for name, decl in content.decls.items():
        yield (_MODEL, name), _Values(decl.shape, content.cast_dtype(name, dtype), partial(reader.weight, name))
    for name, param in content.params.items():
        for kind in param.states:
            yield (
                (_OPTIM, "state", name, kind),
                _Values(param.shape_of(kind), torch.float32, partial(reader.read, name, kind)),
            )
        if param.states:
            yield (_OPTIM, "state", name, "step"), _Values((), torch.float32, partial(_number, param.updates))
    if content.has_states:
        for index, group in enumerate(groups_of(content)):
            for option, value in group.items():
                yield (_OPTIM, "param_groups", index, option), value


def _number(value: int, start: int, stop: int) -> Tensor:
    return torch.full((1,), float(value), dtype=torch.float32, device="cpu")


def groups_of(content: Content) -> list[dict[str, Any]]:
    """The groups as torch's state dicts by names have them; one of all that is trained if the source says nothing."""
    if not content.groups:
        return [{"params": [name for name, param in content.params.items() if param.trained]}]
    return [{**group.options, "params": list(group.params)} for group in content.groups]


def _write_tensor(
    entry: str, values: _Values, files: _Files, places: dict[MetadataIndex, _StorageInfo]
) -> TensorStorageMetadata:
    """Write chunks of whole rows, about ``PART`` elements each; of an empty tensor one empty chunk, as torch does."""
    chunks: list[ChunkStorageMetadata] = []
    rows, row = rows_of(values.shape)
    step = max(1, PART // max(1, row))
    for index, first in enumerate(range(0, max(rows, 1), step)):
        last = min(first + step, rows)
        sizes = torch.Size((last - first, *values.shape[1:]) if values.shape else ())
        offsets = torch.Size((first, *(0 for _ in sizes[1:])) if values.shape else ())
        part = values.read(first * row, last * row).to(values.dtype).reshape(sizes)
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
        places[MetadataIndex(entry, offsets, index)] = files.add(part)
    return TensorStorageMetadata(TensorProperties(dtype=values.dtype), torch.Size(values.shape), chunks)


class _Files:
    """The folder's files of tensors, one after another."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._count = 0
        self._file: IO[bytes] | None = None

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end(durable=exc[0] is None)

    def add(self, value: Any) -> _StorageInfo:
        """Append a value as ``torch.save`` writes it; returns its place."""
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() != value.numel() * value.itemsize:
            value = value.clone()  # ``torch.save`` writes the whole memory that a view is part of
        data = io.BytesIO()
        torch.save(value, data)
        if self._file is not None and self._file.tell() + len(data.getbuffer()) > self._max_bytes:
            self._end(durable=True)
        if self._file is None:
            self._file = (self._folder / f"__0_{self._count}.distcp").open("wb")
            self._count += 1
        return _StorageInfo(Path(self._file.name).name, self._file.tell(), self._file.write(data.getbuffer()))

    def _end(self, *, durable: bool) -> None:
        if self._file is None:
            return
        with self._file as file:
            if durable:
                file.flush()
                os.fsync(file.fileno())
        self._file = None
