"""The specs that ranks have described to an owner: each travels, and is read, once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from rayzero.errors import HandshakeError
from rayzero.protocol.messages import ModelSpec
from rayzero.quantities import count
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire import translate

_DIGEST_CHARS = 64
_KEPT = 4  # a run has one; ranks that come back may name another checkpoint
_AWAITED = 64  # specs that may be on their way; a caller could name any number of them
_PATIENCE_S = 5.0

Compute = Callable[[Callable[[], ModelSpec]], Awaitable[ModelSpec]]


class KnownSpecs:
    """Finds the spec that a rank attaches with.

    A spec of 10,000 parameters is a megabyte, and takes the event loop as long to read as a thousand small calls. All
    ranks of a run have the same, so a rank names it by its digest, and only the first is asked for all of it; others
    that come before that is here wait a moment for it.

    Knows digests; not what ranks do with a spec, or whether two may differ. Lives on the event loop."""

    def __init__(self, owner: int, compute: Compute, patience_s: float = _PATIENCE_S) -> None:
        """``compute``: runs work off the event loop. ``patience_s``: seconds that a rank waits for another one's spec
        before it is asked for its own."""
        self._owner, self._compute, self._patience_s = owner, compute, patience_s
        self._known: dict[str, ModelSpec] = {}  # by digest, the newest last
        self._coming: dict[str, asyncio.Event] = {}  # by digest, of a rank that was asked for it

    async def of(self, request: pb.AttachRequest) -> ModelSpec | None:
        """The spec of a rank's request; None: the rank has to send it. Raises HandshakeError if it is not the one that
        its digests name."""
        digest = request.spec_digest
        if len(digest) != _DIGEST_CHARS:
            raise HandshakeError(
                f"rank {request.rank} names its spec by {count(len(digest), 'character')}, and optimizer {self._owner} "
                f"by the {_DIGEST_CHARS} of a SHA-256: install the same rayzero on both"
            )
        if digest not in self._known and not request.spec and not await self._comes(digest):
            return None
        if digest not in self._known:
            await self._take(request)
        spec = self._known[digest]
        if spec.layout.digest != request.layout_digest:
            raise HandshakeError(
                f"rank {request.rank} describes a layout with digest {request.layout_digest[:12]}, "
                f"optimizer {self._owner} computes {spec.layout.digest[:12]} for it"
            )
        return spec

    async def _comes(self, digest: str) -> bool:
        """Wait for a spec that another rank was asked for. False: nobody was, or it does not come, so that the caller's
        rank is asked."""
        while (coming := self._coming.get(digest)) is not None:
            try:
                await asyncio.wait_for(coming.wait(), self._patience_s)
                return digest in self._known
            except TimeoutError:  # the rank that was asked may have died: one of those that wait is asked, too
                if self._coming.get(digest) is coming:
                    break
        self._coming[digest] = asyncio.Event()
        while len(self._coming) > _AWAITED:
            del self._coming[next(iter(self._coming))]
        return False

    async def _take(self, request: pb.AttachRequest) -> None:
        digest = request.spec_digest
        if translate.spec_digest(request.spec) != digest:
            raise HandshakeError(
                f"rank {request.rank} names its spec by {digest[:12]}, which is not the digest of what it "
                f"sends to optimizer {self._owner}: install the same rayzero on both"
            )
        spec = await self._compute(partial(translate.spec_from_bytes, request.spec))
        self._known.setdefault(digest, spec)  # always the same object: an owner compares that first
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        coming = self._coming.pop(digest, None)
        if coming is not None:
            coming.set()
