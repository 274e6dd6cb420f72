"""What clients send to an owner: values for new memory, and gradients for that of the pushing rank."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rayzero.codecs import RAW, Codec, codec_for
from rayzero.errors import StoreError
from rayzero.layout.model_layout import Shard, UnitLayout, dtype_name
from rayzero.protocol.messages import Contribution
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.allowance import WrongSenderError
from rayzero.store.owner.calls.long_calls import result_of
from rayzero.store.owner.served_model import ServedModel
from rayzero.store.owner.streams import OwnerStream, ParcelStream, ShardDestination
from rayzero.store.wire import translate
from rayzero.store.wire.payload import byte_view

Stream = OwnerStream | ParcelStream  # what a client's bytes come on


async def received(stream: Stream, shard: Shard, dtype: torch.dtype) -> Tensor:
    """A shard's values, in new memory: 1D. Raises TransferError if other bytes come."""
    values = torch.empty(shard.numel, dtype=dtype, device="cpu")
    await stream.receive([ShardDestination(shard=shard.index, size_bytes=values.nbytes, out=byte_view(values))])
    return values


_CODECS: dict[int, str] = {pb.WIRE_FORMAT_UNSPECIFIED: "none", pb.WIRE_FORMAT_BF16: "bf16", pb.WIRE_FORMAT_INT8: "int8"}


async def receive_push(model: ServedModel, pushed: pb.PushRequest.Unit, stream: Stream, sender: int | None) -> None:
    """Receive the shards of a unit that is pushed; this may wait for the rank's earlier pushes. A thread is sent for
    once for all shards that have memory: the way there takes as long as a tenth of a shard. ``sender``: a rank; None:
    an owner, which sends sums of its host's ranks. Raises WrongSenderError for gradients that are not the
    sender's to send, StoreError for those that the model does not take, TransferError for bytes that are not theirs."""
    contribution = translate.contribution_from_pb(pushed.contribution)
    _require_sender(contribution, sender)
    landings: list[ShardDestination] = []

    async def receive() -> None:
        await stream.receive(landings)
        landings.clear()

    for index in pushed.shards:
        codec = _wire_codec(pushed.format, model.shard(index, contribution.unit)[1])
        reserved = model.service.reserve_when_free(contribution, index)
        if landings and not reserved.done():  # it may wait for memory that those before it have
            await receive()
        landings.append(_landing(model, contribution, index, codec, await result_of(reserved)))
        if codec is not RAW:
            await receive()
    if landings:
        await receive()


def _require_sender(push: Contribution, sender: int | None) -> None:
    """Raise WrongSenderError unless a rank pushes its own gradients, and an owner a sum. The ranks of a sum have named
    each other with their Attach."""
    if (sender is None) != bool(push.summands) or sender not in (None, push.rank):
        ranks = [each.rank for each in push.summands] or [push.rank]
        by = "an owner" if sender is None else f"rank {sender}"
        raise WrongSenderError(f"Push of {', '.join(f'rank {rank}' for rank in ranks)} was sent by {by}")


def _landing(
    model: ServedModel, contribution: Contribution, index: int, codec: Codec, memory: Tensor | None
) -> ShardDestination:
    """Where a shard's gradients go. ``memory``: what is reserved for them; None: they are a repeat."""
    shard, unit = model.shard(index)
    size = codec.most_bytes(shard.numel, model.push_dtype(contribution, unit))
    if memory is None:
        return ShardDestination(shard=index, size_bytes=size, out=None)
    landed = partial(model.service.landed, contribution, index)
    if codec is RAW:
        return ShardDestination(shard=index, size_bytes=size, out=byte_view(memory), landed=landed)
    encoded = torch.empty(size, dtype=torch.uint8, device="cpu")

    def decode() -> None:
        values = torch.empty(shard.numel, dtype=unit.dtype, device="cpu")
        codec.decode(encoded, values)
        landed(values)

    return ShardDestination(shard=index, size_bytes=size, out=byte_view(encoded), landed=decode)


def _wire_codec(wire_format: int, unit: UnitLayout) -> Codec:
    """How a unit's gradients come. Raises StoreError if the unit cannot have ``wire_format``."""
    name = _CODECS.get(wire_format)
    codec = None if name is None else codec_for(name, unit.dtype)
    if codec is not None and codec.name == name:
        return codec
    raise StoreError(f"gradients of {unit.name!r} ({dtype_name(unit.dtype)}) cannot come in wire format {wire_format}")
