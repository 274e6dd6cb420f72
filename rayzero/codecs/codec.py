"""The codec protocol: how values are stored in fewer bytes than they have. Codecs without scales: values as they are,
wide floats rounded to 16 bits, and floats without loss."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from rayzero.errors import StoreError

FLOATS16 = frozenset({torch.float16, torch.bfloat16})
FLOATS32 = FLOATS16 | {torch.float32}
_WIDE = frozenset({torch.float32, torch.float64})


class Codec(Protocol):
    """Encodes the values of one tensor as bytes and back.

    All tensors are 1D, contiguous and on one device; encoded ones are uint8. The bytes depend on the values alone: not
    on threads, the processor's vectors or the device. A codec has no state and may be used by several threads."""

    name: str
    lossy: bool  # whether a decoded value may differ from the one encoded
    mixes: bool  # whether it may differ because of its neighbours: do not encode what is not initialised beside it

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether it encodes values of ``dtype``; others are stored as they are (``codec_for``)."""
        ...

    def most_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The most bytes that ``numel`` values can take; exactly that many unless the codec is lossless."""
        ...

    def encode(self, values: Tensor) -> Tensor:
        """The stored form of ``values``, on their device; may share their memory."""
        ...

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """Fill ``values`` (the shape and dtype that were encoded) from ``encoded``.

        Raises StoreError where the bytes cannot be those of so many values."""
        ...


class Raw:
    """Values as they are."""

    name = "none"
    lossy = mixes = False

    def takes(self, dtype: torch.dtype) -> bool:
        """Every dtype."""
        return True

    def most_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The values' own bytes."""
        return numel * dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """The memory of ``values`` itself: nothing is copied."""
        return values.view(torch.uint8)

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """One copy; from page-locked memory the caller does not wait for it."""
        values.view(torch.uint8).copy_(encoded, non_blocking=True)


RAW = Raw()


class Halves:
    """32-bit and 64-bit floats rounded to 16 bits, to the nearest, ties to even: 2 bytes a value.

    ``fp16``: relative error at most 2**-11 for magnitudes from 2**-14 on, absolute error 2**-25 below; from 65,520 on
    a value becomes inf. ``bf16``: 2**-8 from 2**-126 on, 2**-134 below; from 3.396e38 on inf. inf and nan stay."""

    lossy, mixes = True, False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def takes(self, dtype: torch.dtype) -> bool:
        """float32 and float64."""
        return dtype in _WIDE

    def most_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """2 bytes a value."""
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        """Rounded to nearest even; float64 by way of float32, as torch converts."""
        return values.to(self._dtype).view(torch.uint8)

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """Exact from the 16 bits."""
        values.copy_(encoded.view(self._dtype))


FRAME = 131072  # values
_SIZE = np.dtype("<u4")
_HUFFMAN = zstandard.ZstdCompressionParameters(
    compression_level=1, strategy=zstandard.STRATEGY_FAST, window_log=15, hash_log=6, min_match=7, target_length=0,
    write_checksum=True,
)  # fmt: skip

Planes = npt.NDArray[np.uint8]


class Lossless:
    """16-bit and 32-bit floats, bit for bit, nan payloads and signs of zero included. Host memory only.

    The exponents of weights take few values, so they are stored apart from the rest. Each value's bits are rotated left
    by one, so that its highest byte holds the exponent alone and its sign stands with the mantissa. Byte i of all
    values of a frame is a plane. zstd compresses each plane with Huffman codes and hardly looks for repeats; a plane
    that does not get smaller is kept as it is. An exponent of normally distributed weights has about 2.6 bits of
    information: bf16 shrinks to 0.67 of its bytes, fp32 to 0.83. Exponents apart from mantissas: ZipNN (Hershcovitch et
    al., 2024), NeuZip (Hao et al., 2024).

    A tensor is cut into frames of 131,072 values. Its encoding is a table of the sizes of all planes (uint32, frame by
    frame), then the planes in the same order; a plane as large as its values' byte is not compressed."""

    name = "lossless"
    lossy = mixes = False

    def takes(self, dtype: torch.dtype) -> bool:
        """float16, bfloat16 and float32."""
        return dtype in FLOATS32

    def most_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The values' own bytes and the table: nothing grows by more than that."""
        return numel * dtype.itemsize + _table_bytes(numel, dtype.itemsize)

    def encode(self, values: Tensor) -> Tensor:
        """Compressed by as many threads as torch computes with; the bytes do not depend on it."""
        planes = [plane for frame in _frames(values) for plane in _planes_of(frame)]
        packed = _compressed(planes)
        kept = [p if len(p) < len(plane) else plane.data for p, plane in zip(packed, planes, strict=True)]
        table = np.array([len(one) for one in kept], dtype=_SIZE)
        return torch.frombuffer(bytearray(b"".join([table.tobytes(), *kept])), dtype=torch.uint8) if kept else _EMPTY

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """Decompressed by as many threads as torch computes with. Raises StoreError where the bytes are damaged."""
        frames, size = _frames(values), values.itemsize
        stored, table = encoded.numpy(), _table_bytes(values.numel(), size)
        sizes = stored[:table].view(_SIZE).tolist() if stored.nbytes >= table else []
        if table + sum(sizes) != stored.nbytes or (table and not sizes):
            raise StoreError(f"{stored.nbytes:,} bytes are no lossless encoding of {values.numel():,} {values.dtype}")
        pieces = [stored[start:stop] for start, stop in pairwise(accumulate(sizes, initial=table))]
        whole = _decompressed(pieces, [len(frame) for frame in frames for _ in range(size)])
        for i, frame in enumerate(frames):
            _join(whole[i * size : (i + 1) * size], frame)


_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


def _table_bytes(numel: int, itemsize: int) -> int:
    return -(-numel // FRAME) * itemsize * _SIZE.itemsize


def _frames(values: Tensor) -> list[npt.NDArray[np.unsignedinteger]]:
    """The values' memory as unsigned integers, frame by frame."""
    bits = values.detach().view(torch.uint8).numpy().view(f"<u{values.itemsize}")
    return [bits[start : start + FRAME] for start in range(0, len(bits), FRAME)]


def _planes_of(frame: npt.NDArray[np.unsignedinteger]) -> list[Planes]:
    """The bytes of the rotated values, the lowest of all values first."""
    one = frame.dtype.type(1)
    rotated = frame << one | frame >> frame.dtype.type(8 * frame.itemsize - 1)
    by_value = rotated.view(np.uint8).reshape(len(frame), frame.itemsize)
    return [np.ascontiguousarray(by_value[:, i]) for i in range(frame.itemsize)]


def _join(planes: list[Planes], frame: npt.NDArray[np.unsignedinteger]) -> None:
    by_value = np.empty((len(frame), frame.itemsize), dtype=np.uint8)
    for i, plane in enumerate(planes):
        by_value[:, i] = plane
    rotated = by_value.view(frame.dtype).reshape(-1)
    frame[...] = rotated >> frame.dtype.type(1) | rotated << frame.dtype.type(8 * frame.itemsize - 1)


def _compressed(planes: list[Planes]) -> list[bytes]:
    if not planes:
        return []
    found = zstandard.ZstdCompressor(compression_params=_HUFFMAN).multi_compress_to_buffer(
        [plane.data for plane in planes], threads=torch.get_num_threads()
    )
    return [found[i].tobytes() for i in range(len(found))]


def _decompressed(pieces: list[Planes], sizes: list[int]) -> list[Planes]:
    """Each piece as a plane of ``sizes`` bytes; one that has that many bytes already is a plane itself."""
    packed = [i for i, size in enumerate(sizes) if len(pieces[i]) != size]
    planes = list(pieces)
    if packed:
        try:
            found = zstandard.ZstdDecompressor().multi_decompress_to_buffer(
                [pieces[i].data for i in packed],
                decompressed_sizes=np.array([sizes[i] for i in packed], dtype=np.uint64).tobytes(),
                threads=torch.get_num_threads(),
            )
        except zstandard.ZstdError as error:
            raise StoreError(f"a lossless encoding is damaged: {error}") from error
        for at, i in enumerate(packed):
            planes[i] = np.frombuffer(found[at].tobytes(), dtype=np.uint8)
    if any(len(plane) != size for plane, size in zip(planes, sizes, strict=True)):
        raise StoreError("a lossless encoding is damaged: a plane has another size than its values")
    return planes
