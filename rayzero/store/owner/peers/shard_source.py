"""Takes shards over from an owner on another host, over gRPC."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import torch
from torch import Tensor

from rayzero.concurrency.backoff import backoff
from rayzero.errors import StoreError
from rayzero.protocol.messages import LoopState
from rayzero.security.credentials import Identity
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.memory.next_epoch import EpochFacts
from rayzero.store.wire import translate
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.rpc import (
    OWNER_SERVICE,
    STORE_SERVICE,
    break_of,
    from_status,
    is_broken_link,
    methods,
    open_channel,
    token_metadata,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_CHUNK_BYTES = 2 << 20
_QUICK_S = 30.0


class RemoteShards:
    """A ``ShardSource`` (store/owner/memory/next_epoch.py) in another process.

    Knows the owner's address and how shards travel; not what becomes of them. Calls are repeated over a new channel
    while the link breaks: nothing changes what they ask for."""

    def __init__(
        self,
        owner: int,
        address: str,
        *,
        token: str,
        tls: Identity | None,
        model: int,
        epoch: int,
        timeout_s: float,
        down_s: float = 30.0,
        given_up: threading.Event,
    ) -> None:
        """``epoch``: the present one. ``timeout_s``: how long shards may take to come; ``down_s``: how long the link
        may be down. ``given_up``: once it is set, calls end with a StoreError: the owners stay as they are."""
        self._name, self._address, self._tls = f"optimizer {owner} at {address}", address, tls
        self._metadata, self._timeout_s, self._down_s = token_metadata(token, model, epoch), timeout_s, down_s
        self._given_up = given_up

    def facts(self) -> EpochFacts:
        """See ``ShardSource``."""
        answer = self._repeat(
            "DescribeEpoch", lambda call: call(pb.DescribeEpochRequest(), timeout=_QUICK_S, metadata=self._metadata)
        )
        record = _bytes(answer.record) if answer.record else None
        return EpochFacts(kernel=answer.kernel, began=_bytes(answer.began), record=record)

    def give(self, shards: Mapping[int, Sequence[Tensor]]) -> None:
        """See ``ShardSource``."""
        left = dict(shards)

        def ask(call: Any) -> None:
            request = pb.GiveShardsRequest(shards=list(left), chunk_bytes=_CHUNK_BYTES)
            messages = call(request, timeout=self._timeout_s, metadata=self._metadata)
            for shard in list(left):
                for tensor in left[shard]:
                    _receive(messages, shard, tensor)
                    self._require_wanted()
                del left[shard]

        self._repeat("GiveShards", ask)

    def kept(self, ranks: Sequence[int]) -> dict[int, list[LoopState]]:
        """What the owner keeps of these ranks' loops, by rank; blocks."""

        def ask(call: Any) -> dict[int, list[LoopState]]:
            requests = {rank: pb.GetKeptRequest(rank=rank) for rank in ranks}
            asked = {
                rank: call.future(request, timeout=_QUICK_S, metadata=self._metadata)
                for rank, request in requests.items()
            }
            return {rank: list(map(translate.loop_state_from_pb, each.result().states)) for rank, each in asked.items()}

        return self._repeat("GetKept", ask, STORE_SERVICE)

    def _repeat(self, method: str, ask: Callable[[Any], T], service: str = OWNER_SERVICE) -> T:
        """Make a call, and again while the link breaks. Raises the owner's error, or TransferError if the link is down
        for too long."""
        deadline, pauses = time.monotonic() + self._down_s, backoff()
        while True:
            self._require_wanted()
            with self._open() as channel:
                try:
                    return ask(methods(service)[method].bind(channel))
                except grpc.RpcError as error:
                    pause = next(pauses)
                    if not is_broken_link(error) or time.monotonic() + pause > deadline:
                        raise from_status(error, self._name) from error
                    log.warning("the link to %s broke (%s), and is opened again", self._name, break_of(error))
            self._given_up.wait(pause)

    def _require_wanted(self) -> None:
        if self._given_up.is_set():
            raise StoreError(f"nothing is taken over from {self._name} any more: the owners stay as they are")

    def _open(self) -> Any:
        return open_channel(self._address, self._tls)


def _receive(messages: Any, shard: int, into: Tensor) -> None:
    assembly = Assembly(shard, into.nbytes, byte_view(into))
    while not assembly.complete:
        assembly.take(next(messages, None))


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
