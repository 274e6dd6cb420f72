"""Messages with a checksum, and the memory in which a shard's chunks come together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.errors import StoreError, TransferError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.rpc import seal, unseal


def assembled(size_bytes: int, *chunks: bytes, out: torch.Tensor | None = None) -> Assembly:
    """A shard, number 0, of which some chunks have come."""
    assembly = Assembly(0, size_bytes, None if out is None else byte_view(out))
    for chunk in chunks:
        assembly.room_for(0, assembly.filled, len(chunk))[:] = chunk
        assembly.add(len(chunk))
    return assembly


def test_a_shards_chunks_come_into_its_memory() -> None:
    out = torch.zeros(10, dtype=torch.uint8)
    assert not assembled(10, b"0123", out=out).complete
    assert assembled(10, b"0123", b"456789", out=out).complete
    assert out.numpy().tobytes() == b"0123456789"


def test_a_shard_without_memory_is_dropped() -> None:
    assert assembled(8, b"12345678").complete


@pytest.mark.parametrize(
    ("shard", "offset", "size", "what"),
    [
        (1, 4, 4, "shard 1 bytes 4..8 came after 4 of 10 bytes of shard 0"),
        (0, 0, 4, "shard 0 bytes 0..4 came after 4 of 10"),
        (0, 6, 4, "shard 0 bytes 6..10 came after 4 of 10"),
        (0, 4, 8, "shard 0 bytes 4..12 came after 4 of 10"),
        (0, 4, 0, "a chunk without bytes came after 4 of 10"),
    ],
)
def test_chunks_that_are_not_next_are_refused(shard: int, offset: int, size: int, what: str) -> None:
    assembly = assembled(10, b"0123")
    with pytest.raises(TransferError, match=what):
        assembly.room_for(shard, offset, size)
    assert not assembly.complete


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4), torch.zeros(8)[::2], torch.zeros(4, device="meta")])
def test_only_contiguous_1d_cpu_tensors_travel(tensor: torch.Tensor) -> None:
    with pytest.raises(StoreError, match="contiguous 1D CPU tensors"):
        byte_view(tensor)


norms = st.builds(pb.Norm, step=st.integers(0, 2**63), total=st.floats(allow_nan=False), finite=st.booleans())


@given(norms)
def test_a_sealed_message_is_still_a_protobuf_message(norm: pb.Norm) -> None:
    sealed = seal(norm)
    assert unseal(sealed, pb.Norm) == norm
    other = pb.Norm.FromString(sealed)
    assert (other.step, other.total, other.finite) == (norm.step, norm.total, norm.finite)


@given(norms, st.data())
def test_a_message_that_was_damaged_is_not_read(norm: pb.Norm, data: st.DataObject) -> None:
    sealed = bytearray(seal(norm))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    cut = data.draw(st.integers(0, len(sealed) - 1))
    for damaged in (bytes(sealed), seal(norm)[:cut], seal(norm)[cut + 1 :], norm.SerializeToString(), b""):
        with pytest.raises(TransferError, match=r"a Norm of .* bytes was damaged on the way"):
            unseal(damaged, pb.Norm)
