"""What the live page shows, as values for JSON: made from a scrape's picture and from what the coordinator knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rayzero.telemetry.metric import Role
from rayzero.telemetry.names import MEMORY_BYTES
from rayzero.telemetry.picture import PHASES, Picture
from rayzero.telemetry.scrape import Scrape

_TIERS = ("gpu", "pinned", "shm", "ram")


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened to the run."""

    time: float  # seconds since 1970
    text: str
    bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the coordinator knows without asking anybody."""

    run: str
    state: str
    started_at: float  # seconds since 1970
    hosts: Mapping[str, str]  # process -> its host
    events: Sequence[RunEvent] = ()  # oldest first


def described(
    known: Known,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    picture: Picture | None,
    memory: Mapping[str, Mapping[str, float]],
    now: float,
) -> dict[str, Any]:
    """The page's values. ``picture``: None: no process has been scraped yet."""
    return {
        "run": known.run,
        "state": known.state,
        "at": now,
        "started_at": known.started_at,
        "curves": {name: [list(point) for point in points] for name, points in curves.items()},
        "events": [asdict(event) for event in reversed(known.events)],
        "now": None if picture is None else _numbers(picture),
        "phases": [] if picture is None else _shares(picture),
        "memory": {tier: dict(kinds) for tier, kinds in memory.items()},
        "bars": []
        if picture is None
        else [asdict(bar) for bar in picture.bars if bar.what.endswith(("memory", "gpu"))],
        "ranks": [] if picture is None else [_hosted(asdict(rank), known) for rank in picture.ranks],
        "owners": [] if picture is None else [_hosted(asdict(owner), known) for owner in picture.owners],
        "trouble": [] if picture is None else _trouble(picture),
    }


def _numbers(picture: Picture) -> dict[str, Any]:
    waited = [sum(rank.waits.values()) / rank.step_seconds for rank in picture.ranks if rank.step_seconds]
    return {
        "step": picture.step,
        "loss": picture.loss,
        "tokens_per_second": picture.tokens_per_second,
        "step_seconds": picture.step_seconds,
        "eta_seconds": picture.eta_seconds,
        "since_step": picture.since_step,
        "waiting": max(waited, default=None),  # share of a step, of the rank that waits most
        "span": picture.span,
        "reported": picture.reported,
    }


def _shares(picture: Picture) -> list[dict[str, Any]]:
    """The phases of a step that take time, in their order."""
    total = sum(picture.phases.values())
    found = [(phase, picture.phases.get(phase, 0.0)) for phase in PHASES]
    return [{"phase": phase, "seconds": s, "share": s / total} for phase, s in found if s > 0]


def _hosted(row: dict[str, Any], known: Known) -> dict[str, Any]:
    return row | {"host": known.hosts.get(row["who"].removeprefix("beside "))}


def _trouble(picture: Picture) -> list[str]:
    late = [f"{who} has sent no heartbeat for {age:.0f} s" for who, age in sorted(picture.late.items())]
    return late + [f"{who} does not answer: {why}" for who, why in sorted(picture.silent.items())]


def memory_by_tier(scraped: Scrape) -> dict[str, dict[str, float]]:
    """Bytes of the ranks' and owners' processes, by tier and purpose; tiers without any are left out."""
    tiers: dict[str, dict[str, float]] = {tier: {} for tier in _TIERS}
    for one in scraped.processes:
        if one.series is None or one.target.role is Role.COORDINATOR:
            continue
        for (name, labels), size in one.series.values.items():
            of = dict(labels)
            if name == MEMORY_BYTES.name and size > 0:
                kinds = tiers.setdefault(of["tier"], {})
                kinds[of["kind"]] = kinds.get(of["kind"], 0.0) + size
    return {tier: kinds for tier, kinds in tiers.items() if kinds}
