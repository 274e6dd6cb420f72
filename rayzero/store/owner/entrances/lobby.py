"""Answers the calls of processes of this host, which come through shared memory (store/shm/lines.py).

The same handlers as behind gRPC. What a line asks of an owner on another host is asked there, in the caller's name
(store/owner/entrances/pipes.py). Who has written a line knows the run's token and is this user; its certificate is not
asked for."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rayzero.concurrency.event_loop import shared_loop
from rayzero.concurrency.processes import this_process, watch_process
from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import HandshakeError, RayZeroError, TransferError
from rayzero.security.clients import Refusals
from rayzero.security.credentials import Identity
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.entrances.access import as_answer
from rayzero.store.owner.entrances.pipes import Pipe, PipeBrokenError
from rayzero.store.owner.handlers import FindModel, ModelCalls
from rayzero.store.owner.streams import ParcelStream
from rayzero.store.shm.lines import ANSWER_BYTES, Line, Lobby, Parcel
from rayzero.store.shm.mailbox import GIVEN_UP, Answerer
from rayzero.store.shm.signals import Listener
from rayzero.store.shm.words import key_digest
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import STORE_SERVICE, Metadata, epoch_of, methods, model_of, transfers
from rayzero.store.wire.translate import to_failure
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

_MARGIN = 64  # of an answer beside its response
_HELD_S = 30.0  # how long an error is held that is too long for a mailbox


class LineContext:
    """What a handler asks of its call: grpc.aio's context, as far as it is used, and the way of its bytes."""

    def __init__(
        self, line: _Line, until: float, stream: ParcelStream | None = None, room: pb.LineRoom | None = None
    ) -> None:
        """``until``: when the caller gives up, on the loop's clock. ``stream``: None: the call moves no
        bytes. ``room``: that the caller of a Fetch has."""
        self._line, self._until, self.stream, self.room = line, until, stream, room

    def invocation_metadata(self) -> Metadata:
        """Of the call."""
        return self._line.metadata

    def time_remaining(self) -> float:
        """Seconds until the caller gives up."""
        return max(0.0, self._until - asyncio.get_running_loop().time())

    async def write(self, notice: pb.NoticesResponse) -> None:
        """Say something unasked. What is published, its host's ranks see in memory: the owner's, or their copy."""
        notice.ClearField("published")
        if notice.ByteSize():
            self._line.said.notice.MergeFrom(notice)
            self._line.say()


class _Line:
    """A line that this owner answers. Lives on the event loop, but for ``answerer``."""

    def __init__(self, line: Line, opening: pb.LineOpening) -> None:
        self.line, self.opening = line, opening
        self.pipe: Pipe | None = None  # to an owner on another host. freed by: _drop
        self.said = pb.LineNotice()  # all that was said unasked
        self.metadata: Metadata = tuple(opening.metadata.items())
        self.answerer = Answerer(line.questions, line.answers, line.bell, resumes=True)
        self.methods = methods(opening.service) | transfers(opening.service)
        self.tasks: set[asyncio.Task[None]] = set()
        self.calls: dict[int, asyncio.Task[None]] = {}  # the last one, by its place
        self.held: dict[int, bytes] = {}  # answers that are too long, by number
        self.unwatch: Callable[[], None] | None = None  # ends the watch over its caller
        self.closed = False

    def say(self) -> None:
        if not self.closed:
            self.line.say(self.said)


class CallsInMemory:
    """The lobby of one address, and the lines of its callers.

    Knows lines and calls; not what a call does. One thread listens; all else runs on the event loop."""

    def __init__(
        self,
        directory: Path,
        address: str,
        token: str,
        lineage: str,
        find: FindModel,
        recorder: Recorder,
        tls: Identity | None = None,
    ) -> None:
        """``find``: returns the calls of a prepared model, by its number, in an epoch. ``tls``: what owners on other
        hosts are shown. Raises MemoryPlanError if there is no room."""
        self._find, self._key, self._loop = find, key_digest(token), shared_loop()
        self._refusals, self._numbers = Refusals("owner", recorder), count(1)
        self._lines: set[_Line] = set()
        self._token, self._tls = token, tls
        self._pool = _threads(2, "parcels")  # copy shards. freed by: close()
        self._for_pipes = _threads(4, "pipes")  # move bytes, or open connections. freed by: close()
        self._lobby = Lobby.make(directory, address, token, lineage, this_process())  # freed by: close()
        self._came = False  # a line may wait
        self._listener = Listener(self._lobby.bell, self._look, f"lobby of {address}")

    # ---- the listener

    def _look(self) -> None:
        try:
            self._came = self._lobby.has_arrivals() or self._came
            if self._came:
                for line in self._lobby.lines():
                    self._take_in(line)
                self._came = False
        except Exception:
            log.exception("the lobby could not take in a process of this host now; it looks again in a moment")
        for each in list(self._lines):
            if each.line.is_over:
                self._loop.loop.call_soon_threadsafe(self._drop, each)
                continue
            try:
                for question in each.answerer.take_questions():
                    self._loop.loop.call_soon_threadsafe(self._begin, each, *question)
            except Exception:  # its caller's mistake, which ends no other's calls
                log.exception("the lobby could not read what a process of this host has written")
                self._loop.loop.call_soon_threadsafe(self._drop, each)
            if each.unwatch is None:
                self._loop.loop.call_soon_threadsafe(self._look_after, each)

    def _take_in(self, line: Line) -> None:
        opening = line.opening
        is_ours = opening is not None and hmac.compare_digest(opening.key, self._key)
        if opening is None or not is_ours or opening.service != STORE_SERVICE:
            why = "it calls what optimizer actors call" if is_ours else "it does not show the run's token"
            self._refusals.note("role" if is_ours else "token", "shared memory", why)
            _refuse(line)
            return
        each = _Line(line, opening)
        self._lines.add(each)
        self._loop.loop.call_soon_threadsafe(self._open, each)

    # ---- the event loop

    def _open(self, each: _Line) -> None:
        process = translate.process_from_pb(each.opening.process)
        each.unwatch = watch_process(process, partial(self._drop, each))
        if each.opening.to:
            each.pipe = Pipe(each.opening, self._token, self._tls, self._for_pipes)
        self._run(each, self._notify(each))

    def _look_after(self, each: _Line) -> None:
        """This process cannot see the death of its caller, which is in another pid namespace: its lock tells."""
        if not each.closed and each.unwatch is None and each.line.is_abandoned:
            self._drop(each)

    def _run(self, each: _Line, work: Any) -> asyncio.Task[None]:
        task = self._loop.loop.create_task(work)
        each.tasks.add(task)
        task.add_done_callback(each.tasks.discard)
        return task

    async def _calls(self, each: _Line) -> ModelCalls | Pipe:
        """What answers the calls of a line."""
        return each.pipe or await self._find(model_of(each.metadata), epoch_of(each.metadata))

    async def _notify(self, each: _Line) -> None:
        """Send the caller the owner's notices until the line is over."""
        try:
            calls = await self._calls(each)
            await calls.answer(each.opening.service, "Notices", each.opening.notices, LineContext(each, float("inf")))
        except PipeBrokenError as broken:
            each.said.broken = str(broken)
        except Exception as failed:
            each.said.ended.CopyFrom(to_failure(as_answer(failed, "Notices")))
        finally:
            each.say()
            self._drop(each)

    def _begin(self, each: _Line, slot: int, number: int, method: str, request: bytes) -> None:
        if not each.closed:
            before = each.calls.get(slot)
            each.calls[slot] = self._run(each, self._answer(each, slot, number, method, request, before))

    async def _answer(
        self, each: _Line, slot: int, number: int, method: str, request: bytes, before: asyncio.Task[None] | None
    ) -> None:
        """``before``: the call that had its place; if it has no answer, its caller has given it up."""
        answer: bytes | RayZeroError
        try:
            if before is not None and not before.done():
                before.cancel()
                await asyncio.wait([before])
            if method == GIVEN_UP:
                each.answerer.answer(slot, number, b"")
                return
            question = pb.LineQuestion.FromString(request)
            answer = self._rest(each, question) if question.rest else await self._call(each, method, question)
        except PipeBrokenError as broken:
            each.said.broken = str(broken)
            each.say()
            self._drop(each)
            return
        except Exception as failed:
            answer = as_answer(failed, method)
        if isinstance(answer, RayZeroError):
            failure = bytes(to_failure(answer).SerializeToString())
            if len(failure) + _MARGIN > ANSWER_BYTES:
                answer = self._hold(each, failure, _HELD_S, failed=True)
        if not each.closed:
            each.answerer.answer(slot, number, answer)

    async def _call(self, each: _Line, name: str, question: pb.LineQuestion) -> bytes:
        method = each.methods.get(name)
        if method is None:
            raise HandshakeError(f"a process of this host calls {name!r}: install the same rayzero in every process")
        until = asyncio.get_running_loop().time() + question.timeout_s
        question = self._whole(each, question)
        request = method.request.FromString(question.request)
        parcel = self._open_parcel(each, question.parcel) if question.parcel else None
        try:
            stream = None if parcel is None else ParcelStream(parcel, self._pool)
            context = LineContext(each, until, stream, question.room)
            calls = await self._calls(each)
            response = (await calls.answer(each.opening.service, name, request, context)).SerializeToString()
        finally:
            if parcel is not None:
                parcel.close()
        if len(response) + _MARGIN <= ANSWER_BYTES:
            return bytes(pb.LineAnswer(response=response).SerializeToString())
        return self._hold(each, response, question.timeout_s)

    def _hold(self, each: _Line, content: bytes, held_s: float, *, failed: bool = False) -> bytes:
        """Hold an answer that is too long until its caller has made room for it, or waits no longer."""
        rest = next(self._numbers)
        if not each.closed:
            each.held[rest] = content
            self._loop.loop.call_later(held_s, each.held.pop, rest, None)
        return bytes(pb.LineAnswer(rest_bytes=len(content), rest=rest, failed=failed).SerializeToString())

    def _open_parcel(self, each: _Line, name: str) -> Parcel:
        return Parcel.open(name, each.line.facts, self._lobby.directory)

    def _whole(self, each: _Line, question: pb.LineQuestion) -> pb.LineQuestion:
        if not question.spilled:
            return question
        parcel = self._open_parcel(each, question.spilled)
        try:
            return pb.LineQuestion.FromString(bytes(parcel.take(0)))
        finally:
            parcel.close()

    def _rest(self, each: _Line, question: pb.LineQuestion) -> bytes:
        """Put an answer that was too long where its caller has made room for it."""
        response = each.held.pop(question.rest, None)
        if response is None:
            raise TransferError(f"answer {question.rest} is not here any more")
        parcel = self._open_parcel(each, question.parcel)
        try:
            parcel.put(0, memoryview(response))
        finally:
            parcel.close()
        return bytes(pb.LineAnswer().SerializeToString())

    def _drop(self, each: _Line) -> None:
        """A line is over, or its caller's process is."""
        if each.closed:
            return
        each.closed = True
        self._lines.discard(each)
        if each.unwatch is not None:
            each.unwatch()
            each.unwatch = None  # which holds this line
        if each.pipe is not None:
            each.pipe.close()
        for task in each.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        each.line.end()
        each.line.bell.ring()
        each.answerer.close()
        each.line.close()
        each.held.clear()
        self._lobby.remove_parcels(each.line)

    # ---- the end

    def close(self, timeout_s: float) -> None:
        """Serve no more, once calls have ended, for which there is some time; blocks. Call it off the event loop.
        Idempotent."""
        self._listener.close()
        self._lobby.close()
        with suppress(OSError):  # such a caller sees that the lobby is closed
            for line in self._lobby.lines():
                _refuse(line)
        self._loop.run(self._end(timeout_s / 2), timeout_s)
        for pool in (self._pool, self._for_pipes):
            pool.shutdown(wait=True)

    async def _end(self, grace_s: float) -> None:
        tasks = [task for each in self._lines for task in each.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for each in list(self._lines):
            self._drop(each)
        await asyncio.gather(*tasks, return_exceptions=True)


def _threads(count: int, what: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, f"rayzero-owner-{what}", initializer=use_torch_threads, initargs=(1,))


def _refuse(line: Line) -> None:
    line.end()
    line.bell.ring()
    line.close()
