"""How the lead reaches an owner in another process: over gRPC or, within a step on its host, through a mailbox.

A link that breaks fails nothing: calls that had no answer are repeated over a new channel, with back-off, and the owner
executes each once (store/host/owner_link.py does the same for ranks)."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc

from rayzero.concurrency.backoff import backoff
from rayzero.concurrency.event_loop import shared_loop
from rayzero.concurrency.futures import DONE, then
from rayzero.concurrency.processes import watch_process
from rayzero.errors import RayZeroError, StoreClosedError, StoreError, TransferError
from rayzero.protocol.messages import Decision, FileEntry, FinishReport, NormParts, Record, Write
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.memory.shared_owner import SharedOwner
from rayzero.store.traffic import count_reconnect
from rayzero.store.wire import translate
from rayzero.store.wire.grpc_channel import GrpcChannel
from rayzero.store.wire.rpc import (
    OWNER_SERVICE,
    CallTerms,
    LinkNumber,
    Metadata,
    break_of,
    from_status,
    is_broken_link,
    methods,
)
from rayzero.store.wire.translate import Once, to_failure
from rayzero.telemetry.recorder import NullRecorder, Recorder


def _collect(reports: tuple[FinishReport, ...]) -> pb.CollectRequest:
    return pb.CollectRequest(step=reports[0].step, reports=translate.reports_to_pb(reports))


def _apply(decision: Decision) -> pb.ApplyRequest:
    return pb.ApplyRequest(decision=translate.decision_to_pb(decision))


def _nothing(_: object) -> None:
    return None


collect_request = Once(_collect)  # of all ranks' reports of one step
apply_request = Once(_apply)  # of a decision


log = logging.getLogger(__name__)

T = TypeVar("T")

_QUICK_S = 10.0  # opening and closing a channel
_ABORT_S = 3.0  # how long an abort is repeated: an owner that cannot be reached has most likely gone itself. An owner
# that does not hear of it keeps its ranks waiting until they stall


_METHODS = methods(OWNER_SERVICE)


@dataclass(frozen=True, slots=True)
class _Channel:
    """One channel of the lead's link to an owner."""

    link: LinkNumber
    grpc: GrpcChannel
    metadata: Metadata  # of each call

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        return await self.grpc.call(_METHODS[method], request, timeout_s, (*self.metadata, *self.link.metadata))


class RemotePeer:
    """One owner in another process. An ``OwnerPeer`` (lead/attempt.py).

    Knows the owner's address, how to call it and whether its link is open; not what a step is. Its futures complete on
    the process's event loop, or in the thread that listens to the mailbox: callbacks on them must not block."""

    def __init__(
        self,
        owner: int,
        address: str,
        terms: CallTerms,
        *,
        shared: SharedOwner | None = None,
        timeout_s: float = 600.0,
        recorder: Recorder | None = None,
    ) -> None:
        """``shared``: the lead's own end of shared memory, which may have a mailbox to the owner; None: it has none.
        ``timeout_s``: the longest that a call may take, in seconds, while its link is down or open."""
        self.owner, self._shared = owner, shared
        self._applied: Future[None] = DONE  # the last decision handed over
        self._name = f"optimizer {owner} at {address}"
        self._address, self._tls, self._metadata = address, terms.tls, terms.metadata
        self._timeout_s = timeout_s
        self._recorder = recorder or NullRecorder()
        self._loop = shared_loop()
        self._aborts: list[Future[None]] = []
        self._saves = secrets.randbits(48)  # the number of the last call; a former life of the lead has used others
        self._over: StoreError | None = None  # why the owner will never answer again
        self._met = False  # the owner has answered
        self._down: tuple[float, str] | None = None  # since when the link is down, and why
        self._unwatch: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()  # the link is over: nobody waits for it any more
        self._caught_up = asyncio.Event()  # clear while a successor redoes what is recorded
        self._caught_up.set()
        self._successors = 0
        self._channel = self._loop.run(self._open(LinkNumber("lead", 0)), _QUICK_S)  # freed by: _reopen(), _close()

    # ---- calls

    def succeed(self, address: str, records: Sequence[Record]) -> Future[None]:
        """The owner's process has died; its successor is at ``address``. It redoes ``records``; then every call that
        was not answered is repeated. Done once it has redone them."""

        async def succeed() -> None:
            self._successors += 1
            successor, self._address = self._successors, address
            self._caught_up.clear()
            await self._reopen(self._channel)
            for record in records:
                request = pb.RedoRequest(record=translate.record_to_pb(record))
                await self._ask("Redo", request, self._timeout_s, successor=successor)
            if successor == self._successors:
                self._caught_up.set()
            else:  # it died meanwhile, and another one is asked to redo them
                await self._caught_up.wait()

        return self._loop.submit(succeed())

    def watch(self, died: Callable[[StoreError], None]) -> None:
        """Call ``died``, on the event loop, as soon as the owner's process has died, if this process can see that."""

        async def watch() -> None:
            with suppress(RayZeroError):  # its links show the rest
                answer = await self._ask("Identify", pb.IdentifyRequest(), self._timeout_s)
                process = translate.process_from_pb(answer.process)
                error = StoreError(f"optimizer {self.owner} (pid {process.pid}) has died")

                def end() -> None:
                    if self._over is None:
                        self._end(error)
                        died(error)

                self._unwatch = watch_process(process, end) or self._unwatch

        self._loop.submit(watch())

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """Ask for the step's norm parts, which come once every counted push is there."""
        read = partial(translate.parts_from_pb, step)
        return self._within_step("Collect", collect_request(reports), pb.CollectResponse, read)

    def apply(self, decision: Decision) -> Future[None]:
        """Act on the decision; done when the owner has queued it."""
        self._applied = self._within_step("Apply", apply_request(decision), pb.ApplyResponse, _nothing)
        return self._applied

    def redo(self, record: Record) -> Future[None]:
        """Act on a recorded decision; done when the owner has queued it."""
        return self._call("Redo", pb.RedoRequest(record=translate.record_to_pb(record)), _nothing)

    def begin_checkpoint(self, step: int, directory: Path) -> Future[None]:
        """Begin to write the owner's shards of version ``step``, which ``write_checkpoint`` then waits for; decisions
        wait for the answer."""
        return self._call("BeginShards", self._save_request(step, directory), _nothing)

    def write_checkpoint(self, step: int, directory: Path) -> Future[FileEntry]:
        """Write the owner's shards of version ``step`` into the staging directory."""
        request = self._save_request(step, directory)
        return self._call("WriteShards", request, lambda answer: translate.file_from_pb(answer.file))

    def _save_request(self, step: int, directory: Path) -> pb.WriteShardsRequest:
        self._saves += 1
        return pb.WriteShardsRequest(step=step, directory=str(directory), number=self._saves)

    def write(self, number: int, write: Write) -> Future[None]:
        """Change the owner's shards of a unit; done when they are changed. It must not overtake a decision in the
        mailbox."""
        return self._call("Overwrite", pb.OverwriteRequest(number=number, write=translate.write_to_pb(write)), _nothing)

    def abort(self, error: StoreError) -> None:
        """Fail every wait at the owner, once it has a decision that is in the mailbox. Errors are ignored: an owner
        that cannot be reached has gone itself."""
        request = pb.AbortRequest(failure=to_failure(error))
        repeat_s = 0.0 if isinstance(error, StoreClosedError) else _ABORT_S  # at its end, a run's owners end in turn

        def abort(_: object) -> None:
            self._aborts.append(self._loop.submit(self._ask("Abort", request, _QUICK_S, repeat_s)))

        (DONE if self._shared is None else self._applied).add_done_callback(abort)

    def close(self) -> None:
        """Close the connection once the aborts have gone out; other calls under way fail."""
        wait(self._aborts, _QUICK_S)
        self._unwatch()
        self._loop.run(self._close(), _QUICK_S)

    def _call(self, method: str, request: Any, read: Callable[[Any], T]) -> Future[T]:
        async def call() -> T:
            return read(await self._ask(method, request, self._timeout_s))

        return self._loop.submit(call())

    def _within_step(self, method: str, request: Any, response: type[Any], read: Callable[[Any], T]) -> Future[T]:
        """Call through the mailbox, if there is one that holds the request."""
        shared = self._shared
        asked = None if shared is None else shared.ask(self.owner, method, request.SerializeToString())
        if asked is None:
            return self._call(method, request, read)
        return then(asked, lambda answer: read(response.FromString(answer)))

    # ---- the link: on the event loop

    async def _ask(
        self, method: str, request: Any, timeout_s: float, repeat_s: float = math.inf, *, successor: int | None = None
    ) -> Any:
        """Make a call, and repeat it over a new channel while the link breaks; not before a successor has redone what
        is recorded. ``successor``: the call is part of that, by this successor: None once another one has taken its
        place. Raises the owner's error; TransferError if the link is still down after ``timeout_s`` or ``repeat_s``
        seconds; why the link is over."""
        began, pauses = time.monotonic(), backoff()
        deadline = began + timeout_s
        while self._over is None:
            if successor is None:
                await self._caught_up.wait()
            elif successor != self._successors:
                return None
            channel = self._channel
            try:
                answer = await channel.call(method, request, max(0.0, deadline - time.monotonic()))
            except grpc.RpcError as error:
                if channel is self._channel and not is_broken_link(error, met=self._met):
                    raise from_status(error, self._name) from error
                self._broke(channel, error, logging.WARNING if repeat_s else logging.DEBUG)
            except asyncio.CancelledError:
                if channel is self._channel and self._over is None:
                    raise  # it is not the channel that was closed
            else:
                self._works(channel)
                return answer
            pause = next(pauses)
            if time.monotonic() + pause > min(deadline, began + repeat_s):
                raise self._link_error()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause)
            await self._reopen(channel)
        raise self._over

    async def _open(self, before: LinkNumber) -> _Channel:
        return _Channel(before.next(), GrpcChannel(self._address, self._tls), self._metadata)

    async def _reopen(self, broken: _Channel) -> None:
        """Replace a channel, once; its other calls end, and are repeated as this one is."""
        if broken is self._channel and self._over is None:
            self._channel = await self._open(broken.link)
            await broken.grpc.close()

    def _broke(self, channel: _Channel, error: grpc.RpcError, level: int) -> None:
        if channel is self._channel and self._down is None:
            self._down = time.monotonic(), break_of(error)
            log.log(level, "the lead lost the link to %s: %s", self._name, self._down[1])

    def _works(self, channel: _Channel) -> None:
        self._met = True
        if channel is self._channel and self._down is not None:
            down_s, self._down = time.monotonic() - self._down[0], None
            log.warning("the lead: the link to %s is back after %.3g s", self._name, down_s)
            count_reconnect(self._recorder, "optimizer", down_s)

    def trouble(self) -> str | None:
        """Why its link is down, if it is. May be called in any thread."""
        down = self._down
        return None if down is None else self._broken(*down)

    def _link_error(self) -> TransferError:
        return TransferError(self._broken(*(self._down or (time.monotonic(), "it has just broken"))))

    def _broken(self, since: float, why: str) -> str:
        return f"{self._name}: its link is down since {time.monotonic() - since:.3g} s ({why})"

    def _end(self, error: StoreError) -> None:
        self._over = self._over or error
        self._changed.set()
        self._caught_up.set()

    async def _close(self) -> None:
        self._end(StoreClosedError(f"{self._name}: the store was closed"))
        await self._channel.grpc.close()
