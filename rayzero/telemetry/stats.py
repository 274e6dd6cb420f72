"""What one rank, or several together, measured of a prepared model: plain values that merge, travel and print; and the
sums that grow where something happens.

``rayzero.stats`` (engine/stats.py) reads an engine. A value that was not or cannot be measured is None.

[Note: clocks] All seconds are the host's. On CUDA the device runs behind the host, so passes and layers show what
issuing their kernels took, and the device's time appears where the host waits for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

from rayzero.errors import ConfigError
from rayzero.quantities import count, format_bytes


def _together(a: Any, b: Any) -> Any:
    """Two ranks' values of a field as one: numbers add up, texts agree or are "mixed"; None is not there."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, str):
        return a if a == b else "mixed"
    if isinstance(a, Mapping):
        return {name: _together(a.get(name), b.get(name)) for name in {**a, **b}}
    return a + b if isinstance(a, int | float) else a.merged(b)


@dataclass(frozen=True, slots=True)
class Merged:
    """A value of one rank that merges with those of others, field by field."""

    LARGEST: ClassVar[frozenset[str]] = frozenset()  # fields of which the largest value counts; others add up
    SMALLEST: ClassVar[frozenset[str]] = frozenset()

    def merged(self, *others: Self) -> Self:
        """All of them together; associative. Raises ConfigError for anything of another class."""
        result = self
        for other in others:
            if not isinstance(other, type(self)):
                name = type(self).__name__
                raise ConfigError(f"merged() takes {name}, one argument each, got {type(other).__name__}")
            result = type(self)(**{one.name: result._joined(other, one.name) for one in fields(self)})
        return result

    def _joined(self, other: Self, name: str) -> Any:
        a, b = getattr(self, name), getattr(other, name)
        pick = max if name in self.LARGEST else min if name in self.SMALLEST else _together
        return _together(a, b) if a is None or b is None else pick(a, b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations(Merged):
    """Seconds of ``count`` events. ``shortest`` and ``longest`` are None while there was none."""

    LARGEST, SMALLEST = frozenset({"longest"}), frozenset({"shortest"})

    count: int = 0
    total: float = 0.0
    shortest: float | None = None
    longest: float | None = None

    @property
    def mean(self) -> float | None:
        """Seconds of one event on average; None while there was none."""
        return self.total / self.count if self.count else None


class Tally:
    """Adds up durations. One thread adds; any may read, and then sees an event that is just added in part."""

    __slots__ = ("_count", "_longest", "_shortest", "_total")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._count, self._total = 0, 0.0
        self._shortest, self._longest = float("inf"), 0.0

    def add(self, seconds: float) -> None:
        self._count += 1
        self._total += seconds
        if seconds < self._shortest:
            self._shortest = seconds
        if seconds > self._longest:
            self._longest = seconds

    @property
    def value(self) -> Durations:
        if not self._count:
            return Durations()
        return Durations(count=self._count, total=self._total, shortest=self._shortest, longest=self._longest)


class CopyTally:
    """Adds up copies of bytes in one direction. Any thread adds or reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        with self._lock:
            self._copies = self._bytes = self._timed = 0
            self._seconds, self._peak = 0.0, 0.0

    def add(self, nbytes: int, seconds: float | None) -> None:
        """One copy has ended. ``seconds``: None if its time is not known, as when a device makes it."""
        with self._lock:
            self._copies += 1
            self._bytes += nbytes
            if seconds is not None and seconds > 0:
                self._timed += nbytes
                self._seconds += seconds
                self._peak = max(self._peak, nbytes / seconds)

    @property
    def value(self) -> Copies:
        with self._lock:
            return Copies(
                count=self._copies,
                bytes=self._bytes,
                timed_bytes=self._timed,
                seconds=self._seconds,
                peak=self._peak if self._timed else None,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies(Merged):
    """Copies in one direction. Those that run at the same time each count their own seconds."""

    LARGEST = frozenset({"peak"})

    count: int = 0
    bytes: int = 0
    timed_bytes: int = 0  # of the copies whose seconds are known
    seconds: float = 0.0
    peak: float | None = None  # bytes per second of the fastest one

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of one copy on average; None if none was timed."""
        return self.timed_bytes / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStats(Merged):
    """One unit's passes, without waits and without the units inside it. [Note: clocks]"""

    forward: Durations = field(default_factory=Durations)
    backward: Durations = field(default_factory=Durations)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats(Merged):
    """Tokens of finished steps, as the loop counts them (``rayzero.count_tokens``). Rates of ranks add up."""

    LARGEST = frozenset({"peak"})

    tokens: int = 0
    tokens_per_second: float | None = None  # all tokens over the seconds of the steps that had some
    average: float | None = None  # moving: a new step counts a tenth
    peak: float | None = None  # of one rank's fastest step


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStats(Merged):
    """One direction between a rank and the owners. On CUDA fetches are not timed: the device makes their last copy."""

    LARGEST = frozenset({"limit"})

    copies: Copies = field(default_factory=Copies)  # of units: parameters that were then used, gradients
    sent_bytes: int = 0  # all payload, as it travelled
    original_bytes: int = 0  # the same before wire compression
    limit: float | None = None  # bytes per second that the link was measured to carry

    @property
    def limit_share(self) -> float | None:
        """Bandwidth of the copies over the link's measured limit; None if either was not measured."""
        bandwidth = self.copies.bandwidth
        return None if bandwidth is None or not self.limit else bandwidth / self.limit

    @property
    def stored_ratio(self) -> float | None:
        """Bytes that travelled over original bytes: 0.5 for fp32 as bf16; None if none travelled."""
        return self.sent_bytes / self.original_bytes if self.original_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchStats(Merged):
    """The prefetch: what it does now, and what became of its requests."""

    LARGEST = frozenset({"depth", "limit"})

    depth: int = 0  # units asked for ahead of the one in use
    limit: int = 0  # prefetch_buffer_size; 0: nothing is prefetched
    queued: int = 0  # units asked for whose version is not published yet
    in_flight: int = 0  # units whose bytes are on their way
    ready: int = 0  # units that are there and wait for their use
    pending_bytes: int = 0  # of all three
    hits: int = 0  # uses of units whose bytes were there
    late: int = 0  # uses of units on their way
    misses: int = 0  # uses of units that nobody had asked for
    wasted: int = 0  # units that came and were dropped before a use
    cancelled: int = 0  # units dropped on their way
    late_seconds: float = 0.0  # waited for units that were late

    @property
    def hit_ratio(self) -> float | None:
        """Hits over uses of units that were not up; None if there was none."""
        uses = self.hits + self.late + self.misses
        return self.hits / uses if uses else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats(Merged):
    """Parameters (elements) and bytes by tier: the rank's device, the rank's host memory, the owners.

    Bytes are the rank's, of all models it has prepared. Of several ranks, device and host add up; limits and peaks are
    those of the fullest rank, and the owners' bytes count once."""

    LARGEST = frozenset(
        {"parameters", "owner_bytes", "owner_original_bytes", "gathered_limit", "gathered_peak"}
    ) | frozenset({"device_used", "device_peak", "host_used", "host_peak"})

    parameters: int = 0  # of the model; the owners have all of them
    device_parameters: int = 0  # gathered now
    device_bytes: int = 0  # buffers for gathered parameters, on a CPU rank in host memory
    host_parameters: int = 0  # of units that the user wrote and that are not gathered
    host_bytes: int = 0  # staging, gradients, and those units
    owner_bytes: int | None = None  # masters, states, published parameters; None if owners are in other processes
    owner_original_bytes: int | None = None  # of the same, if nothing were encoded
    gathered_limit: int = 0  # bytes: gpu_param_memory_budget
    gathered_peak: int = 0  # the most bytes of it in use
    device_used: int | None = None  # CUDA: torch's allocated bytes
    device_peak: int | None = None  # CUDA: the most of them in the process's life
    host_used: int | None = None  # resident bytes of the process
    host_peak: int | None = None  # the most of them in the process's life

    @property
    def kept_ratio(self) -> float | None:
        """Bytes that owners keep over original bytes: 0.51 with moments="int8"; None of owners in other processes."""
        return self.owner_bytes / self.owner_original_bytes if self.owner_bytes and self.owner_original_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed(Merged):
    """What one kind of action gave back: bytes by the measure that the action changes (engine/engine_memory.py)."""

    count: int = 0
    bytes: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceStats(Merged):
    """How full one resource was, 0 to 1. Of several ranks, the fullest one's."""

    LARGEST = frozenset({"now", "peak"})

    now: float | None = None  # at the last reading
    peak: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyStats(Merged):
    """Memory pressure, and what was done about it. Pressures are those of the rank under the most."""

    LARGEST = frozenset({"threshold", "pressure", "pressure_peak", "depth_allowed"}) | frozenset(
        {"stalled_some", "stalled_full", "residency_given_up"}
    )

    strategy: str = ""
    threshold: float = 0.0  # pressure above which the prefetch gets shorter
    pressure: float | None = None  # of the fullest resource at the last reading
    fullest: str = ""  # that resource: a key of ``resources``
    resources: Mapping[str, ResourceStats] = field(default_factory=dict)  # by memory/pressure.py's names
    stalled_some: float | None = None  # share of the last 10 s in which a process waited for memory (the kernel's PSI)
    stalled_full: float | None = None  # in which all waited
    readings: int = 0
    pressure_peak: float | None = None
    pressure_sum: float = 0.0  # over readings
    reading_seconds: float = 0.0  # that they took
    changes: int = 0  # of what follows, depths aside: one log line each
    collecting: int = 0  # ranks that collect garbage and give freed memory back
    depth_allowed: int = 0  # units ahead that pressure leaves of prefetch_buffer_size
    residency_given_up: float = 0.0  # share of gpu_param_memory_budget that gathered units no longer use
    offloading_all: int = 0  # ranks whose offload_activations send all activations, not only their fraction
    evictions: int = 0  # units resharded because others needed their room
    freed: Mapping[str, Freed] = field(default_factory=dict)  # by action

    @property
    def mean_pressure(self) -> float | None:
        """Of all readings; None if there was none."""
        return self.pressure_sum / self.readings if self.readings else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(Merged):
    """What was measured of a prepared model since ``prepare()`` or the last reset. ``str()`` is a table for people."""

    LARGEST = frozenset({"version"})

    ranks: int = 1
    seconds: float = 0.0  # since then, of all ranks; the phases add up to it
    version: int = 0  # steps committed, those before a resume included
    forwards: int = 0  # of the whole model, evaluations included
    backwards: int = 0
    steps: Durations = field(default_factory=Durations)  # from the end of one step() to the end of the next
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds by phase (telemetry/names.py)
    waits: Mapping[str, Durations] = field(default_factory=dict)  # when this rank stood still, by cause
    layers: Mapping[str, LayerStats] = field(default_factory=dict)  # by unit
    tokens: TokenStats = field(default_factory=TokenStats)
    to_device: LinkStats = field(default_factory=LinkStats)  # parameters, owners to rank
    to_host: LinkStats = field(default_factory=LinkStats)  # gradients, rank to owners
    prefetch: PrefetchStats = field(default_factory=PrefetchStats)
    update_seconds: float = 0.0  # from steps' commits to their last published weights
    exposed_seconds: float = 0.0  # of these, what the rank waited
    memory: MemoryStats = field(default_factory=MemoryStats)
    strategy: StrategyStats = field(default_factory=StrategyStats)

    @property
    def overlap_ratio(self) -> float | None:
        """The part of the updates that ran beside the rank's work; None before the second step."""
        return 1 - self.exposed_seconds / self.update_seconds if self.update_seconds else None

    def to_json(self) -> dict[str, Any]:
        """The fields as a dict of plain values, for ``json.dumps``; ratios and means follow from them."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Stats:
        """The inverse of ``to_json``. Raises ConfigError for anything else."""
        from rayzero.records import parse_record  # pydantic: a coordinator reads no stats

        try:
            return parse_record(json.dumps(found), cls, extra="forbid")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Stats.from_json() takes the dict that to_json() returned: {error}") from error

    def __str__(self) -> str:
        return "\n".join(_lines(self))


# ---- for people -------------------------------------------------------------------------------------------------


def _lines(stats: Stats) -> list[str]:
    steps, tokens, prefetch, memory = stats.steps, stats.tokens, stats.prefetch, stats.memory
    lines = [
        f"{count(stats.ranks, 'rank')}, version {stats.version}, {_s(stats.seconds)}: "
        f"{count(stats.forwards, 'forward')}, {count(stats.backwards, 'backward')}, {count(steps.count, 'step')}",
        f"step       mean {_s(steps.mean)}, {_s(steps.shortest)} to {_s(steps.longest)}",
        "phases     " + ", ".join(f"{name} {_s(seconds)}" for name, seconds in stats.phases.items() if seconds),
        "waits      " + ", ".join(f"{cause} {_s(w.total)} ({w.count})" for cause, w in stats.waits.items() if w.count),
        f"tokens     {tokens.tokens:,}, {_rate(tokens.tokens_per_second)}, moving {_rate(tokens.average)}, "
        f"peak {_rate(tokens.peak)}",
        f"to device  {_link(stats.to_device)}",
        f"to host    {_link(stats.to_host)}",
        f"prefetch   depth {prefetch.depth} of {prefetch.limit}; {prefetch.queued} queued, {prefetch.in_flight} in "
        f"flight, {prefetch.ready} ready; {prefetch.hits} hits, {prefetch.late} late ({_s(prefetch.late_seconds)}), "
        f"{prefetch.misses} misses, {prefetch.wasted} wasted, {prefetch.cancelled} cancelled",
        f"updates    {_share(stats.overlap_ratio)} beside the rank's work",
        f"memory     {memory.device_parameters:,} of {memory.parameters:,} parameters gathered, buffers "
        f"{format_bytes(memory.device_bytes)}; host {format_bytes(memory.host_bytes)}; owners "
        f"{_bytes(memory.owner_bytes)} ({_share(memory.kept_ratio)} of unencoded)",
        f"           gathered at most {format_bytes(memory.gathered_peak)} of {format_bytes(memory.gathered_limit)}; "
        f"device peak {_bytes(memory.device_peak)}, process peak {_bytes(memory.host_peak)}",
        f"pressure   {_share(stats.strategy.pressure)}, peak {_share(stats.strategy.pressure_peak)} "
        f"({stats.strategy.strategy}, from {stats.strategy.threshold:.0%}); {stats.strategy.evictions} evictions",
        "           " + ", ".join(f"{name} {_share(one.now)}" for name, one in stats.strategy.resources.items()),
    ]
    lines += [
        f"freed      {name}: {_bytes(one.bytes)} in {_s(one.seconds)} ({one.count})"
        for name, one in stats.strategy.freed.items()
    ]
    return lines + _layer_lines(stats.layers)


def _layer_lines(layers: Mapping[str, LayerStats]) -> list[str]:
    if not layers:
        return []
    width = max(len(name) for name in layers)
    head = f"{'layer':<{width}}" + "".join(f"  {name:>10}" for name in ("forwards", "mean", "min", "max"))
    head += "".join(f"  {name:>10}" for name in ("backwards", "mean", "min", "max"))
    return ["", head] + [
        f"{name:<{width}}{_durations(layer.forward)}{_durations(layer.backward)}" for name, layer in layers.items()
    ]


def _durations(found: Durations) -> str:
    return f"  {found.count:>10}" + "".join(f"  {_s(one):>10}" for one in (found.mean, found.shortest, found.longest))


def _link(link: LinkStats) -> str:
    share = "" if link.limit_share is None else f", {link.limit_share:.0%} of the link"
    return (
        f"{count(link.copies.count, 'unit')}, {format_bytes(link.copies.bytes)} at {_speed(link.copies.bandwidth)}, "
        f"peak {_speed(link.copies.peak)}{share}; sent {format_bytes(link.sent_bytes)}"
    )


def _bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def _s(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} tokens/s"


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.3g} GB/s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
