"""Bounds what an owner holds for one caller: message bodies that are on their way. (Connections for tensors, each of
which has one transfer: store/owner/tensor_port.py.)

[Note: what a caller may make an owner hold] gRPC keeps a body of up to ``MAX_MESSAGE_BYTES`` for a call once somebody
asks for it, and of a call that nobody reads only what HTTP/2's window let through. So only a call that has a place asks
for its body, and a caller has few of them. A rank uses one for the moment in which a request is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Iterable
from typing import Any
from weakref import WeakValueDictionary

from rayzero.errors import HandshakeError, StoreError, TransferError
from rayzero.security.credentials import names_shown
from rayzero.store.wire.rpc import caller_of

BODIES = 16  # of one caller that are read at a time
CALLS = 256  # of one caller whose bodies are read or wait for that; the next one is refused
BODY_S = 120.0  # in which a body must come, from the moment that it is read: 64 MiB at 0.5 MB/s


class TooManyCallsError(StoreError):
    """A caller has more calls than it may have."""


class SlowBodyError(TransferError):
    """A message's bytes do not come."""


class WrongSenderError(HandshakeError):
    """A caller sends or uses what only another one may."""


_REASONS: dict[type[Exception], str] = {TooManyCallsError: "limit", SlowBodyError: "slow", WrongSenderError: "role"}


def reason_to_refuse(error: Exception) -> str | None:
    """The reason under which a refusal is counted; None: the error is no refusal."""
    return _REASONS.get(type(error))


class Allowance:
    """The places of one caller. Lives on the event loop."""

    def __init__(self, caller: str) -> None:
        """``caller``: for messages."""
        self._caller = caller
        self._bodies = asyncio.Semaphore(BODIES)
        self._asking = 0  # calls whose bodies are read or wait for that

    async def body(self, requests: AsyncIterator[Any]) -> Any:
        """The only message of a call; a TransferError if it was damaged on the way, or lost as a whole. Raises
        TransferError if it does not come."""
        if self._asking >= CALLS:
            raise TooManyCallsError(
                f"{self._caller} has {self._asking} calls whose bodies do not come, the most for a caller"
            )
        self._asking += 1
        try:
            async with self._bodies:
                found = await self._next_message(requests)
        finally:
            self._asking -= 1
        if found is None:
            return TransferError(f"{self._caller} has sent a call without its message")
        return found

    async def _next_message(self, requests: AsyncIterator[Any]) -> Any:
        """The next message of a call; None: there is none. Raises TransferError if it does not come."""
        try:
            async with asyncio.timeout(BODY_S):
                return await anext(requests, None)
        except TimeoutError:
            raise SlowBodyError(f"{self._caller} has sent no whole message within {BODY_S:g} s") from None


class Allowances:
    """The allowances of an owner's callers, for as long as they have calls."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[Hashable, Allowance] = WeakValueDictionary()

    def of(
        self, peer: str, auth: dict[str, Iterable[bytes]], metadata: Iterable[tuple[str, Any]], *, follows: bool = False
    ) -> Allowance:
        """A caller's. ``peer``: its address; it counts as one with others of its host, or of its certificate if it has
        one, that say that they are the same rank. ``follows``: it counts as one with other followers there, whatever it
        says. Raises StoreError if it does not say properly who it is."""
        names, caller = names_shown(auth), None if follows else caller_of(metadata)
        host = peer.rpartition(":")[0] if names is None else ", ".join(sorted(names))
        key = host, "follower" if follows else None if caller is None else caller[0]
        found = self._known.get(key)
        if found is None:
            name = f"followers ({host})" if follows else host
            found = self._known[key] = Allowance(name if caller is None else f"rank {caller[0]} ({host})")
        return found
