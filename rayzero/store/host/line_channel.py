"""One channel of a link to an owner: calls and notices over a line in shared memory. At its other end is the owner or,
for one on another host, an optimizer actor of this host that calls it (store/owner/entrances/pipes.py).

What ``Channel`` is over gRPC, for the same links: a line breaks when the process at its other end dies or stops
serving, and calls without an answer are repeated over the next channel."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from google.protobuf.message import DecodeError

from rayzero.concurrency.futures import fail, failed, settle
from rayzero.concurrency.processes import SeenProcess, this_process
from rayzero.errors import RayZeroError, StoreClosedError, StoreError, TransferError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import BrokenLinkError, Caller, NoAnswerError
from rayzero.store.shm.lines import QUESTION_BYTES, Line, Lobby, Parcel, room_for
from rayzero.store.shm.mailbox import Asker
from rayzero.store.shm.signals import Listener
from rayzero.store.shm.words import key_digest
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import TOKEN_KEY, LinkNumber, Metadata, methods, transfers
from rayzero.store.wire.translate import from_failure

log = logging.getLogger(__name__)

_REST = "Rest"  # asks for an answer that was too long
_LATE_S = 2.5  # after a call's deadline: the listener ends the call sooner, unless the whole process is stopped


@dataclass(eq=False, slots=True)
class _Call:
    """A call that has no answer."""

    method: str
    question: pb.LineQuestion
    until: float  # monotonic seconds
    answer: Future[Any]
    read: Callable[[bytes], Any]
    asked: Future[bytes] | None = None  # None: it waits for a free place
    failed: bool = False  # its answer is an error, which was too long
    parcels: list[Parcel] = field(default_factory=list)  # freed by: its answer


class LineChannel:
    """One channel of a link, with the notices of its owner. All its calls end when it is closed.

    Knows the line and open calls; not what is called. One thread listens."""

    def __init__(
        self,
        caller: Caller,
        peer: str,
        lobby: Lobby,
        link: LinkNumber,
        metadata: Metadata,
        token: str,
        awaited: Sequence[int] = (),
        *,
        to: str = "",
        met: bool = False,
    ) -> None:
        """``peer``, ``awaited``: see ``Channel``. ``lobby``: the owner's, or of who calls it at ``to``; freed by:
        close(). Raises MemoryPlanError if there is no room for the line, OSError if this process has too many files."""
        self.link, self.peer = link, f"{caller.name}, {peer}"
        self.met, self.transport = met, "grpc" if to else "shm"
        other_end = "the optimizer actor of this host that calls it" if to else "the owner"
        self._died = f"{other_end} has died" if to else "the owner's process has died"
        self._stopped = f"{other_end} serves no more"
        self._lobby, self._methods = lobby, methods(caller.service) | transfers(caller.service)
        opening = pb.LineOpening(
            key=key_digest(token),
            service=caller.service,
            metadata={key: str(value) for key, value in (*metadata, *link.metadata) if key != TOKEN_KEY},
            process=translate.process_to_pb(this_process()),
            notices=pb.NoticesRequest(ranks=awaited, **caller.signature),
            to=to,
            peer=self.peer,
            met=met,
        )
        self._told: SimpleQueue[pb.NoticesResponse | RayZeroError] = SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[_Call] = set()
        self._waiting: deque[_Call] = deque()  # for a free place
        self._heard, self._ended = 0, False
        self._line = Line.make(lobby, caller.number, opening)
        self._asker = Asker(self._line.questions, self._line.answers, lobby.bell)
        try:
            self._wake = os.eventfd(0)  # readable when there are notices. freed by: close()
        except OSError:
            self._line.end()
            self._line.close()
            raise
        self._seen = SeenProcess.open(lobby.process)  # None: the lobby alone shows its death. freed by: close()
        self._listener = Listener(self._line.bell, self._look, f"rayzero-{caller.name.replace(' ', '')}-line")

    # ---- calls

    def start(self, method: str, request: Any, timeout_s: float) -> Future[Any]:
        """Start a call. Raises BrokenLinkError if the channel is closed."""
        return self.transfer(method, request, timeout_s, None)

    def transfer(
        self, method: str, request: Any, timeout_s: float, parcel: Parcel | None, room: pb.LineRoom | None = None
    ) -> Future[Any]:
        """Start a call that moves the bytes in ``parcel``, or takes them there. ``room``: that a Fetch has there.
        Raises BrokenLinkError if the channel is closed. Cancelling the future ends the call at the owner too."""
        question = pb.LineQuestion(
            request=request.SerializeToString(), timeout_s=timeout_s, parcel="" if parcel is None else parcel.name
        )
        if room is not None:
            question.room.CopyFrom(room)
        call = _Call(
            method, question, time.monotonic() + timeout_s, Future(), self._methods[method].response.FromString
        )
        if 1 + len(method) + question.ByteSize() > QUESTION_BYTES:
            content = question.SerializeToString()
            try:
                spilled = self.parcel(room_for([len(content)]))
            except RayZeroError as error:  # the call's, as if the owner had said it
                return failed(error)
            call.parcels.append(spilled)
            spilled.put(0, memoryview(content))
            call.question = pb.LineQuestion(timeout_s=timeout_s, spilled=spilled.name)
        call.answer.add_done_callback(lambda _: self._give_up_call(call))
        self._ask(call)
        return call.answer

    def parcel(self, size_bytes: int) -> Parcel:
        """Memory for the bytes of a call. Freed by: the caller, once the call has ended. Raises MemoryPlanError if
        there is no room, StoreError if this process has too many files."""
        try:
            return Parcel.make(self._line.facts, self._lobby.directory, size_bytes)
        except OSError as error:
            raise StoreError(f"{self.peer}: no memory can be made for {size_bytes:,} bytes: {error}") from error

    def _ask(self, call: _Call) -> None:
        with self._lock:
            ended = self._ended
            if not ended:
                self._open.add(call)
                self._waiting.append(call)
        if ended:
            error = BrokenLinkError(f"{self.peer}: the connection was closed")
            self._over(call, error)
            raise error
        self._ask_waiting()

    def _ask_waiting(self) -> None:
        """Ask what waits, as far as there are places."""
        while True:
            with self._lock:
                while self._waiting and self._waiting[0].answer.done():  # nobody waits for it any more
                    self._waiting.popleft()
                asked = self._asker.ask(*_said(self._waiting[0])) if self._waiting else None
                if asked is None:
                    return
                call = self._waiting.popleft()
                call.asked = asked
            if call.answer.done():  # just now
                self._asker.give_up(asked)
            asked.add_done_callback(partial(self._answered, call))

    def _give_up_call(self, call: _Call) -> None:
        """Its future is done. If the owner has not ended it, it was cancelled, or its time is up."""
        with self._lock:
            self._open.discard(call)
            asked = call.asked
        for parcel in call.parcels:
            parcel.close()
        if asked is not None and not asked.done():
            self._asker.give_up(asked)

    def _answered(self, call: _Call, asked: Future[bytes]) -> None:
        """Runs in the listener's thread."""
        if call.answer.done():
            return
        try:
            answer = pb.LineAnswer.FromString(asked.result())
            if answer.rest_bytes:
                self._fetch_rest(call, answer)
            elif call.question.rest:
                rest = call.parcels[-1]
                rest.rewind()
                self._over(call, None, bytes(rest.take(0)))
            else:
                self._over(call, None, answer.response)
        except TransferError as error:
            if not call.question.rest:
                self._over(call, error)
            else:  # this process stood still, and the owner does not have the answer any more: repeat the call
                self._over(call, BrokenLinkError(f"{self.peer}: {error}"))
        except DecodeError as error:
            self._over(call, TransferError(f"{self.peer}: an answer cannot be read: {error}"))
        except RayZeroError as error:
            self._over(call, error)

    def _fetch_rest(self, call: _Call, answer: pb.LineAnswer) -> None:
        room = self.parcel(room_for([answer.rest_bytes]))
        call.parcels.append(room)
        call.method, call.failed = _REST, answer.failed
        call.question = pb.LineQuestion(parcel=room.name, rest=answer.rest)
        with self._lock:
            call.asked = None
            self._waiting.appendleft(call)  # the listener asks next
        if call.answer.done():  # meanwhile
            room.close()

    def _over(self, call: _Call, error: BaseException | None, response: bytes = b"") -> None:
        """Its parcels are closed once its future is done."""
        if error is None and call.failed:
            error = from_failure(pb.Failure.FromString(response))
        if error is not None:
            fail(call.answer, error)
        else:
            settle(call.answer, call.read(response))

    def answer(self, started: Future[Any]) -> Any:
        """The answer to a started call; blocks. Raises the owner's error, or BrokenLinkError."""
        try:
            return started.result()
        except CancelledError:
            raise StoreClosedError(f"{self.peer}: the call was ended") from None

    # ---- the listener

    def _look(self) -> None:
        try:
            self._look_now()
        except Exception as error:
            log.exception("%s: a line could not be read", self.peer)
            self._end(f"its line could not be read: {error!r}")

    def _look_now(self) -> None:
        over = self._line.is_over
        said = self._line.heard(self._heard)  # in this order: the last word comes before the end
        if said is not None:
            self._heard = said[0]
            self._tell(said[1].notice)
            if said[1].HasField("ended"):
                self._tell(from_failure(said[1].ended))
            if said[1].broken:
                self._end(said[1].broken)
        self._asker.take_answers()
        self._ask_waiting()
        self._end_late()
        if over:
            self._end(self._stopped)
        elif self._seen is not None and self._seen.has_died:
            self._end(self._died)
        elif (self._seen is None or not self._heard) and self._lobby.is_abandoned:  # perhaps it never saw this line
            self._end(self._died if self._seen is None else self._stopped)

    def _end_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [call for call in self._open if now > call.until]
        for call in late:
            if now > call.until + _LATE_S:
                stood = "this process stood still while it waited for an answer"
                self._over(call, BrokenLinkError(f"{self.peer}: {stood}"))
            else:
                self._over(call, NoAnswerError(f"{self.peer}: no answer in time"))

    def _tell(self, notice: pb.NoticesResponse | RayZeroError) -> None:
        self._told.put(notice)
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _end(self, why: str) -> None:
        """The line is of no use any more; any thread may say so. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            open_now, self._open = list(self._open), set()
            self._waiting.clear()
        error = BrokenLinkError(f"{self.peer}: {why}")
        error.__cause__ = ConnectionResetError(why)
        self._tell(error)
        for call in open_now:
            self._over(call, error)

    def notices(self) -> Iterator[pb.NoticesResponse]:
        """The notices. Raises BrokenLinkError at their end; that of the process at the other end is seen at once."""
        waiting, seen = select.poll(), None if self._seen is None else self._seen.file
        waiting.register(self._wake, select.POLLIN)
        if seen is not None:
            waiting.register(seen, select.POLLIN)
        while True:
            if seen in [file for file, _ in waiting.poll()]:
                self._end(self._died)
            for _ in range(os.eventfd_read(self._wake)):
                notice = self._told.get()
                if isinstance(notice, RayZeroError):
                    raise notice
                yield notice

    def give_up(self) -> None:
        """End the notices, so that the link's thread closes the channel; does not block."""
        self._end("the connection was closed")

    def close(self) -> None:
        """End every call and the line; waits until all callbacks of calls have run. Idempotent."""
        self.give_up()
        self._listener.close()
        self._line.end()
        self._lobby.bell.ring()
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1
        if self._seen is not None:
            self._seen.close()
        self._line.close()
        self._lobby.close()


def _said(call: _Call) -> tuple[str, bytes]:
    call.question.timeout_s = max(0.0, call.until - time.monotonic())  # it may have waited for a free place
    return call.method, call.question.SerializeToString()
