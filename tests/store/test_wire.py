"""The hand-written chunk messages are those of the .proto: the generated classes read and write the same bytes."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rayzero.errors import StoreError, TransferError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire.payload import (
    CHUNK_BYTES,
    Assembly,
    byte_view,
    decode_chunk,
    decode_header,
    encode_chunk,
    encode_header,
    encode_shard,
)
from rayzero.store.wire.seal import seal, unseal

CARRIERS = (pb.FetchResponse, pb.PushRequest, pb.LoadRequest)
shards = st.integers(0, 2**32 - 1)
offsets = st.integers(0, 2**64 - 1)
payloads = st.binary(max_size=300)


@given(shards, offsets, payloads)
def test_the_bytes_equal_those_of_the_generated_classes(shard: int, offset: int, payload: bytes) -> None:
    digest = xxhash.xxh3_64_intdigest(payload)
    for carrier in CARRIERS:
        generated = carrier(chunk=pb.Chunk(shard=shard, offset=offset, checksum=digest, payload=payload))
        assert encode_chunk(shard, offset, memoryview(payload)) == generated.SerializeToString(deterministic=True)


@given(shards, offsets, payloads, st.integers(0, 2**64 - 1))
def test_what_the_generated_classes_write_is_read(shard: int, offset: int, payload: bytes, digest: int) -> None:
    chunk = pb.Chunk(shard=shard, offset=offset, checksum=digest, payload=payload)
    read = decode_chunk(pb.PushRequest(chunk=chunk).SerializeToString())
    assert read is not None
    assert (read.shard, read.offset, read.checksum, bytes(read.payload)) == (shard, offset, digest, payload)


@given(payloads, st.integers(5, 1000), st.integers(0, 2**64 - 1), payloads)
def test_fields_of_a_later_protocol_are_passed_over(payload: bytes, field: int, number: int, extra: bytes) -> None:
    def varint(value: int) -> bytes:
        return bytes([value & 0x7F | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([value])

    unknown = varint(field << 3) + varint(number) + varint(field + 1 << 3 | 2) + varint(len(extra)) + extra
    unknown += varint(field + 2 << 3 | 5) + b"1234" + varint(field + 3 << 3 | 1) + b"12345678"
    body = unknown + pb.Chunk(shard=7, payload=payload).SerializeToString() + unknown
    read = decode_chunk(unknown + b"\x0a" + varint(len(body)) + body + unknown)
    assert read is not None
    assert (read.shard, bytes(read.payload)) == (7, payload)


@given(shards, payloads, st.lists(st.integers(0, 2**32 - 1), max_size=5))
def test_the_first_message_holds_the_header_too(unit: int, payload: bytes, listed: list[int]) -> None:
    header = pb.LoadRequest.Header(unit=unit, shards=listed)
    message = encode_chunk(3, 0, memoryview(payload), encode_header(header))
    generated = pb.LoadRequest.FromString(message)
    assert (generated.header.unit, generated.header.shards) == (unit, listed)
    assert (generated.chunk.shard, generated.chunk.payload) == (3, payload)
    for written in (message, generated.SerializeToString(deterministic=True)):
        found, chunk = decode_header(written), decode_chunk(written)
        assert found is not None
        assert unseal(found, pb.LoadRequest.Header) == header
        assert chunk is not None
        assert bytes(chunk.payload) == payload
    assert decode_header(encode_chunk(3, 0, memoryview(payload))) is None
    assert decode_chunk(encode_header(header)) is None


@given(payloads.filter(bool), st.data())
def test_a_cut_message_is_a_transfer_error(payload: bytes, data: st.DataObject) -> None:
    message = encode_chunk(5, 70_000, memoryview(payload))
    cut = message[: data.draw(st.integers(1, len(message) - 1))]
    with pytest.raises(TransferError, match="malformed"):
        decode_chunk(cut)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(noise: bytes) -> None:
    with suppress(TransferError):
        decode_chunk(noise)


@given(payloads.filter(bool), st.data())
def test_a_flipped_bit_is_found(payload: bytes, data: st.DataObject) -> None:
    message = bytearray(encode_chunk(3, 0, memoryview(payload)))
    at = len(message) - 1 - data.draw(st.integers(0, len(payload) - 1))
    message[at] ^= 1 << data.draw(st.integers(0, 7))
    chunk = decode_chunk(bytes(message))
    assert chunk is not None
    with pytest.raises(TransferError, match=r"shard 3 bytes 0\..*checksum .* sent as"):
        chunk.verify()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size_bytes", "chunks"), [(64, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 64, 2), (3 * CHUNK_BYTES - 64, 3)]
)
def test_a_shard_arrives_as_it_was_sent(dtype: torch.dtype, size_bytes: int, chunks: int) -> None:
    sent = torch.randn(size_bytes // dtype.itemsize).to(dtype)
    got = torch.full_like(sent, torch.nan)
    assembly = Assembly(9, sent.nbytes, byte_view(got))
    for message in encode_shard(9, sent):
        assert not assembly.complete
        assembly.take(message)
        chunks -= 1
    assert (assembly.complete, chunks) == (True, 0)
    assert torch.equal(sent, got)


def test_a_shard_without_memory_is_checked_and_dropped() -> None:
    assembly = Assembly(0, 8, None)
    assembly.take(encode_chunk(0, 0, memoryview(b"12345678")))
    assert assembly.complete


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (encode_chunk(1, 4, memoryview(b"late")), "shard 1 bytes 4..8 came after 4 of 10 bytes of shard 0"),
        (encode_chunk(0, 0, memoryview(b"once")), "shard 0 bytes 0..4 came after 4 of 10"),
        (encode_chunk(0, 6, memoryview(b"gap!")), "shard 0 bytes 6..10 came after 4 of 10"),
        (encode_chunk(0, 4, memoryview(b"too long")), "shard 0 bytes 4..12 came after 4 of 10"),
        (pb.PushRequest(header={}).SerializeToString(), "a message without bytes came after 4 of 10"),
        (None, "the stream ended after 4 of 10 bytes of shard 0"),
    ],
)
def test_chunks_that_are_not_next_are_refused(second: bytes | None, what: str) -> None:
    assembly = Assembly(0, 10, None)
    assembly.take(encode_chunk(0, 0, memoryview(b"0123")))
    with pytest.raises(TransferError, match=what):
        assembly.take(second)
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
