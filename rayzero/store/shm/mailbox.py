"""Questions and answers between two processes of one host, in shared memory: what unary calls are over gRPC.

The asker writes a question into a cell of its memory and rings the answerer's bell. The answerer writes into the
matching cell of its own memory and rings back. A cell is free again once its answer has been read.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import RayZeroError, StoreError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.shm.signals import Bell, Cell, changed, load_acquire_64
from rayzero.store.wire.translate import failure_within, from_failure

SLOTS = 8  # questions that may be open at once between two processes

GIVEN_UP = ""  # the method of what is asked in place of a question that nobody waits for any more

_ASKED = struct.Struct("<B")  # length of the method's name, which follows
_ANSWERED = struct.Struct("<QB")  # number of the question, 1 if the answer is an error


@dataclass(frozen=True, slots=True)
class Cells:
    """``SLOTS`` cells, one after the other, in memory that one process writes."""

    address: int
    memory: object  # keeps it mapped
    capacity: int  # bytes of the largest message

    @staticmethod
    def bytes_for(capacity: int) -> int:
        """Bytes of shared memory that the cells take."""
        return SLOTS * Cell.bytes_for(capacity)

    @property
    def stride(self) -> int:
        """Bytes from one cell to the next."""
        return Cell.bytes_for(self.capacity)

    def cells(self) -> list[Cell]:
        """One object per cell."""
        return [Cell(self.address + i * self.stride, self.memory, self.capacity) for i in range(SLOTS)]


class _News:
    """Which of the other side's cells have changed since the last look.

    A cell that changes while it is being written, and is read once it is whole, counts as changed again at the next
    look. Message numbers tell a new message from that."""

    def __init__(self, cells: Cells, taken: Sequence[int] = (0,) * SLOTS) -> None:
        """``taken``: by cell, the number of the last message that was taken before."""
        self._where = cells
        self._cells = cells.cells()
        self._seen = array("Q", [0] * SLOTS)
        self.taken = list(taken)

    def take(self) -> list[tuple[int, int, bytes]]:
        """(slot, number, message) of each whole message, once. One that is being written rings when it is done."""
        found = []
        for slot in changed(self._where.address, self._where.stride, self._seen, SLOTS):
            read = self._cells[slot].read()
            if read is not None and read[0] != self.taken[slot]:
                self.taken[slot] = read[0]
                found.append((slot, *read))
        return found


def _answered(cell: Cell) -> int:
    """The number of the last question that was answered in ``cell``; 0 if there is none, or if the answer was cut."""
    read = cell.read()
    return 0 if read is None else int(_ANSWERED.unpack_from(read[1])[0])


@dataclass(frozen=True, slots=True)
class _Open:
    """A question that has no answer."""

    method: str
    request: bytes
    answer: Future[bytes] = field(default_factory=Future)

    @property
    def message(self) -> bytes:
        return _ASKED.pack(len(self.method)) + self.method.encode() + self.request


class Asker:
    """The asking side.

    Knows open questions; not their meaning. The thread that waits on this process's bell calls ``take_answers``."""

    def __init__(self, questions: Cells, answers: Cells, bell: Bell) -> None:
        """``questions``: ours; ``answers``: the other side's; ``bell``: the other side's."""
        self._cells = questions.cells()
        self._capacity = questions.capacity
        self._news = _News(answers)
        self._bell = bell
        self._lock = threading.Lock()
        self._numbers = [load_acquire_64(questions.address + i * questions.stride) // 2 for i in range(SLOTS)]
        # by cell, the number of the last question, also of a former life of this process
        self._open: dict[int, _Open] = {}  # by slot
        self._closed: RayZeroError | None = None

    def ask(self, method: str, request: bytes) -> Future[bytes] | None:
        """Ask; None if the question is too long or too many are open, so that the caller must use gRPC. After ``close``
        the future raises its error."""
        asked = _Open(method, request)
        with self._lock:
            if self._closed is not None:
                fail(asked.answer, self._closed)
                return asked.answer
            slot = next((slot for slot in range(SLOTS) if slot not in self._open), None)
            if slot is None or len(asked.message) > self._capacity:
                return None
            self._open[slot] = asked
            self._write(slot)
        self._bell.ring()
        return asked.answer

    def _write(self, slot: int) -> None:
        """Under the lock."""
        self._numbers[slot] += 1
        self._cells[slot].write(self._open[slot].message)

    def ask_again(self) -> None:
        """Ask anew what has no answer: none is heard any more that is on its way."""
        with self._lock:
            for slot in self._open:
                self._write(slot)
        self._bell.ring()

    def give_up(self, answer: Future[bytes]) -> None:
        """Nobody waits any more for the answer to a question: the other side may stop. Its cell stays taken until that
        answers ``GIVEN_UP``. No effect on a question that has an answer."""
        with self._lock:
            slot = next((slot for slot, asked in self._open.items() if asked.answer is answer), None)
            if slot is None:
                return
            self._open[slot] = _Open(GIVEN_UP, b"")
            self._write(slot)
        self._bell.ring()

    @property
    def open(self) -> list[tuple[str, bytes]]:
        """(method, request) of each question that has no answer."""
        with self._lock:
            return [(asked.method, asked.request) for asked in self._open.values()]

    def take_answers(self) -> None:
        """Settle the questions whose answers are there. Only one thread may call it."""
        for slot, _, message in self._news.take():
            number, is_error = _ANSWERED.unpack_from(message)
            with self._lock:
                asked = self._open.pop(slot, None) if number == self._numbers[slot] else None
            if asked is None:
                continue
            body = message[_ANSWERED.size :]
            if is_error:
                fail(asked.answer, from_failure(pb.Failure.FromString(body)))
            else:
                settle(asked.answer, body)

    def close(self, error: RayZeroError) -> None:
        """Fail open questions and later ones with ``error``."""
        with self._lock:
            self._closed = error
            left, self._open = list(self._open.values()), {}
        for asked in left:
            fail(asked.answer, error)


class Answerer:
    """The answering side.

    Knows questions and where their answers go. Any thread may call ``answer``."""

    def __init__(self, questions: Cells, answers: Cells, bell: Bell, *, resumes: bool = False) -> None:
        """``questions``: the other side's; ``answers``: ours; ``bell``: the other side's. ``resumes``: a former life of
        this process answered the same asker, so only what it left unanswered is new. Else all that is there by now was
        asked of others, and the asker asks again what it still wants to know."""
        self._cells = answers.cells()
        if not resumes:
            for cell, question in zip(self._cells, questions.cells(), strict=True):
                asked, said = question.read(), cell.read()
                if asked is not None or said is not None:
                    cell.write(_ANSWERED.pack(0 if asked is None else asked[0], False))
        self._news = _News(questions, [_answered(cell) for cell in self._cells])
        self._capacity = answers.capacity
        self._bell = bell
        self._locks = [threading.Lock() for _ in range(SLOTS)]
        self._closed = False

    def take_questions(self) -> list[tuple[int, int, str, bytes]]:
        """(slot, number, method, request) of each new question. Only one thread may call it."""
        found = []
        for slot, number, message in self._news.take():
            (length,) = _ASKED.unpack_from(message)
            begin = _ASKED.size + length
            found.append((slot, number, message[_ASKED.size : begin].decode(), message[begin:]))
        return found

    def answer(self, slot: int, number: int, response: bytes | RayZeroError) -> None:
        """Answer a question with a response or an error, unless another one has taken its place. A response that is too
        long becomes a StoreError, an error that is too long loses the end of its text."""
        if isinstance(response, bytes) and len(response) > self._capacity - _ANSWERED.size:
            response = StoreError(f"an answer of {len(response):,} bytes does not fit a mailbox of {self._capacity:,}")
        is_error, room = isinstance(response, RayZeroError), self._capacity - _ANSWERED.size
        body = failure_within(response, room) if isinstance(response, RayZeroError) else response
        with self._locks[slot]:
            if self._closed or self._news.taken[slot] != number:
                return
            self._cells[slot].write(_ANSWERED.pack(number, is_error) + body)
        self._bell.ring()

    def close(self) -> None:
        """Answer nothing more: the cells are another asker's from now on."""
        self._closed = True
        for lock in self._locks:
            with lock:  # an answer that is being written is whole
                pass
