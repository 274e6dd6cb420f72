"""Other owners for a run that goes on: requests, which are files in its folder that its supervisor takes, and how many
it should have, decided from what its last steps measured. No processes, no clock.

[Note: when more owners help] Ranks wait for an update as far as it takes longer than what hides it: the next forward
and the loop's own work. N' owners take N / N' of the time of N if each brings memory bandwidth of its own; those that
share a host's memory may take as long as before. So a growth is a prediction that the next windows confirm or refute:
if it has not made updates faster, it is taken back, and not tried again.

[Note: no flapping] Medians of several windows count, after a change only those that follow it. It grows above the
target and shrinks below half of it, and only as far as owners would still be idle most of a step. A number that was
once too few is left alone for a while, twice as long each time.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import median

from pydantic import ConfigDict, Field

from rayzero.config import ConfigModel, Processes
from rayzero.config.zero import Placement
from rayzero.errors import ConfigError
from rayzero.files import replace_file
from rayzero.quantities import count
from rayzero.records import Several, load_record

log = logging.getLogger(__name__)

_FILES = "scale-*.json"
_MOST = 1 << 16  # bytes


class ScaleRequest(ConfigModel):
    """What is asked for."""

    model_config = ConfigDict(extra="ignore")

    num_optimizers: Processes
    """Optimizer actors that the run is to have."""

    avoid: Several[str] = ()
    """Nodes that no optimizer with shards is to be on, by id or address."""

    placement: Placement | None = None
    """Where all of them are to be from now on; None: as before."""

    id: str = Field(default_factory=lambda: secrets.token_hex(8))
    """Names the request in the run's record."""


def ask(run_dir: Path, request: ScaleRequest) -> None:
    """Leave a request. Raises OSError."""
    replace_file(_file(run_dir, request), request.model_dump_json())


def withdraw(run_dir: Path, request: ScaleRequest) -> bool:
    """Take a request back. False: it has been taken. Raises OSError."""
    try:
        _file(run_dir, request).unlink()
    except FileNotFoundError:
        return False
    return True


def _file(run_dir: Path, request: ScaleRequest) -> Path:
    return run_dir / _FILES.replace("*", request.id)


def take(run_dir: Path) -> list[ScaleRequest]:
    """Take the requests that were left, the newest last: that one counts, and who asked for an earlier one waits to
    hear so. One that cannot be read is set aside, with a warning."""
    found = []
    for path in run_dir.glob(_FILES):
        with suppress(FileNotFoundError):
            asked_at = path.stat().st_mtime_ns
            if (request := _take(path)) is not None:
                found.append((asked_at, request))
    return [request for _, request in sorted(found, key=itemgetter(0))]


def _take(path: Path) -> ScaleRequest | None:
    try:
        request = load_record(path, ScaleRequest, "a request for other optimizers", "ask again", at_most=_MOST)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        aside = path.with_suffix(".unreadable")
        log.warning("a request is set aside as %s: %s", aside.name, error)
        with suppress(OSError):
            path.rename(aside)
        return None
    with suppress(OSError):
        path.unlink()
    return request


_WINDOWS = 5  # whose medians count
_FASTER = 0.9  # of the time before: a growth that leaves more than this has not helped
_IDLE = 0.25  # of a step: owners that update for longer may not be made fewer; a forward, which hides them, is a third
_FIRST_PAUSE = 20  # windows for which a number that was too few is left alone
_LONGEST_PAUSE = 640


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a run may have, as ``ScalingConfig`` has checked."""

    fewest: int
    most: int
    target_exposed: float  # the largest share of a step that ranks should wait for updates


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """Seconds a step, over the steps of one window."""

    step_s: float
    exposed_s: float  # in which the rank that waited longest waited for updates that were not published yet
    busy_s: float  # in which the owner that took longest updated

    @property
    def exposed(self) -> float:
        return self.exposed_s / self.step_s


@dataclass(frozen=True, slots=True)
class Resize:
    """The number of owners that the run should have instead, and why."""

    owners: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the policy remembers."""

    windows: tuple[StepWindow, ...] = ()  # the last ones with the present number of owners
    # the owners before a growth that is not judged yet, and their medians
    grew_from: tuple[int, StepWindow] | None = None
    too_few: int = 0  # so many were, or would have been
    pause: int = 0  # windows until so few, or fewer, may be tried again
    next_pause: int = _FIRST_PAUSE
    most: int | None = None  # more than so many were no faster


def look(history: History, bounds: Bounds, owners: int, window: StepWindow) -> tuple[History, Resize | None]:
    """Take in one more window of a run with ``owners``. Returns what to remember, and the change to make, if any."""
    windows = (*history.windows, window)[-_WINDOWS:]
    history = replace(history, windows=windows, pause=max(0, history.pause - 1))
    if len(windows) < _WINDOWS:
        return history, None
    typical = _medians(windows)
    if history.grew_from is not None:
        before, then = history.grew_from
        history = replace(history, grew_from=None)
        if typical.busy_s > _FASTER * then.busy_s and typical.exposed_s > _FASTER * then.exposed_s:
            return replace(history, windows=(), most=before), Resize(before, _no_help(owners, before, typical, then))
    most = bounds.most if history.most is None else min(bounds.most, history.most)
    if typical.exposed > bounds.target_exposed and owners < most:
        return _grow(history, bounds, owners, typical, min(most, 2 * owners))
    if typical.exposed <= bounds.target_exposed / 2:
        return _shrink(history, bounds, owners, typical)
    return history, None


def given_up(history: History, owners: int) -> History:
    """A change that was decided could not be made: go on with ``owners``, and ask for no more."""
    return replace(history, windows=(), grew_from=None, most=owners)


def _grow(history: History, bounds: Bounds, owners: int, now: StepWindow, most: int) -> tuple[History, Resize]:
    wanted = min(most, max(owners + 1, enough(owners, now, bounds.target_exposed)))
    after = replace(
        history,
        windows=(),
        grew_from=(owners, now),
        too_few=wanted - 1,  # tried or predicted
        pause=history.next_pause,
        next_pause=min(_LONGEST_PAUSE, 2 * history.next_pause),
    )
    target = f"{100 * bounds.target_exposed:.3g}%"
    why = f"ranks wait {now.exposed:.0%} of a step for updates, above the target of {target}"
    return after, Resize(wanted, why)


def enough(owners: int, now: StepWindow, target: float) -> int:
    """The fewest owners with which ranks would wait for ``target`` of a step at most. [Note: when more owners help]"""
    hidden = max(0.0, now.busy_s - now.exposed_s)
    allowed = target / (1 - target) * (now.step_s - now.exposed_s)  # of a step that has only this wait
    return math.ceil(owners * now.busy_s / (hidden + allowed) - 1e-9)


def _shrink(history: History, bounds: Bounds, owners: int, now: StepWindow) -> tuple[History, Resize | None]:
    fewest = bounds.fewest if not history.pause else max(bounds.fewest, history.too_few + 1)
    wanted = max(fewest, math.ceil(owners * now.busy_s / (_IDLE * (now.step_s - now.exposed_s)) - 1e-9))
    if wanted >= owners:
        return history, None
    why = f"owners update for {now.busy_s / now.step_s:.0%} of a step, and ranks wait for {now.exposed:.1%} of it"
    return replace(history, windows=()), Resize(wanted, why)


def _no_help(owners: int, before: int, now: StepWindow, then: StepWindow) -> str:
    return (
        f"{count(owners, 'owner')} update for {now.busy_s:.3g} s a step, {before} did for {then.busy_s:.3g} s: they "
        "share what limits them, such as the memory of one host"
    )


def _medians(windows: Sequence[StepWindow]) -> StepWindow:
    return StepWindow(
        step_s=median(each.step_s for each in windows),
        exposed_s=median(each.exposed_s for each in windows),
        busy_s=median(each.busy_s for each in windows),
    )
