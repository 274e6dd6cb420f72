"""The voice of a host: one of its ranks, which asks the lead in the name of all of them, and tells them what owners on
other hosts publish.

With a thousand ranks, what each asks of the lead in a step costs it seconds of one core, and most of that is the call,
not the question. Ranks of a host ask the same at about the same time, so one message for all of them saves the calls.

[Note: when a voice speaks] It waits for the last rank of its host, because nobody can be answered before that one has
asked. But the lead names whom a step waits for and finds steps that can never be decided, so what is asked leaves after
``_PATIENCE_S`` at the latest (sooner with a stall timeout of seconds), and what comes then in another message.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rayzero.concurrency.futures import fail
from rayzero.errors import StoreError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.long_poll import LongPoll
from rayzero.store.host.links.owner_link import OwnerLink
from rayzero.store.rank.voice.line import (
    ANSWER,
    BEAT,
    BEAT_S,
    CARRIED,
    FAILURE,
    HELLO,
    MESSAGE_BYTES,
    NOTICE,
    OWNER,
    QUESTION,
    RESPONSE,
    UNHEARD,
    is_of_this_user,
    open_socket,
)

log = logging.getLogger(__name__)

_PATIENCE_S = 0.5  # at most, for the last rank of the host
_BACKLOG = 512  # ranks that connect at a time
_NOTICES = 4096  # publications in a message, so that it fits into a socket's buffer

Same = tuple[int, int]  # method, and step or number of the mean: what is asked there is answered at once


@dataclass(eq=False)
class _Guest:
    """A rank of this host that is connected."""

    line: socket.socket
    rank: int = -1  # until it has said who it is
    life: int = 0
    waits: int = 0  # questions without an answer
    gone: bool = False


@dataclass(frozen=True, slots=True)
class _Question:
    guest: _Guest
    number: int
    request: bytes


@dataclass(eq=False)
class Round:
    """What ranks ask of one step, or one mean."""

    since: float = 0.0  # when the first question came that has not left
    asked: set[int] = field(default_factory=set)  # ranks
    waiting: list[_Question] = field(default_factory=list)  # to leave
    under_way: int = 0

    def add(self, question: _Question, now: float) -> None:
        """A rank asks."""
        if not self.waiting:
            self.since = now
        self.waiting.append(question)
        self.asked.add(question.guest.rank)

    def leaves(self, expected: set[int], now: float, patience_s: float) -> bool:
        """Whether what waits is to leave now. ``expected``: the ranks that are to ask, too. ``patience_s``: seconds to
        wait for them."""
        return bool(self.waiting) and (expected <= self.asked or now - self.since >= patience_s)


class Voice:
    """Collects the questions of a host's ranks, asks the lead, and gives each its answer; passes on what owners tell.

    Knows ranks, numbers and bytes; not what is asked. One thread listens, another one passes answers on, and that of
    each link what its owner publishes."""

    def __init__(
        self,
        address: bytes,
        rank: int,
        ranks: Collection[int],
        link: OwnerLink,
        stall_timeout: float,
        away: Mapping[int, OwnerLink],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen at ``address`` (line.py). ``rank``: whose process this is. ``ranks``: of this host. ``link``: to
        the lead. ``stall_timeout``: seconds after which a rank asks whom a step waits for. ``away``: by owner, the
        links over which this rank hears what is published. Raises OSError if somebody else listens there."""
        self._rank, self._link, self._away, self._clock = rank, link, away, clock
        self._patience_s = min(_PATIENCE_S, stall_timeout / 8)
        self._lock = threading.Lock()
        self._guests: dict[int, _Guest] = {}  # by file
        self._expected = set(ranks)  # those of the host, but for any that have come and ended
        self._rounds: dict[Same, Round] = {}  # freed by: the last answer
        self._under_way: set[Future[Any]] = set()  # what the lead is asked now
        self._beaten = -math.inf  # when the last beat was
        self._closing = False
        self._door = open_socket()
        try:
            self._door.bind(address)
            self._door.listen(_BACKLOG)
        except OSError:
            self._door.close()
            raise
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # freed by: close()
        self._ready = selectors.DefaultSelector()  # freed by: _work
        self._ready.register(self._door, selectors.EVENT_READ)
        self._ready.register(self._wake, selectors.EVENT_READ)
        self._answers = ThreadPoolExecutor(1, f"rayzero-rank{rank}-voice-answers")  # freed by: close()
        self._thread = threading.Thread(target=self._work, name=f"rayzero-rank{rank}-voice", daemon=True)
        self._thread.start()

    # ---- listening

    def _work(self) -> None:
        try:
            while not self._closing:
                self._listen()
                self._speak()
                self._beat()
        except Exception:  # whatever it is, the ranks of this host ask themselves from here on
            log.exception("rank %d speaks for its host no more", self._rank)
        finally:
            self._door.close()
            for guest in list(self._guests.values()):
                self._leave(guest)
            self._ready.close()

    def _listen(self) -> None:
        """Wait for something, and take it in."""
        for key, _ in self._ready.select(min(BEAT_S, self._patience_s) if self._guests else None):
            if key.fileobj is self._door:
                self._meet()
            elif key.fd == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._hear(self._guests[key.fd])

    def _meet(self) -> None:
        try:
            line, _ = self._door.accept()
        except OSError as error:  # it has left again, or this process has no more files
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return
        line.setblocking(False)
        if not is_of_this_user(line):
            line.close()
            return
        with self._lock:
            self._guests[line.fileno()] = _Guest(line)
        self._ready.register(line, selectors.EVENT_READ)

    def _hear(self, guest: _Guest) -> None:
        """Take in one message of a rank."""
        try:
            message = guest.line.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if guest.rank < 0 and len(message) == HELLO.size:
            guest.rank, guest.life = HELLO.unpack(message)
            self._expected.add(guest.rank)
        elif guest.rank >= 0 and len(message) >= QUESTION.size:
            self._take(guest, message)
        else:
            self._leave(guest)

    def _take(self, guest: _Guest, message: bytes) -> None:
        number, of, method = QUESTION.unpack_from(message)
        with self._lock:
            guest.waits += 1
            asked = self._rounds.setdefault((method, of), Round())
            asked.add(_Question(guest, number, message[QUESTION.size :]), self._clock())

    def _leave(self, guest: _Guest) -> None:
        """A rank has ended, or says what nobody understands: what it has asked leaves for nobody."""
        self._ready.unregister(guest.line)
        self._expected.discard(guest.rank)
        with self._lock:
            guest.gone = True
            del self._guests[guest.line.fileno()]
            guest.line.close()
            for asked in self._rounds.values():
                asked.waiting = [each for each in asked.waiting if each.guest is not guest]
                asked.asked.discard(guest.rank)
            self._forget()

    # ---- speaking

    def _speak(self) -> None:
        """Send what is to leave: see [Note: when a voice speaks]."""
        for same, questions in self._leaving():
            self._ask(same, questions)

    def _leaving(self) -> list[tuple[Same, list[_Question]]]:
        now = self._clock()
        with self._lock:
            found = [
                (same, each)
                for same, each in self._rounds.items()
                if each.leaves(self._expected, now, self._patience_s)
            ]
            for _, each in found:
                each.under_way += len(each.waiting)
            leaving = [(same, each.waiting) for same, each in found]
            for _, each in found:
                each.waiting = []
        return leaving

    def _ask(self, same: Same, questions: list[_Question]) -> None:
        """Ask the lead, in one message."""
        said = [
            pb.SpeakRequest.Said(rank=each.guest.rank, life=each.guest.life, request=each.request) for each in questions
        ]
        request = pb.SpeakRequest(rank=self._rank, method=CARRIED[same[0]], said=said)
        awaited = f"{CARRIED[same[0]]} {same[1]} for the ranks of this host"
        asked = LongPoll(self._link, "Speak", request, _itself, executor=self._answers, awaited=awaited).future
        with self._lock:
            self._under_way.add(asked)
        asked.add_done_callback(partial(self._answered, same, questions))

    def _beat(self) -> None:
        """Tell ranks that somebody is here who can reach the lead, and whose publications it passes on."""
        if self._clock() - self._beaten < BEAT_S or self._link.channel() is None:
            return
        self._beaten = self._clock()
        away = b"".join(OWNER.pack(owner) for owner, link in self._away.items() if link.channel() is not None)
        self._tell(ANSWER.pack(BEAT, RESPONSE) + away)

    def pass_on(self, owner: int, published: Sequence[pb.NoticesResponse.Published]) -> None:
        """Tell the ranks of this host what an owner has published. May be called from any thread."""
        for at in range(0, len(published), _NOTICES):
            notice = pb.NoticesResponse(published=published[at : at + _NOTICES])
            self._tell(ANSWER.pack(owner, NOTICE) + notice.SerializeToString(), but=self._rank)

    def _tell(self, message: bytes, but: int | None = None) -> None:
        """Send something to all ranks of this host. ``but``: not to this one."""
        with self._lock:
            guests = [guest for guest in self._guests.values() if guest.rank not in (-1, but)]
        for guest in guests:
            self._send(guest, message)

    # ---- answers

    def _answered(self, same: Same, questions: list[_Question], asked: Future[Any]) -> None:
        with self._lock:
            self._under_way.discard(asked)
        error, left = asked.exception(), dict(enumerate(questions))
        for answer in asked.result().answers if error is None else ():
            kind, body = _result_of(answer)
            for place in answer.said:
                if (question := left.pop(place, None)) is not None:
                    self._reply(question, kind, body)
        if error is not None:  # the link is over, or its epoch: each rank hears that over its own
            for question in left.values():
                self._reply(question, UNHEARD, str(error).encode())
            left = {}
        with self._lock:
            asking = self._rounds[same]
            asking.under_way -= len(questions)
            for question in left.values():  # the lead has made them wait: ask again
                asking.add(question, self._clock())
            self._forget()
        if left:
            with suppress(OSError):  # closed
                os.eventfd_write(self._wake, 1)

    def _reply(self, question: _Question, kind: int, body: bytes) -> None:
        with self._lock:
            question.guest.waits -= 1
        self._send(question.guest, ANSWER.pack(question.number, kind) + body)

    def _send(self, guest: _Guest, message: bytes) -> None:
        with self._lock:
            if guest.gone:
                return
            try:
                guest.line.send(message)
            except OSError:  # it takes nothing in, or the answer is too long for it: it asks itself
                with suppress(OSError):
                    guest.line.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """The lead has died: ask its successor nothing that was asked of it. Ranks may have had those answers another
        way, and gone on; they ask again themselves what they still want to know."""
        with self._lock:
            asked = list(self._under_way)
        for each in asked:
            fail(each, StoreError("the lead has died"))

    def _forget(self) -> None:
        """Drop what nobody waits for any more; under the lock."""
        self._rounds = {same: each for same, each in self._rounds.items() if each.waiting or each.under_way}

    def close(self) -> None:
        """Speak for nobody any more: the ranks of this host ask themselves. Call it once the link is closed.
        Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._answers.shutdown(wait=True)
        os.close(self._wake)


def _itself(response: pb.SpeakResponse) -> pb.SpeakResponse:
    return response


def _result_of(answer: pb.SpeakResponse.Answer) -> tuple[int, bytes]:
    if answer.HasField("response"):
        return RESPONSE, answer.response
    if answer.HasField("failure"):
        return FAILURE, answer.failure.SerializeToString()
    return UNHEARD, answer.unheard.encode()
