"""Writes one safetensors file from front to back: first the header with all declarations, then tensor by tensor.

The safetensors library cannot write a file without holding every tensor, and ``rayzero export`` must not hold them all.
The format is eight bytes of header length, a JSON header, then the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import CheckpointError, UnsupportedError

_PIECE = 16 << 20  # bytes that are hashed and written at once

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
}
_TWO_IN_ONE = torch.float4_e2m1fn_x2  # a byte of it is one element in torch, and two in a file

_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in CODES.items()}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}  # by the name a manifest gives it


def shape_in_file(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
    """The shape that a file's header gives a tensor. Raises UnsupportedError naming one that it has no shape for."""
    if dtype is not _TWO_IN_ONE:
        return list(shape)
    if not shape:
        raise UnsupportedError(f"tensor {name!r} is a {dtype} without dimensions, which safetensors files cannot hold")
    return [*shape[:-1], 2 * shape[-1]]


def shape_in_torch(shape: Sequence[int], dtype: torch.dtype | None) -> tuple[int, ...]:
    """The inverse of ``shape_in_file``. Raises ValueError for a shape that is none of its results."""
    if dtype is not _TWO_IN_ONE:
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise ValueError(f"a tensor of dtype F4 has shape {list(shape)}, and its last size has to be even")
    return *shape[:-1], shape[-1] // 2


def code_name(code: str) -> str:
    """torch's name for a safetensors dtype, without "torch."; the code itself if this package has no name for it."""
    return _NAMES.get(code, code)


@dataclass(frozen=True, slots=True)
class TensorDecl:
    """What the header says about one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """The size of the tensor in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredTensor:
    """A 1D tensor that is made when it is written, and freed afterwards: values that are kept encoded."""

    numel: int
    dtype: torch.dtype
    make: Callable[[], Tensor]
    keep: Callable[[], DeferredTensor] | None = None  # the same values, from a copy of what they are made from, ...
    kept_bytes: int = 0  # ... which takes this much

    @property
    def shape(self) -> tuple[int]:
        """As a tensor's."""
        return (self.numel,)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTensor:
    """A 1D tensor that comes in parts, each of which is used before the next one is made, and only once."""

    numel: int
    dtype: torch.dtype
    parts: Callable[[], Iterable[Tensor]]

    @property
    def shape(self) -> tuple[int]:
        """As a tensor's."""
        return (self.numel,)


Writable = Tensor | DeferredTensor | StreamedTensor  # what a file's tensor is written from


def declare(tensor: Writable) -> TensorDecl:
    """The declaration of a tensor."""
    return TensorDecl(tuple(tensor.shape), tensor.dtype)


def file_order(decls: Mapping[str, TensorDecl]) -> list[str]:
    """The names in the order of their bytes in the file: widest elements first, so that each tensor is aligned."""
    return sorted(decls, key=lambda name: -decls[name].dtype.itemsize)  # stable: equal widths stay in their order


def as_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in C order. A view if the tensor is contiguous and on the CPU, else a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def tensor_digest(tensor: Tensor) -> str:
    """The SHA-256 of the tensor's bytes in C order, in hexadecimal."""
    return hashlib.sha256(as_bytes(tensor)).hexdigest()


class TensorFileWriter:
    """Writes the declared tensors in ``order``, each in one or more parts, and fsyncs when the ``with`` block ends, if
    it is to.

    Knows the format and the hashes of what passes through; not where tensors come from or what they mean.
    """

    def __init__(
        self,
        path: Path,
        decls: Mapping[str, TensorDecl],
        metadata: Mapping[str, str] | None = None,
        *,
        sync: bool = True,
    ) -> None:
        """``sync``: False: whoever names the file in a manifest makes it durable."""
        self.path = path
        self._sync = sync
        self.order = file_order(decls)
        self.sha256: dict[str, str] = {}  # per tensor, once it is complete
        self.size_bytes = 0
        self._decls = decls
        self._whole = hashlib.sha256()
        header = _header(self.order, decls, metadata or {})  # may raise UnsupportedError: no file is open yet
        self._file = path.open("wb")
        self._write_raw(header)

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                self._check_complete()
                self._file.flush()
                if self._sync:
                    os.fsync(self._file.fileno())

    @property
    def file_sha256(self) -> str:
        """The SHA-256 of all bytes that were written so far, in hexadecimal."""
        return self._whole.hexdigest()

    def write(self, name: str, parts: Iterable[Tensor]) -> None:
        """Append one whole tensor as consecutive parts, of the declared dtype and any shape. Raises CheckpointError if
        it is not the next tensor in ``order`` or if the parts have another size than declared."""
        expected = self.order[len(self.sha256)]
        if name != expected:
            raise CheckpointError(f"{self.path.name}: tensor {name!r} was written where {expected!r} belongs")
        digest, size, want = hashlib.sha256(), 0, self._decls[name].size_bytes
        for part in parts:
            size += self._write_part(part, digest)
        if size != want:
            raise CheckpointError(f"{self.path.name}: tensor {name!r} got {size:,} bytes, but its shape needs {want:,}")
        self.sha256[name] = digest.hexdigest()

    def write_all(self, tensors: Mapping[str, Writable]) -> None:
        """Append every tensor that is declared. Deferred and streamed ones are made one at a time."""
        for name in self.order:
            tensor = tensors[name]
            if isinstance(tensor, StreamedTensor):
                self.write(name, tensor.parts())
            else:
                self.write(name, [tensor.make() if isinstance(tensor, DeferredTensor) else tensor])

    def _write_part(self, part: Tensor, digest: hashlib._Hash) -> int:
        data = as_bytes(part)
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            digest.update(piece)
            self._write_raw(piece)
        return len(data)

    def _write_raw(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._whole.update(data)
        self.size_bytes += len(data)

    def _check_complete(self) -> None:
        missing = self.order[len(self.sha256) :]
        if missing:
            raise CheckpointError(f"{self.path.name}: {len(missing)} declared tensors were not written: {missing[:3]}")


def _header(order: list[str], decls: Mapping[str, TensorDecl], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        decl = decls[name]
        stop = offset + decl.size_bytes
        shape = shape_in_file(name, decl.shape, decl.dtype)
        described[name] = {"dtype": _code(name, decl), "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor starts at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _code(name: str, decl: TensorDecl) -> str:
    try:
        return CODES[decl.dtype]
    except KeyError:
        raise UnsupportedError(f"tensor {name!r} has dtype {decl.dtype}, which safetensors files cannot hold") from None
