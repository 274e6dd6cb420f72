"""One case of a sweep, in a forked process of its own: what it raises, fills or leaves behind ends with it."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

SAME = "same"  # equal bits
ROUNDING = "rounding"  # differs by rounding, by no more than `why` says
REFUSED = "refused"  # by name, with an error of rayzero.errors, before a value was wrong
NOT_TRIED = "not tried"  # plain PyTorch cannot train it here either
WRONG = "wrong"  # other weights without a word, or an error that does not name the reason

OUTCOMES = (SAME, ROUNDING, REFUSED, NOT_TRIED, WRONG)


@dataclass(frozen=True)
class Outcome:
    """What came of a case: one of `OUTCOMES`, and why in one line."""

    kind: str
    why: str = ""


@dataclass(frozen=True)
class Case:
    """One thing to try. `run` imports what it needs and returns the outcome; what it raises counts as `WRONG`."""

    name: str
    run: Callable[[], Outcome]


def outcome_of(case: Case, *, seconds: float = 180.0) -> Outcome:
    """Run a case in a forked process and return what came of it. A process that dies, or takes longer than `seconds`,
    is `WRONG`, too."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(case, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return Outcome(WRONG, f"did not end within {seconds:.0f} s")
        found: Outcome = ours.recv()
        return found
    except EOFError:
        process.join()
        return Outcome(WRONG, f"its process ended with code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _run(case: Case, results: Connection) -> None:
    try:
        outcome = case.run()
    except BaseException as exc:
        traceback.print_exc()
        outcome = Outcome(WRONG, f"{type(exc).__name__}: {exc}")
    results.send(outcome)
