"""Takes shards over from an owner on another host, over gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import torch
from torch import Tensor

from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.memory.next_epoch import EpochFacts
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.rpc import CHANNEL_OPTIONS, OWNER_SERVICE, TlsFiles, from_status, methods, token_metadata

_CHUNK_BYTES = 2 << 20
_QUICK_S = 30.0


class RemoteShards:
    """A ``ShardSource`` (store/owner/memory/next_epoch.py) in another process.

    Knows the owner's address and how shards travel; not what becomes of them. A link that breaks ends the call: the
    change of the owners is given up, or tried again if the owner has died."""

    def __init__(
        self, owner: int, address: str, *, token: str, tls: TlsFiles | None, model: int, epoch: int, timeout_s: float
    ) -> None:
        """``epoch``: the present one. ``timeout_s``: the longest that shards may take to come."""
        self._name, self._address, self._tls = f"optimizer {owner} at {address}", address, tls
        self._metadata, self._timeout_s = token_metadata(token, model, epoch), timeout_s

    def _open(self) -> Any:
        if self._tls is None:
            return grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(self._address, self._tls.channel_credentials(), options=CHANNEL_OPTIONS)

    def facts(self) -> EpochFacts:
        """See ``ShardSource``."""
        with self._open() as channel:
            call = methods(OWNER_SERVICE)["DescribeEpoch"].bind(channel)
            try:
                answer = call(pb.DescribeEpochRequest(), timeout=_QUICK_S, metadata=self._metadata)
            except grpc.RpcError as error:
                raise from_status(error, self._name) from error
        record = _bytes(answer.record) if answer.record else None
        return EpochFacts(kernel=answer.kernel, began=_bytes(answer.began), record=record)

    def give(self, shards: Mapping[int, Sequence[Tensor]]) -> None:
        """See ``ShardSource``."""
        request = pb.GiveShardsRequest(shards=list(shards), chunk_bytes=_CHUNK_BYTES)
        with self._open() as channel:
            call = methods(OWNER_SERVICE)["GiveShards"].bind(channel)
            try:
                messages = call(request, timeout=self._timeout_s, metadata=self._metadata)
                for shard, tensors in shards.items():
                    for tensor in tensors:
                        _receive(messages, shard, tensor)
            except grpc.RpcError as error:
                raise from_status(error, self._name) from error


def _receive(messages: Any, shard: int, into: Tensor) -> None:
    assembly = Assembly(shard, into.nbytes, byte_view(into))
    while not assembly.complete:
        assembly.take(next(messages, None))


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
