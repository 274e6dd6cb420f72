"""Decides how a run ends: when it is done, which failure is the cause, what the error says. Ctrl-C and SIGTERM. No Ray.

Processes fail together: a rank that raises makes the others' finish fail, a killed owner makes every rank's fetch fail.
[Note: cause and consequence] Errors that say "a peer is gone" are *consequences*. They are held back for a short while,
so that the failure that caused them can arrive and be named instead. Any other failure ends the run at once.

[Note: Ray's exit code] If a signal comes while Ray waits (``ray.get``, ``ray.wait``), our handler raises inside Ray,
and Ray raises its own SystemExit instead, with code 1 and without ours as its cause. So a block remembers the signal
that it raised for, and ends with that signal's exception.
"""

from __future__ import annotations

import math
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from types import FrameType
from typing import NoReturn

from rayzero.errors import (
    AccumulationError,
    HandshakeError,
    RunFailedError,
    StateLostError,
    StepMismatchError,
    StoreError,
)
from rayzero.telemetry.recorder import Measurements

SETTLE_S = 3.0  # how long a consequence waits for its cause: Ray reports a dead process within a second

_CAUSES = (
    HandshakeError,
    StepMismatchError,
    AccumulationError,
    StateLostError,
)  # store errors that no other failure causes


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong in one process; always picklable, even if the error is not."""

    who: str  # "rank 1", "optimizer 0", "coordinator"
    what: str  # "raised ValueError: boom", "died: ..."
    traceback: str = ""  # of the process that failed; empty when it died
    error: bytes | None = None  # the pickled exception; None if it cannot be pickled
    consequence: bool = False  # it says that another process is gone
    restarts: bool = False  # a process was lost, or what only it knew: the run may start again from a checkpoint

    def exception(self) -> BaseException | None:
        """The original exception; None if this process cannot rebuild it."""
        if self.error is None:
            return None
        try:
            rebuilt = pickle.loads(self.error)
        except Exception:  # a user's exception class may do anything here; its text is reported all the same
            return None
        return rebuilt if isinstance(rebuilt, BaseException) else None


def failure_of(who: str, error: BaseException, traceback_text: str | None = None) -> Failure:
    """Describe an exception, with ``traceback_text`` or else its own traceback."""
    return Failure(
        who=who,
        what=f"raised {_one_line(error)}",
        traceback=traceback_text or "".join(traceback.format_exception(error)),
        error=_pickled(error),
        consequence=isinstance(error, StoreError) and not isinstance(error, _CAUSES),
        restarts=isinstance(error, StateLostError),
    )


def death_of(who: str, pid: int | None, detail: str) -> Failure:
    """Describe a process that ended without an exception, as its host reports it."""
    process = f"its process (pid {pid})" if pid else "its process"
    return Failure(who=who, what=f"died: {process} ended unexpectedly. {detail}".strip(), restarts=True)


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _pickled(error: BaseException) -> bytes | None:
    """Bytes from which an equal exception can be made; None when its class cannot do that."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # a user's exception class may do anything here
        return None
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """How one rank's training loop ended."""

    rank: int
    failure: Failure | None = None
    measured: Measurements = field(default_factory=Measurements)  # by its recorder


class OneCause:
    """Recognises deaths that have one cause: several processes of a host that die within a second of each other,
    because the host is lost or has no memory left. They are one failure.

    Knows names and times (callers pass them); not what a death means for the run."""

    def __init__(self, within_s: float = 1.0) -> None:
        self._within_s = within_s
        self._dead: dict[str, tuple[float, set[str]]] = {}  # by host: when the first of them died, and who has since

    def is_known(self, host: str, who: str, now_s: float) -> bool:
        """Whether what killed this process has just killed another one there. A process's second death is not."""
        began, dead = self._dead.get(host, (-self._within_s, set()))
        if now_s - began < self._within_s and who not in dead:
            dead.add(who)
            return True
        self._dead[host] = now_s, {who}
        return False


def is_lost(cause: Failure, *, after_a_death: bool) -> bool:
    """Whether a run that ended for this cause has lost what a checkpoint brings back. After a death that the run has
    outlived, also an error that says only that another process is gone, or makes no progress: what it waits for may
    have gone with the dead one."""
    return cause.restarts or (cause.consequence and after_a_death)


class Verdict(Enum):
    """The state that the Watch has decided on."""

    RUNNING = auto()
    FINISHED = auto()  # every rank's loop returned
    FAILED = auto()  # Watch.cause says why


class Watch:
    """Decides how a run ends, from the outcomes and failures of its processes.

    Knows who is still running and which failures were seen; not Ray, processes or clocks (callers pass the time)."""

    def __init__(self, num_ranks: int, *, settle_s: float = SETTLE_S) -> None:
        self._running = set(range(num_ranks))
        self._settle_s = settle_s
        self._failures: list[Failure] = []
        self._first_failure_s = 0.0

    def finished(self, outcome: RankOutcome, now_s: float) -> None:
        self._running.discard(outcome.rank)
        if outcome.failure is not None:
            self.failed(outcome.failure, now_s)

    def failed(self, failure: Failure, now_s: float) -> None:
        if not self._failures:
            self._first_failure_s = now_s
        self._failures.append(failure)

    def verdict(self, now_s: float) -> Verdict:
        if not self._failures:
            return Verdict.RUNNING if self._running else Verdict.FINISHED
        settled = now_s - self._first_failure_s >= self._settle_s
        return Verdict.FAILED if settled or not self.cause.consequence else Verdict.RUNNING

    def patience_s(self, now_s: float) -> float | None:
        """Seconds after which ``verdict`` may change by itself; None when it cannot."""
        return max(0.0, self._first_failure_s + self._settle_s - now_s) if self._failures else None

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(self._failures)

    @property
    def cause(self) -> Failure:
        """The failure to name: the first one that is not a consequence, else the first of all."""
        return next((failure for failure in self._failures if not failure.consequence), self._failures[0])

    @property
    def others(self) -> tuple[Failure, ...]:
        return tuple(failure for failure in self._failures if failure is not self.cause)


def run_failed(run: str, cause: Failure, others: Iterable[Failure] = ()) -> RunFailedError:
    """The error that ends a run: who, what, the traceback, and what else was seen; chained to the original."""
    lines = [f"run {run!r} failed: {cause.who} {cause.what}"]
    lines += [f"  then: {other.who} {other.what}" for other in others]
    if cause.traceback:
        lines.append(f"--- traceback of {cause.who} ---\n{cause.traceback.rstrip()}")
    error = RunFailedError("\n".join(lines))
    error.__cause__ = cause.exception()
    return error


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 0.5  # timeout(1) signals a process and then its whole group, so one stop brings two signals


@contextmanager
def interruptible() -> Iterator[None]:
    """A context in which SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143), in the main thread only. A
    second signal right after the first belongs to the same stop and is ignored: it would end the clean-up that the
    first began."""
    with _stops(0):
        yield


@contextmanager
def postponed() -> Iterator[None]:
    """The first signal waits for the end of the block and raises there, as in ``interruptible``. A later second one
    raises at once, in case the block hangs. An exception from the block replaces the signal's."""
    with _stops(1) as came:
        yield
    if came:
        _raise(came[0])


@contextmanager
def delayed() -> Iterator[None]:
    """A signal that comes in the block does at its end what it would have done at once. If the block raises, the signal
    is dropped."""
    came: list[int] = []
    with _handlers(dict.fromkeys(_SIGNALS, lambda number, frame: came.append(number))):
        yield
    for number in came:
        signal.raise_signal(number)


@contextmanager
def shielded() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM inside the block: for short clean-up that must not stop halfway."""
    with _handlers(dict.fromkeys(_SIGNALS, signal.SIG_IGN)):
        yield


@contextmanager
def _stops(waiting: int) -> Iterator[list[int]]:
    """Yields the signals that come in the block. Those after the first ``waiting`` raise there; one that comes right
    after another belongs to the same stop. If a signal ends the block, it is by the exception of the last one that
    raised; see [Note: Ray's exit code]. An exit without a signal is not changed."""
    came: list[int] = []
    last = -math.inf

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last >= _SAME_S:
            last = time.monotonic()
            came.append(signum)
            if len(came) > waiting:
                _raise(signum)

    with _handlers(dict.fromkeys(_SIGNALS, stop)):
        try:
            yield came
        except (KeyboardInterrupt, SystemExit) as error:
            if len(came) > waiting and _code(error) != 128 + came[-1]:
                _raise(came[-1])
            raise


def _code(error: KeyboardInterrupt | SystemExit) -> object:
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else error.code


def _raise(signum: int) -> NoReturn:
    raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)


@contextmanager
def _handlers(handlers: dict[signal.Signals, object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
