"""Takes shards over from an owner on another host."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import grpc
import torch
from torch import Tensor

from rayzero.concurrency.backoff import backoff
from rayzero.errors import RayZeroError, StallError, StoreError, TransferError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.memory.next_epoch import EpochFacts
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.rpc import (
    OWNER_SERVICE,
    CallTerms,
    break_of,
    from_status,
    is_broken_link,
    methods,
    open_channel,
)
from rayzero.store.wire.tensor_stream import StreamEndedError
from rayzero.store.wire.tensor_streams import (
    LET_THROUGH,
    Opening,
    OverdueError,
    TensorStreams,
    Transfer,
    UnreachedPortError,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_QUICK_S = 30.0
_ATTEMPTS = 3  # at bytes that are damaged


class RemoteShards:
    """A ``ShardSource`` (store/owner/memory/next_epoch.py) in another process.

    Knows the owner's address and how shards travel; not what becomes of them. Calls are repeated over a new channel
    while the link breaks, or damages bytes: nothing changes what they ask for. Used by one thread."""

    def __init__(
        self,
        owner: int,
        address: str,
        terms: CallTerms,
        *,
        taker: int,
        timeout_s: float,
        down_s: float = 30.0,
        given_up: threading.Event,
    ) -> None:
        """``terms``: of the present epoch. ``taker``: who takes shards, by its number in the next one. ``timeout_s``:
        how long shards may take to come; ``down_s``: how long the link may be down. ``given_up``: once it is set, calls
        end with a StoreError: the owners stay as they are."""
        self._name, self._address, self._tls = f"optimizer {owner} at {address}", address, terms.tls
        self._metadata, self._timeout_s, self._down_s = terms.metadata, timeout_s, down_s
        self._taker, self._given_up = taker, given_up
        self._reached = 0  # bytes of the shards that are asked for, up to which they have come by now

    def facts(self) -> EpochFacts:
        """See ``ShardSource``."""
        answer = self._repeat(lambda channel: self._ask(channel, "DescribeEpoch", pb.DescribeEpochRequest()))
        record = _bytes(answer.record) if answer.record else None
        return EpochFacts(kernel=answer.kernel, began=_bytes(answer.began), record=record)

    def give(self, shards: Mapping[int, Sequence[Tensor]]) -> None:
        """See ``ShardSource``. Whole shards that have come over one channel do not come again over the next."""
        left, total = dict(shards), _size(shards)

        def fill(channel: Any) -> None:
            self._reached = total - _size(left)
            request = pb.GiveShardsRequest(shards=list(left), owner=self._taker)
            with self._transfer(channel, request) as transfer:
                for shard in list(left):
                    for tensor in left[shard]:
                        assembly = Assembly(shard, tensor.nbytes, byte_view(tensor))
                        try:
                            self._receive(transfer, assembly)
                        finally:
                            self._reached += assembly.filled
                    del left[shard]
                transfer.answer()

        self._repeat(fill)

    @contextmanager
    def _transfer(self, channel: Any, request: pb.GiveShardsRequest) -> Iterator[Transfer]:
        """A context with a GiveShards. Raises the owner's error, StallError, or StreamEndedError."""
        connections = TensorStreams(self._address, partial(self._expect, channel))
        try:
            with connections.transfer("GiveShards", request.SerializeToString(), self._timeout_s) as transfer:
                yield transfer
        except OverdueError as late:
            raise StallError(f"{self._name} has not given its shards within {self._timeout_s:g} s") from late
        finally:
            connections.close()

    def _expect(self, channel: Any, host: str) -> Opening:
        answer = self._ask(channel, "OpenTensorStream", pb.OpenTensorStreamRequest(owner=self._taker, host=host))
        return Opening.of(answer, protected=self._tls is not None and self._tls.protects(self._address))

    def _receive(self, transfer: Transfer, assembly: Assembly) -> None:
        """Fill a tensor."""
        receiving = transfer.receiving(assembly)
        while not transfer.advance(receiving):
            self._require_wanted()
        self._require_wanted()

    def _ask(self, channel: Any, method: str, request: Any) -> Any:
        """The answer to a call."""
        return methods(OWNER_SERVICE)[method].bind(channel)(request, timeout=_QUICK_S, metadata=self._metadata)

    def _repeat(self, ask: Callable[[Any], T]) -> T:
        """Ask over a channel, and over another one while the link breaks, or damages bytes. Raises the owner's error,
        or TransferError if the link is down for too long, or damages too much."""
        tries, self._reached = _Tries(self._down_s), 0
        while True:
            self._require_wanted()
            with self._open() as channel:
                try:
                    return ask(channel)
                except (grpc.RpcError, TransferError) as failure:
                    error, why = self._named(failure), _break_of(failure, met=self._reached > 0)
                    repeatable = why is not None or isinstance(error, TransferError)
                    pause = tries.failed(broke=why is not None, reached=self._reached) if repeatable else None
                    if pause is None:
                        raise error from failure
                    said = f"broke ({why})" if why is not None else f"damaged bytes ({failure})"
                    log.warning("the link to %s %s, and is opened again", self._name, said)
            self._given_up.wait(pause)

    def _named(self, failure: grpc.RpcError | TransferError) -> RayZeroError:
        if isinstance(failure, grpc.RpcError):
            return from_status(failure, self._name)
        advice = f"; {LET_THROUGH}" if isinstance(failure, UnreachedPortError) else ""
        return TransferError(f"{self._name}: {failure}{advice}")

    def _require_wanted(self) -> None:
        if self._given_up.is_set():
            raise StoreError(f"nothing is taken over from {self._name} any more: the owners stay as they are")

    def _open(self) -> Any:
        return open_channel(self._address, self._tls)


class _Tries:
    """Says when a call that did not get through is made again."""

    def __init__(self, down_s: float) -> None:
        """``down_s``: how long the link may be down."""
        self._down_s, self._down_since = down_s, time.monotonic()
        self._pauses, self._damaged, self._best = backoff(), 0, 0

    def failed(self, *, broke: bool, reached: int) -> float | None:
        """A try has failed; returns the seconds until the next one, or None if there is none. ``broke``: the link did;
        False: it damaged bytes. ``reached``: how many bytes have come by now; only if they are more than ever was the
        link not down until now: one that breaks again and again must not hide that nothing moves."""
        now = time.monotonic()
        if reached > self._best:
            self._best, self._down_since, self._pauses = reached, now, backoff()
        self._damaged += not broke
        pause = next(self._pauses)
        over = now + pause - self._down_since > self._down_s if broke else self._damaged == _ATTEMPTS
        return None if over else pause


def _size(shards: Mapping[int, Sequence[Tensor]]) -> int:
    return sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)


def _break_of(error: grpc.RpcError | TransferError, *, met: bool) -> str | None:
    """Why a link broke; None: it did not. ``met``: see ``is_broken_link``."""
    if isinstance(error, grpc.RpcError):
        return break_of(error) if is_broken_link(error, met=met) else None
    return str(error) if isinstance(error, StreamEndedError) else None


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
