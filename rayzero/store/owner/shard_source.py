"""Takes shards over from an owner on another host."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rayzero.concurrency.backoff import backoff
from rayzero.errors import StallError, StoreError, TransferError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import QUICK_S, BrokenLinkError, Caller, Channel, NoAnswerError
from rayzero.store.owner.memory.next_epoch import EpochFacts
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.rpc import CallTerms, LinkNumber
from rayzero.store.wire.tensor_streams import Transfer

log = logging.getLogger(__name__)

T = TypeVar("T")

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
        self._name, self._address, self._terms = f"optimizer {owner} at {address}", address, terms
        self._timeout_s, self._down_s = timeout_s, down_s
        self._caller, self._given_up = Caller.taker(taker), given_up
        self._number = LinkNumber(self._caller.name, 0)
        self._reached = 0  # bytes of the shards that are asked for, up to which they have come by now

    def facts(self) -> EpochFacts:
        """See ``ShardSource``."""
        request = pb.DescribeEpochRequest()
        answer = self._repeat(lambda channel: channel.answer(channel.start("DescribeEpoch", request, QUICK_S)))
        record = _bytes(answer.record) if answer.record else None
        return EpochFacts(kernel=answer.kernel, began=_bytes(answer.began), record=record)

    def give(self, shards: Mapping[int, Sequence[Tensor]]) -> None:
        """See ``ShardSource``. Whole shards that have come over one channel do not come again over the next."""
        left, total = dict(shards), _size(shards)

        def fill(channel: Channel) -> None:
            self._reached = total - _size(left)
            request = pb.GiveShardsRequest(shards=list(left), owner=self._caller.number)
            with channel.transfer("GiveShards", request, self._timeout_s) as transfer:
                for shard in list(left):
                    for tensor in left[shard]:
                        assembly = Assembly(shard, tensor.nbytes, byte_view(tensor))
                        try:
                            self._receive(transfer, assembly)
                        finally:
                            self._reached += assembly.filled
                    del left[shard]
                transfer.answer()

        try:
            self._repeat(fill)
        except NoAnswerError as late:
            raise StallError(f"{self._name} has not given its shards within {self._timeout_s:g} s") from late

    def _receive(self, transfer: Transfer, assembly: Assembly) -> None:
        """Fill a tensor."""
        receiving = transfer.receiving(assembly)
        while not transfer.advance(receiving):
            self._require_wanted()
        self._require_wanted()

    def _repeat(self, ask: Callable[[Channel], T]) -> T:
        """Ask over a channel, and over another one while the link breaks, or damages bytes. Raises the owner's error,
        or TransferError if the link is down for too long, or damages too much."""
        tries, self._reached = _Tries(self._down_s), 0
        while True:
            self._require_wanted()
            self._number, terms = self._number.next(), self._terms
            channel = Channel(self._caller, self._name, self._address, self._number, terms.metadata, terms.tls)
            channel.met = self._reached > 0
            try:
                return ask(channel)
            except TransferError as failure:
                broke = isinstance(failure, BrokenLinkError)
                pause = tries.failed(broke=broke, reached=self._reached)
                if pause is None and broke:
                    raise
                if pause is None:
                    raise TransferError(f"{self._name}: {failure}") from failure
                said = "broke" if broke else "damaged bytes"
                log.warning("the link to %s %s, and is opened again: %s", self._name, said, failure)
            finally:
                channel.close()
            self._given_up.wait(pause)

    def _require_wanted(self) -> None:
        if self._given_up.is_set():
            raise StoreError(f"nothing is taken over from {self._name} any more: the owners stay as they are")


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


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
