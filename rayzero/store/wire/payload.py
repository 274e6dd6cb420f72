"""A shard's bytes in memory, and which of them come next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from rayzero.codecs.record import LENGTH, used_bytes
from rayzero.errors import StoreError, TransferError

Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 1 << 20
"""The most of a shard that is under one checksum; 256 KiB to 2 MiB make no difference (lab/RESULTS.md, "store")."""


def checksum(content: bytes | memoryview, seed: int = 0) -> int:
    """xxh3_64, about 20 GB/s."""
    return int(xxhash.xxh3_64_intdigest(content, seed))


def byte_view(tensor: Tensor) -> Bytes:
    """The memory of a contiguous 1D CPU tensor as bytes, shared, not copied. Raises ``StoreError`` for others."""
    require_flat(tensor)
    return tensor.detach().view(torch.uint8).numpy()


def require_flat(tensor: Tensor) -> None:
    """Raise ``StoreError`` for anything but a contiguous 1D CPU tensor."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise StoreError(
            f"the store moves contiguous 1D CPU tensors, got shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()} on {tensor.device}"
        )


class Assembly:
    """One shard's chunks on their way into its memory, from first to last byte.

    Knows which byte is next; not where chunks come from."""

    def __init__(self, shard: int, size_bytes: int, out: Bytes | None, *, is_record: bool = False) -> None:
        """``out``: ``size_bytes`` bytes of memory; None: the bytes are dropped. ``is_record``: a record comes
        (codecs/record.py), which may be shorter than its memory."""
        self._shard, self._size, self._out, self._is_record = shard, size_bytes, out, is_record
        self.filled = 0  # bytes

    @property
    def complete(self) -> bool:
        """True once every byte is there."""
        return self.filled == self._size

    def room_for(self, shard: int, offset: int, size_bytes: int) -> memoryview:
        """The memory of a chunk whose bytes come next; ``add`` says that they are there. Raises ``TransferError`` if it
        is not the next chunk."""
        stop = offset + size_bytes
        if shard != self._shard or offset != self.filled or stop > self._size:
            raise TransferError(f"shard {shard} bytes {offset:,}..{stop:,} came {self._where()}")
        if not size_bytes:
            raise TransferError(f"a chunk without bytes came {self._where()}")
        return memoryview(bytearray(size_bytes)) if self._out is None else self._out.data[offset:stop]

    def add(self, size_bytes: int) -> None:
        """What ``room_for`` gave has its bytes, and they are what was sent. Raises ``TransferError`` if a record says
        that it has other bytes than can be."""
        self.filled += size_bytes
        if self._is_record and self._out is not None and self.filled >= LENGTH:
            used = used_bytes(torch.from_numpy(self._out))
            if not self.filled <= used <= self._size:
                raise TransferError(f"a shard of {used:,} bytes came {self._where()}")
            self._size = used

    def _where(self) -> str:
        return f"after {self.filled:,} of {self._size:,} bytes of shard {self._shard}"
