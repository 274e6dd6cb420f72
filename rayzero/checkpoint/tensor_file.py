"""One safetensors file, written from front to back and read through a memory map.

The safetensors library cannot write a file without holding every tensor, and ``rayzero export`` must not hold them all.
The format is eight bytes of header length, a JSON header, then the tensors' bytes. A reader checks the whole header
before it uses a byte. A tensor's own hash says nothing about its dtype and shape, which are in the header: the same
bytes can be I32 or F32. So ``TensorFile.require`` compares the header with what the manifest says about every tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

import torch
from torch import Tensor

from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.files import open_regular, parse_json

_PIECE = 16 << 20  # bytes that are hashed and written at once
_METADATA = "__metadata__"
_LENGTH = 8  # bytes in front of the header that say how long it is
_MAX_HEADER = 100_000_000  # bytes; the safetensors library has the same limit
_MAX_DIMS = 64  # that a torch tensor can have
_MAP_NORESERVE = 0x4000  # Linux: nothing is written, so a file may be larger than memory

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

_OF_CODE = {code: dtype for dtype, code in CODES.items()}
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
    return str(_OF_CODE.get(code, code)).removeprefix("torch.")


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
        """``sync``: False: the file is made durable when a manifest names it."""
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
                if missing := self.order[len(self.sha256) :]:
                    raise CheckpointError(
                        f"{self.path.name}: {len(missing)} declared tensors were not written: {missing[:3]}"
                    )
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


def _header(order: list[str], decls: Mapping[str, TensorDecl], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        decl = decls[name]
        stop = offset + decl.size_bytes
        if decl.dtype not in CODES:
            raise UnsupportedError(f"tensor {name!r} has dtype {decl.dtype}, which safetensors files cannot hold")
        shape = shape_in_file(name, decl.shape, decl.dtype)
        described[name] = {"dtype": CODES[decl.dtype], "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor starts at a multiple of 8 bytes
    return len(text).to_bytes(_LENGTH, "little") + text


# ---- reading ----------------------------------------------------------------------------------------------------


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
            self.metadata: dict[str, str] = header.pop(_METADATA, {})
            if not isinstance(self.metadata, dict) or not all(isinstance(v, str) for v in self.metadata.values()):
                raise ValueError("its metadata is not an object of texts")
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
            return torch.empty(0, dtype=held.decl.dtype, device="cpu")
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
    if not isinstance(dtype, str) or dtype not in _OF_CODE or not is_shape(shape) or not is_shape(offsets):
        raise ValueError(f"tensor {reprlib.repr(name)} is described as {reprlib.repr(described)}")
    decl = TensorDecl(shape_in_torch(shape, _OF_CODE[dtype]), _OF_CODE[dtype])
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
