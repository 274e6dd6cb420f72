"""Reads one safetensors file of a checkpoint through a memory map, and checks its whole header before it uses a byte.

A tensor's own hash says nothing about its dtype and shape, which are in the header: the same bytes can be I32 or F32.
So ``TensorFile.require`` compares the header with what the manifest says about every tensor.
"""

from __future__ import annotations

import math
import mmap
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from rayzero.checkpoint.files.tensor_file import CODES, TensorDecl, shape_in_torch
from rayzero.errors import CheckpointError
from rayzero.files import open_regular, parse_json

_DTYPES = {code: dtype for dtype, code in CODES.items()}
_METADATA = "__metadata__"
_LENGTH = 8  # bytes in front of the header that say how long it is
_MAX_HEADER = 100_000_000  # bytes; the safetensors library has the same limit
_MAX_DIMS = 64  # that a torch tensor can have
_MAP_NORESERVE = 0x4000  # Linux: nothing is written, so a file may be larger than memory


@dataclass(frozen=True, slots=True)
class _Held:
    decl: TensorDecl
    start: int  # bytes from the file's beginning


class TensorFile:
    """An open file whose tensors are views of its memory map. The map is freed with this object and the last of them.

    Knows the format; not what tensors mean."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if ``path`` is not a regular file, or if its header does not describe its bytes."""
        self.path = path
        try:
            with open_regular(path, follow_links=False) as file:
                header, data_start, size = _read_header(file)
                self._map = mmap.mmap(
                    file.fileno(), size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
            self.metadata = _read_metadata(header.pop(_METADATA, {}))
            self._held = _read_tensors(header, data_start, size)
        except OSError as exc:
            raise CheckpointError(f"{path} cannot be read: {exc.strerror}") from exc
        except ValueError as exc:
            raise CheckpointError(f"{path} cannot be read as safetensors: {exc}; use another checkpoint") from exc

    def require(self, wanted: Mapping[str, TensorDecl]) -> None:
        """Raise CheckpointError unless the file holds exactly these tensors."""
        for name in sorted(wanted.keys() | self._held.keys()):
            ours, theirs = wanted.get(name), self._held.get(name)
            if theirs is None or theirs.decl != ours:
                found = _describe(None if theirs is None else theirs.decl)
                raise CheckpointError(
                    f"{self.path} is damaged: tensor {reprlib.repr(name)} is {found} there, but the manifest says "
                    f"{_describe(ours)}; use another checkpoint"
                )

    def flat(self, name: str) -> Tensor:
        """A tensor's elements in C order: 1D, in its dtype. A view of the mapped file; do not write to it."""
        held = self._held[name]
        count = math.prod(held.decl.shape)
        if count == 0:
            return torch.empty(0, dtype=held.decl.dtype)
        return torch.frombuffer(self._map, dtype=held.decl.dtype, count=count, offset=held.start)

    def with_prefix(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with ``prefix``, by the rest of the name. Views of the mapped file."""
        return {
            name.removeprefix(prefix): self.flat(name).view(held.decl.shape)
            for name, held in self._held.items()
            if name.startswith(prefix)
        }


def _describe(decl: TensorDecl | None) -> str:
    return "missing" if decl is None else f"{str(decl.dtype).removeprefix('torch.')} of shape {decl.shape}"


# ---- the header; every ValueError says what is wrong ------------------------------------------------------------


def _read_header(file: BufferedReader) -> tuple[dict[str, Any], int, int]:
    """The header, where the tensors' bytes begin, and where they end."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(_LENGTH), "little")
    data_start = _LENGTH + length
    if not 0 < length <= _MAX_HEADER or data_start > size:
        raise ValueError(f"its header has {length:,} bytes, and the file {size:,}")
    header = parse_json(file.read(length).decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, data_start, size


def _read_metadata(found: object) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("its metadata is not an object of texts")
    return found


def _read_tensors(header: Mapping[str, Any], data_start: int, size: int) -> dict[str, _Held]:
    """The tensors by name. Raises ValueError unless their bytes follow each other without gaps to the file's end."""
    held = {name: _read_tensor(name, described, data_start) for name, described in header.items()}
    at = data_start
    for name, tensor in sorted(held.items(), key=lambda item: (item[1].start, item[1].decl.size_bytes)):
        if tensor.start != at:
            raise ValueError(f"the bytes of tensor {reprlib.repr(name)} do not follow those before them")
        at += tensor.decl.size_bytes
    if at != size:
        raise ValueError(f"its header describes {at:,} bytes, and the file has {size:,}")
    return held


def _read_tensor(name: str, described: Any, data_start: int) -> _Held:
    fields: dict[str, Any] = described if isinstance(described, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES or not is_shape(shape) or not is_shape(offsets):
        raise ValueError(f"tensor {reprlib.repr(name)} is described as {reprlib.repr(described)}")
    decl = TensorDecl(shape_in_torch(shape, _DTYPES[dtype]), _DTYPES[dtype])
    if len(offsets) != 2 or offsets[1] - offsets[0] != decl.size_bytes:
        raise ValueError(
            f"tensor {reprlib.repr(name)} needs {decl.size_bytes:,} bytes and has the range {reprlib.repr(offsets)}"
        )
    start = data_start + offsets[0]
    if start % decl.dtype.itemsize:
        raise ValueError(f"tensor {reprlib.repr(name)} is not aligned to its elements")
    return _Held(decl, start)


def is_shape(value: Any) -> TypeGuard[list[int]]:
    """Whether a JSON value is a list of sizes that a tensor may have."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMS
        and all(type(size) is int and 0 <= size < 1 << 62 for size in value)
        and math.prod(value) < 1 << 62
    )
