"""Programs of tests in processes of their own, forked with torch and RayZero loaded: 0.05 CPU seconds in place of 3."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO


class Forked:
    """A running program, with the part of Popen's interface that tests use."""

    def __init__(self, process: BaseProcess, stdin: IO[str], stdout: IO[str]) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid
        self.stdin, self.stdout = stdin, stdout

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self._process.kill()

    def poll(self) -> int | None:
        """Its exit status, minus the signal that killed it, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise TimeoutError(f"process {self.pid} runs after {timeout} s")
        return status

    def say(self, *words: str) -> None:
        """Give it a line."""
        print(*words, file=self.stdin, flush=True)

    def said(self) -> str:
        """The next line that it prints; an empty one after its end."""
        return self.stdout.readline().strip()


@contextmanager
def forked(program: str, *arguments: object, quiet: bool = False) -> Iterator[Forked]:
    """A process that runs a program, with ``arguments`` in ``sys.argv`` from 1 on, and talks through pipes. It is
    killed in the end. ``quiet``: what it says on its standard error is dropped."""
    from rayzero.testing.rank_processes import PRELOADED  # not above: it imports torch

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # takes effect unless there is a server, which has imported them, too
    their_stdin, stdin = context.Pipe(duplex=False)
    stdout, their_stdout = context.Pipe(duplex=False)
    texts = [str(argument) for argument in arguments]
    process = context.Process(
        target=_run, args=(textwrap.dedent(program), texts, dict(os.environ), their_stdin, their_stdout, quiet)
    )
    process.start()
    their_stdin.close()
    their_stdout.close()
    with os.fdopen(_taken(stdin), "w", buffering=1) as into, os.fdopen(_taken(stdout)) as out:
        running = Forked(process, into, out)
        try:
            yield running
        finally:
            process.kill()
            process.join()


def _taken(pipe: Connection) -> int:
    """A pipe's file descriptor, which the caller closes from now on."""
    number = os.dup(pipe.fileno())
    pipe.close()
    return number


def _run(
    program: str, arguments: list[str], environment: dict[str, str], stdin: Connection, stdout: Connection, quiet: bool
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server's children ignore it
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    for pipe in (stdin, stdout):
        pipe.close()
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdin, sys.stdout, sys.argv = open(0), open(1, "w"), ["-c", *arguments]  # noqa: SIM115 - until the end
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        exec(compile(program, "<program of a test>", "exec"), {"__name__": "__main__"})
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
