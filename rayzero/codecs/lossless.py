"""Floats without loss: the exponents of weights take few values, so they are stored apart from the rest.

Each value's bits are rotated left by one, so that its highest byte holds the exponent alone and its sign stands with
the mantissa. Byte i of all values of a frame is a plane. zstd compresses each plane with Huffman codes and hardly looks
for repeats; a plane that does not get smaller is kept as it is. An exponent of normally distributed weights has about
2.6 bits of information: bf16 shrinks to 0.67 of its bytes, fp32 to 0.83. Exponents apart from mantissas: ZipNN
(Hershcovitch et al., 2024), NeuZip (Hao et al., 2024).

A tensor is cut into frames of 131,072 values. Its encoding is a table of the sizes of all planes (uint32, frame by
frame), then the planes in the same order; a plane as large as its values' byte is not compressed."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from rayzero.codecs.codec import FLOATS32
from rayzero.errors import StoreError

FRAME = 131072  # values
_SIZE = np.dtype("<u4")
_HUFFMAN = zstandard.ZstdCompressionParameters(
    compression_level=1, strategy=zstandard.STRATEGY_FAST, window_log=15, hash_log=6, min_match=7, target_length=0,
    write_checksum=True,
)  # fmt: skip

Planes = npt.NDArray[np.uint8]


class Lossless:
    """16-bit and 32-bit floats, bit for bit, nan payloads and signs of zero included. Host memory only."""

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

    def error_bound(self, values: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros_like(values, dtype=torch.float64)


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
