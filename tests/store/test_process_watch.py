"""The death of a process, noticed from the process itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rayzero.concurrency.event_loop import shared_loop
from rayzero.concurrency.processes import ProcessIdentity, this_process, watch_process
from store.toy import WAIT
from tests.support.leftovers import files_left, open_files

IDENTIFY = "from rayzero.concurrency.processes import this_process as p; t = p(); print(t.kernel, t.pid, t.started)"


@contextmanager
def another() -> Iterator[tuple[subprocess.Popen[str], ProcessIdentity]]:
    program = IDENTIFY + "; import sys; sys.stdout.flush(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        kernel, pid, started = process.stdout.readline().split()
        try:
            yield process, ProcessIdentity(kernel, int(pid), int(started))
        finally:
            process.kill()


def test_a_death_is_told_once_and_at_once() -> None:
    died = threading.Semaphore(0)
    with another() as (process, identity):
        assert identity.kernel == this_process().kernel
        end = watch_process(identity, died.release)
        assert end is not None
        assert not died.acquire(timeout=0.2)
        process.send_signal(signal.SIGKILL)
        assert died.acquire(timeout=WAIT)
        end()
        assert not died.acquire(timeout=0.2)


def test_a_process_that_is_dead_already_is_told_too() -> None:
    died = threading.Event()
    with another() as (process, identity):
        process.kill()
        process.wait()
        assert watch_process(identity, died.set) is not None
        assert died.wait(WAIT)


def test_another_process_with_the_pid_of_a_dead_one_is_not_taken_for_it() -> None:
    died = threading.Event()
    with another() as (_, identity):
        watch_process(replace(identity, started=identity.started - 1), died.set)
        assert died.wait(WAIT)


def test_a_watch_that_ends_tells_nothing_and_keeps_no_file() -> None:
    died = threading.Event()
    shared_loop()
    with another() as (process, identity):
        before = open_files()
        ends = [watch_process(identity, died.set) for _ in range(20)]
        for end in ends:
            assert end is not None
            end()
            end()
        assert files_left(before) == 0
        process.kill()
        process.wait()
        assert not died.wait(0.2)


@pytest.mark.parametrize("kernel", ["", "another boot:pid:[1]"])
def test_a_process_of_another_kernel_cannot_be_watched(kernel: str) -> None:
    assert watch_process(ProcessIdentity(kernel, 1, 1), lambda: None) is None


def test_a_process_never_hears_of_its_own_death() -> None:
    before = open_files()
    assert watch_process(this_process(), lambda: None) is not None
    assert files_left(before) == 0
