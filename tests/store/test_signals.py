"""Signals: nothing rung is lost, nothing half written is read, and all of it between processes."""

from __future__ import annotations

import ctypes
import mmap
import threading
from array import array
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from forked import Forked, forked

from rayzero.errors import UnsupportedError
from rayzero.store.shm import signals
from rayzero.store.shm.signals import BELL_BYTES, Bell, Cell

if reason := signals.available():
    pytest.skip(reason, allow_module_level=True)

PATIENCE = 60.0  # seconds: nobody waits that long unless something is broken
CELL_AT, CAPACITY = 64, 1000

OTHER = """
import ctypes, mmap, sys
from pathlib import Path
from rayzero.store.shm.signals import Bell, Cell
with open(sys.argv[1], "r+b") as file:
    page = mmap.mmap(file.fileno(), 4096)
memory = (ctypes.c_ubyte * 4096).from_buffer(page)
start = ctypes.addressof(memory)
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page of zeros that processes can share."""
    path = tmp_path / "page"
    path.write_bytes(bytes(4096))
    return path


def mapped(path: Path) -> tuple[int, object]:
    with path.open("r+b") as file:
        memory = (ctypes.c_ubyte * 4096).from_buffer(mmap.mmap(file.fileno(), 4096))
    return ctypes.addressof(memory), memory


@pytest.fixture
def words() -> tuple[int, object]:
    """Zeroed memory of this process: its address, and what keeps it."""
    memory = (ctypes.c_uint64 * 64)()
    return ctypes.addressof(memory), memory


def other_process(page: Path, code: str) -> AbstractContextManager[Forked]:
    return forked(OTHER + code, page)


# ---- flags ------------------------------------------------------------------------------------------------------


def test_flags_hold_their_full_width_and_touch_no_neighbour() -> None:
    page = (ctypes.c_uint64 * 3)(7, 0, 7)
    address = ctypes.addressof(page) + 8
    signals.store_release_64(address, 2**64 - 3)
    assert signals.load_acquire_64(address) == 2**64 - 3
    signals.store_release_32(address, 5)
    assert signals.load_acquire_32(address) == 5
    assert signals.load_acquire_32(address + 4) == 2**32 - 1
    assert (page[0], page[2]) == (7, 7)


def test_changed_names_the_words_that_differ_once_and_looks_only_at_every_stride() -> None:
    lines = (ctypes.c_uint64 * (8 * 1000))()
    seen, address = array("Q", bytes(8 * 1000)), ctypes.addressof(lines)
    assert signals.changed(address, 64, seen, 1000) == []
    for line in (0, 3, 999):
        lines[8 * line] = 2**64 - 1 - line
    lines[8 * 5 + 1] = 9  # the same line, another word
    assert signals.changed(address, 64, seen, 1000) == [0, 3, 999]
    assert (seen[3], seen[999], seen[5]) == (2**64 - 4, 2**64 - 1000, 0)
    assert signals.changed(address, 64, seen, 1000) == []
    lines[8 * 999] = 1
    assert signals.changed(address, 64, seen, 999) == []
    assert signals.changed(address, 8, array("Q", bytes(8 * 2)), 0) == []


def test_changed_refuses_values_that_c_would_misread() -> None:
    for seen in (array("q", bytes(80)), array("Q", bytes(16))):
        with pytest.raises(UnsupportedError, match=r"must be array\('Q'\) of 3"):
            signals.changed(0, 8, seen, 3)


# ---- bells ------------------------------------------------------------------------------------------------------


def test_a_wait_for_what_has_rung_already_returns_at_once(words: tuple[int, object]) -> None:
    bell = Bell(*words)
    bell.ring()
    assert bell.wait(0, PATIENCE) == 1
    assert bell.wait(2**32 - 1, PATIENCE) == 1


def test_a_wait_that_nobody_rings_for_ends_with_the_value_it_began_with(words: tuple[int, object]) -> None:
    bell = Bell(*words)
    assert bell.wait(0, 0.0) == 0
    assert bell.wait(0, 0.002) == 0


def test_the_count_of_rings_wraps_around(words: tuple[int, object]) -> None:
    signals.store_release_32(words[0], 2**32 - 1)
    bell = Bell(*words)
    bell.ring()
    assert bell.value == 0
    assert bell.wait(2**32 - 1, PATIENCE) == 0


def test_one_ring_wakes_every_thread_and_waiting_leaves_the_interpreter_to_others(words: tuple[int, object]) -> None:
    bell = Bell(*words)
    woken: list[int] = []
    threads = [threading.Thread(target=lambda: woken.append(bell.wait(0, PATIENCE))) for _ in range(4)]
    for thread in threads:
        thread.start()
    bell.ring()  # reached only if those who sleep do not hold the interpreter
    for thread in threads:
        thread.join(PATIENCE)
    assert woken == [1, 1, 1, 1]


def test_two_processes_play_ping_pong_over_shared_bells(page: Path) -> None:
    rounds = 2000
    code = f"""
ping, pong = Bell(start, memory), Bell(start + {BELL_BYTES}, memory)
for round in range({rounds}):
    assert ping.wait(round, {PATIENCE}) == round + 1
    pong.ring()
"""
    address, memory = mapped(page)
    ping, pong = Bell(address, memory), Bell(address + BELL_BYTES, memory)
    with other_process(page, code) as process:
        for round in range(rounds):
            ping.ring()
            assert pong.wait(round, PATIENCE) == round + 1
        assert process.wait(PATIENCE) == 0


def test_handlers_of_signals_run_while_a_wait_sleeps_and_may_end_it(page: Path) -> None:
    code = f"""
import signal
alarms = 0
def alarm(*_):
    global alarms
    alarms += 1
    if alarms == 3:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise SystemExit(7)
signal.signal(signal.SIGALRM, alarm)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
Bell(start, memory).wait(0, {PATIENCE})
"""
    with other_process(page, code) as process:
        assert process.wait(PATIENCE / 2) == 7


# ---- cells ------------------------------------------------------------------------------------------------------


def test_a_cell_gives_the_last_message_and_its_number(words: tuple[int, object]) -> None:
    cell = Cell(*words, capacity=100)
    assert cell.read() is None
    for number, message in enumerate((b"", b"x", b"12345678", bytes(range(100)), b"short"), 1):
        cell.write(message)
        assert cell.read() == (number, message)
        assert Cell(*words, capacity=100).read() == (number, message)


def test_a_message_too_large_for_its_cell_is_refused_and_leaves_the_last_one(words: tuple[int, object]) -> None:
    cell = Cell(*words, capacity=5)
    cell.write(b"12345")
    with pytest.raises(UnsupportedError, match="6 bytes does not fit a cell of 5"):
        cell.write(b"123456")
    assert cell.read() == (1, b"12345")


def test_a_cell_touches_nothing_beyond_its_bytes() -> None:
    size = Cell.bytes_for(13)
    memory = (ctypes.c_ubyte * (size + 8))(*[0] * size, *[7] * 8)
    cell = Cell(ctypes.addressof(memory), memory, capacity=13)
    cell.write(b"x" * 13)
    assert cell.read() == (1, b"x" * 13)
    assert list(memory[size:]) == [7] * 8


def test_a_message_that_a_writer_left_half_written_is_not_read_and_the_next_one_is(words: tuple[int, object]) -> None:
    cell = Cell(*words, capacity=16)
    cell.write(b"whole")
    signals.store_release_64(words[0], 3)  # a writer was killed in its second message
    assert cell.read() is None
    cell.write(b"next")
    assert cell.read() == (2, b"next")


def test_a_size_that_is_no_size_is_never_read(words: tuple[int, object]) -> None:
    cell = Cell(*words, capacity=16)
    cell.write(b"whole")
    signals.store_release_64(words[0] + 8, 2**63)
    assert cell.read() is None


def test_a_reader_beside_a_writing_process_sees_whole_messages_in_order(page: Path) -> None:
    """Each message is one byte repeated a number of times that the byte gives away."""
    code = f"""
cell, go = Cell(start + {CELL_AT}, memory, {CAPACITY}), Bell(start, memory)
go.ring()
for number in range(1, 100_001):
    cell.write(bytes([number % 251]) * (number % 251 * 3))
"""
    address, memory = mapped(page)
    cell, go = Cell(address + CELL_AT, memory, CAPACITY), Bell(address, memory)
    last = reads = 0
    with other_process(page, code) as process:
        assert go.wait(0, PATIENCE) == 1
        while last < 100_000 and (process.poll() is None or reads == 0 or cell.read() is not None):
            if (found := cell.read()) is None:
                continue
            number, message = found
            assert message == bytes([number % 251]) * (number % 251 * 3)
            assert number >= last
            last, reads = number, reads + 1
        assert process.wait(PATIENCE) == 0
    assert last == 100_000
