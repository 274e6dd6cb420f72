"""A rank's line to its host's voice: one rank that asks the lead in the name of all of them, and tells them what owners
on other hosts publish (speaker.py).

[Note: a voice only carries] Through the voice goes what the rank would send itself, byte for byte, and the lead answers
a repeat as it answers the first. So a rank asks itself, over its own link, whenever the voice is not there, has ended,
says nothing for a second, or must not speak for this rank. A voice that dies or hangs makes an answer late; it loses
none, and the lead knows a second later which ranks have asked. So it is with publications: see notices.py.
"""

from __future__ import annotations

import hashlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Protocol

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import StoreError
from rayzero.protocol.messages import canonical_json
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire.rpc import from_failure

log = logging.getLogger(__name__)

CARRIED = ("Finish", "Commit", "Mean")  # what a voice asks: each is answered once all ranks have asked
HELLO = struct.Struct("<II")  # rank, life: the first message to a voice
QUESTION = struct.Struct("<QQB")  # number, step or number of the mean, place in CARRIED; the request follows
ANSWER = struct.Struct("<QB")  # number of the question, what it is; the response or the failure follows
RESPONSE, FAILURE, UNHEARD, NOTICE = range(4)  # NOTICE: an owner in place of the number, and its NoticesResponse
BEAT = 0  # in place of a question's number: the voice is there, and its link to the lead is open
OWNER = struct.Struct("<I")  # after a beat's ANSWER: each owner whose notices the voice passes on now
BEAT_S = 0.25  # between two of them, while anybody is connected
_SILENT_S = 1.0  # without a word of the voice, after which a rank asks itself
LONGEST_S = 30.0  # a rank asks again itself, also if the voice says that it is there
_AGAIN_S = 1.0  # until a rank looks again for a voice where there was none
_SEND_BUFFER = 128 << 10  # the kernel doubles it, and takes messages that are a little shorter than that
MESSAGE_BYTES = 2 * _SEND_BUFFER  # no message is longer
_UCRED = struct.Struct("3i")  # pid, uid, gid


class UnheardError(StoreError):
    """The voice does not carry a question: the rank asks the lead itself."""


def voice_address(token: str, *parts: object) -> bytes:
    """Where the voice of a host listens: a name in Linux's abstract namespace, which ends with its process, however
    that ends. ``token``: the run's, so that nobody else knows the name before it is taken. ``parts``: what the ranks of
    one voice have in common, and no others."""
    digest = hashlib.sha256(canonical_json([token, *map(str, parts)]).encode()).hexdigest()
    return f"\0rayzero-voice-{digest[:32]}".encode()


def open_socket() -> socket.socket:
    """A socket that keeps messages apart and never blocks."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    return made


def is_of_this_user(peer: socket.socket) -> bool:
    """Whether the process at the other end runs as the same user; the kernel says so."""
    _, uid, _ = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.geteuid())


class Ear(Protocol):
    """Takes what the voice says unasked. Called in the line's thread."""

    def notice(self, owner: int, message: bytes) -> None:
        """The voice has heard this of an owner: a NoticesResponse."""

    def follow(self, owners: frozenset[int]) -> None:
        """The voice passes on what these owners publish from now on; said four times a second. Empty: there is none, or
        it is silent."""


class VoiceLine:
    """One rank's end: asks the voice, hears it, and gives up on it. See [Note: a voice only carries].

    Knows open questions; not what they mean, or how the rank asks itself. A thread listens while there is a voice, and
    else looks for one."""

    def __init__(
        self,
        address: bytes,
        rank: int,
        life: int,
        ear: Ear | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``address``: see ``voice_address``; a voice may come there later, and another one after it. ``ear``: None:
        only answers are heard."""
        self._address, self._rank, self._life, self._ear, self._clock = address, rank, life, ear, clock
        self._lock = threading.RLock()
        self._numbers = count(1)
        self._open: dict[int, tuple[Future[bytes], float]] = {}  # by number: the answer, when it was asked
        self._line: socket.socket | None = None  # freed by: its thread
        self._closed = False
        self._stirred = threading.Event()  # there is a line, or there will be none
        self._thread = threading.Thread(target=self._work, name=f"rayzero-rank{rank}-voice-line", daemon=True)
        self._thread.start()

    def ask(self, method: str, of: int, request: bytes) -> Future[bytes]:
        """Ask through the voice. The future has the response, fails with the lead's error, or with UnheardError.
        ``of``: the step or the number of the mean, by which the voice knows the others' questions that belong to it."""
        answer: Future[bytes] = Future()
        try:
            with self._lock:
                line, number = self._connected(), next(self._numbers)
                self._open[number] = answer, self._clock()
                try:
                    line.send(QUESTION.pack(number, of, CARRIED.index(method)) + request)
                except OSError:  # it has ended, takes nothing in, or the question is too long for it
                    del self._open[number]
                    raise
        except OSError as error:
            fail(answer, UnheardError(f"rank {self._rank}: its host's voice does not take a question: {error}"))
        return answer

    def _connected(self) -> socket.socket:
        """The line to the voice. Raises OSError if nobody is there."""
        if self._closed:
            raise ConnectionAbortedError("the store was closed")
        if self._line is None:
            line = open_socket()
            try:
                line.connect(self._address)
                if not is_of_this_user(line):
                    raise PermissionError("the process there is of another user")
                line.send(HELLO.pack(self._rank, self._life))
            except OSError:
                line.close()
                raise
            self._line = line
            self._stirred.set()
        return self._line

    def _work(self) -> None:
        while not self._closed:
            line = None
            with suppress(OSError), self._lock:  # nobody is there yet
                line = self._connected()
            if line is not None:
                self._listen(line)
            self._stirred.clear()
            if not self._closed and self._line is None:
                self._stirred.wait(_AGAIN_S)

    def _listen(self, line: socket.socket) -> None:
        """Take in what the voice says until it ends, or says what nobody understands."""
        try:
            self._hear(line)
        except Exception:  # whatever it is, this rank asks and hears by itself, until there is another line
            log.exception("rank %d could not take what its host's voice says", self._rank)
        with self._lock:
            if self._line is line:
                self._line = None
            line.close()
        self.drop()
        self._follow(b"")

    def _hear(self, line: socket.socket) -> None:
        waiting, heard, room = select.poll(), self._clock(), bytearray(MESSAGE_BYTES)
        waiting.register(line, select.POLLIN)
        while True:
            if waiting.poll(BEAT_S * 1e3):
                try:
                    size = line.recv_into(room)
                except OSError:
                    return
                if not size:
                    return
                self._take(bytes(memoryview(room)[:size]))
                heard = self._clock()
            self._look(heard)

    def _take(self, message: bytes) -> None:
        number, kind = ANSWER.unpack_from(message)
        body = message[ANSWER.size :]
        if kind == NOTICE:
            if self._ear is not None:
                self._ear.notice(number, body)
        elif number == BEAT:
            self._follow(body)
        else:
            self._answer(number, kind, body)

    def _answer(self, number: int, kind: int, body: bytes) -> None:
        """Whoever waits hears an answer under the lock: after ``drop``, none comes that was on its way."""
        with self._lock:
            found = self._open.pop(number, None)
            if found is None:  # this rank has asked itself since
                return
            if kind == RESPONSE:
                settle(found[0], body)
                return
            if kind == FAILURE:
                fail(found[0], from_failure(pb.Failure.FromString(body)))
                return
        fail(found[0], UnheardError(f"rank {self._rank}: its host's voice says: {body.decode(errors='replace')}"))

    def _follow(self, owners: bytes) -> None:
        """``owners``: see ``OWNER``."""
        if self._ear is not None and not self._closed:
            self._ear.follow(frozenset(owner for (owner,) in OWNER.iter_unpack(owners)))

    def _look(self, heard: float) -> None:
        """Give up what has waited for too long. ``heard``: when the voice last said anything."""
        now = self._clock()
        with self._lock:
            silent = now - heard > _SILENT_S
            late = [number for number, (_, asked) in self._open.items() if now - asked > LONGEST_S]
            if silent:
                late += [number for number, (_, asked) in self._open.items() if now - asked > _SILENT_S]
            given_up = [self._open.pop(number)[0] for number in dict.fromkeys(late)]
        self._fail(given_up)
        if silent:
            self._follow(b"")

    def drop(self) -> None:
        """Give up on all open questions: no answer to them is heard any more."""
        with self._lock:
            left, self._open = [answer for answer, _ in self._open.values()], {}
        self._fail(left)

    def _fail(self, answers: list[Future[bytes]]) -> None:
        for answer in answers:
            fail(answer, UnheardError(f"rank {self._rank}: its host's voice does not answer"))

    def close(self) -> None:
        """Give up on all questions, now and later, and hear nothing more. Idempotent."""
        with self._lock:
            self._closed, line = True, self._line
            if line is not None:
                with suppress(OSError):  # the voice has ended
                    line.shutdown(socket.SHUT_RDWR)
        self._stirred.set()
        self.drop()

    def join(self) -> None:
        """Wait for the thread, after ``close`` and once every wait for a publication has ended."""
        self._thread.join()
