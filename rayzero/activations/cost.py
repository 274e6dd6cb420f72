"""Chooses by cost, per group, whether to keep, offload or recompute: measures groups during the run, plans from that.

The model (pure: measurements in, choices out): groups run forward one after another and backward in reverse.
An offloaded group leaves after its forward and comes back once the backward of the group ``prefetch`` places later has
begun; its own backward waits for it. Each direction of the link carries one group at a time. The backward of a
recomputed group takes its forward's time too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from rayzero.activations.group import Chunk, Group, GroupKey, OffloadPolicy
from rayzero.codecs import codec_for
from rayzero.lanes import Event, Lane, Span
from rayzero.lanes.lane import LinkSpeed

_CANDIDATES = 12  # groups that each decision tries, for offload and for recomputation


class Choice(Enum):
    """What happens to a group's saved tensors."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """The measurements of one group: seconds of computation, bytes of saved tensors."""

    nbytes: int  # on the device
    host_bytes: int  # on the link (fewer when compressed)
    forward_s: float
    backward_s: float
    can_recompute: bool = False
    input_bytes: int = 0  # stay on the device when it is recomputed


@dataclass(frozen=True, slots=True)
class CostPlan:
    """The choices in forward order, the device bytes that they hold at the end of the forward, and their cost."""

    choices: tuple[Choice, ...]
    held_bytes: int
    extra_s: float  # seconds more than keeping everything
    fits: bool  # into the budget


def held_bytes(groups: Sequence[GroupCost], choices: Sequence[Choice]) -> int:
    """The device bytes that the choices hold at the end of the forward."""
    kept = {Choice.KEEP: lambda group: group.nbytes, Choice.RECOMPUTE: lambda group: group.input_bytes}
    return sum(kept[choice](group) for group, choice in zip(groups, choices, strict=True) if choice in kept)


def extra_seconds(groups: Sequence[GroupCost], choices: Sequence[Choice], link: LinkSpeed, prefetch: int) -> float:
    """The seconds that forward and backward take beyond those of keeping everything."""
    left = _departures(groups, choices, link)
    now = sum(group.forward_s for group in groups)
    plain = now + sum(group.backward_s for group in groups)
    link_free = now
    returned: dict[int, float] = {}
    waiting = [index for index in reversed(range(len(groups))) if choices[index] is Choice.OFFLOAD]
    for index in reversed(range(len(groups))):
        while waiting and index - waiting[0] <= prefetch:
            coming = waiting.pop(0)
            link_free = max(link_free, now, left[coming]) + groups[coming].host_bytes / link.to_device
            returned[coming] = link_free
        now = max(now, returned.get(index, now))
        again = groups[index].forward_s if choices[index] is Choice.RECOMPUTE else 0.0
        now += groups[index].backward_s + again
    return now - plain


def choose(groups: Sequence[GroupCost], budget_bytes: int, link: LinkSpeed, prefetch: int = 1) -> CostPlan:
    """Choices that hold at most ``budget_bytes``: found greedily by the least time per byte, then improved one by one.

    If that is impossible, ``fits`` is False and no group is kept."""
    choices = [Choice.KEEP] * len(groups)
    while held_bytes(groups, choices) > budget_bytes:
        best = _cheapest(groups, choices, link, prefetch)
        if best is None:
            break
        choices[best[0]] = best[1]
    fits = held_bytes(groups, choices) <= budget_bytes
    if fits:
        _improve(groups, choices, budget_bytes, link, prefetch)
    return CostPlan(tuple(choices), held_bytes(groups, choices), extra_seconds(groups, choices, link, prefetch), fits)


def _departures(groups: Sequence[GroupCost], choices: Sequence[Choice], link: LinkSpeed) -> dict[int, float]:
    now = link_free = 0.0
    left: dict[int, float] = {}
    for index, (group, choice) in enumerate(zip(groups, choices, strict=True)):
        now += group.forward_s
        if choice is Choice.OFFLOAD:
            link_free = max(link_free, now) + group.host_bytes / link.to_host
            left[index] = link_free
    return left


def _cheapest(
    groups: Sequence[GroupCost], choices: list[Choice], link: LinkSpeed, prefetch: int
) -> tuple[int, Choice] | None:
    """The change to one kept group that costs the least time per byte that it frees; None if nothing can change."""
    now = extra_seconds(groups, choices, link, prefetch)
    best: tuple[float, int, int, Choice] | None = None
    for index, choice in _options(groups, choices):
        freed = groups[index].nbytes - (groups[index].input_bytes if choice is Choice.RECOMPUTE else 0)
        trial = [*choices[:index], choice, *choices[index + 1 :]]
        cost = (extra_seconds(groups, trial, link, prefetch) - now) / freed
        if best is None or (cost, index) < best[:2]:
            best = (cost, index, -freed, choice)
    return None if best is None else (best[1], best[3])


def _options(groups: Sequence[GroupCost], choices: Sequence[Choice]) -> list[tuple[int, Choice]]:
    """Offload for the kept groups that are reused last, recompute for those that are cheapest per byte."""
    kept = [index for index, choice in enumerate(choices) if choice is Choice.KEEP]
    movable = [index for index in kept if groups[index].nbytes > 0]
    again = [i for i in kept if groups[i].can_recompute and groups[i].nbytes > groups[i].input_bytes]
    again.sort(key=lambda i: groups[i].forward_s / (groups[i].nbytes - groups[i].input_bytes))
    options = [(index, Choice.OFFLOAD) for index in movable[:_CANDIDATES]]
    return options + [(index, Choice.RECOMPUTE) for index in again[:_CANDIDATES]]


def _improve(
    groups: Sequence[GroupCost], choices: list[Choice], budget_bytes: int, link: LinkSpeed, prefetch: int
) -> None:
    """Change single groups where that saves time and fits, in two rounds."""
    now = extra_seconds(groups, choices, link, prefetch)
    for index in [*range(len(groups)), *range(len(groups))]:
        for choice in Choice:
            if choice is Choice.RECOMPUTE and not groups[index].can_recompute:
                continue
            before, choices[index] = choices[index], choice
            time = extra_seconds(groups, choices, link, prefetch)
            if time < now and held_bytes(groups, choices) <= budget_bytes:
                now = time
            else:
                choices[index] = before


_DRIFT = 0.1  # share by which a group's bytes may differ from those that the plan was made for
_FLOAT, _SAMPLE = torch.float32, 1 << 18  # dtype and values of the example that gives a group's share of host bytes
_BACKWARD_PER_FORWARD = 2.0  # for a group whose backward was not timed


@dataclass(slots=True)
class _Measured:
    """The latest measurements of one group."""

    signature: tuple[Sequence[int], ...]
    nbytes: int
    host_bytes: int
    input_bytes: int | None  # None: cannot be recomputed
    forward_s: float | None = None
    backward_s: float | None = None

    def cost(self) -> GroupCost:
        """The measurements in the form that ``choose`` takes."""
        forward = self.forward_s or 0.0
        return GroupCost(
            nbytes=self.nbytes,
            host_bytes=self.host_bytes,
            forward_s=forward,
            backward_s=self.backward_s if self.backward_s is not None else _BACKWARD_PER_FORWARD * forward,
            can_recompute=self.input_bytes is not None,
            input_bytes=self.input_bytes or 0,
        )


@dataclass(slots=True)
class _Timing:
    key: GroupKey
    backward: bool
    start: Event
    stop: Event


@dataclass(slots=True)
class CostBook:
    """Keeps the measurements of each group, and plans each model part from them.

    Knows bytes, seconds and link speeds; not tensors. A group that is new or has other input shapes is offloaded and
    measured; one whose bytes are off by more than 10 % is measured again. Its part is planned again once its chunk is
    gone."""

    policy: OffloadPolicy
    lane: Lane
    plans: dict[int, CostPlan] = field(default_factory=dict)  # stage -> its present plan
    _choices: dict[GroupKey, Choice] = field(default_factory=dict)
    _measured: dict[GroupKey, _Measured] = field(default_factory=dict)
    _unread: list[_Timing] = field(default_factory=list)
    _reads: dict[int, list[tuple[GroupKey, Event]]] = field(default_factory=dict)  # id(chunk) -> backwards that began
    _stale: dict[int, tuple[GroupKey, ...]] = field(default_factory=dict)  # stage -> its groups, still to be planned
    _most_live: int = 1

    def choice(self, group: Group) -> Choice:
        """What to do with a group now. OFFLOAD if it is new or its input shapes have changed."""
        measured = self._measured.get(group.key)
        if measured is None or measured.signature != group.signature:
            return Choice.OFFLOAD
        return self._choices.get(group.key, Choice.OFFLOAD)

    def committed(self, group: Group) -> None:
        """A group's forward is over and its bytes are known. A recomputed group is not measured, because it has saved
        nothing but its inputs."""
        if group.recomputed:
            return
        known = self._measured.get(group.key)
        if known is None or known.signature != group.signature or _drifted(known.nbytes, group.saved_bytes):
            host_bytes = round(group.saved_bytes * _host_share(self.policy.compress))
            known = _Measured(group.signature, group.saved_bytes, host_bytes, group.input_bytes)
            self._measured[group.key] = known
            self._stale.setdefault(group.chunk.key.stage, ())
        if group.began is not None and group.ended is not None:
            self._unread.append(_Timing(group.key, False, group.began, group.ended))

    def backward_began(self, group: Group) -> None:
        """A group's backward begins, so that of the group before it in this chunk has ended. What is captured into a
        CUDA graph has no time."""
        if self.lane.capturing():
            return
        reads = self._reads.setdefault(id(group.chunk), [])
        reads.append((group.key, self.lane.now()))
        if len(reads) > 1:
            self._unread.append(_Timing(reads[-2][0], True, reads[-2][1], reads[-1][1]))

    def chunk_began(self, num_live: int) -> None:
        """A chunk began. ``num_live``: how many are live now, this one included."""
        self._most_live = max(self._most_live, num_live)
        self._read_timings()
        self._plan()

    def chunk_gone(self, chunk: Chunk) -> None:
        """Nothing of a chunk is left: its groups can be planned, if anything about them is new."""
        self._reads.pop(id(chunk), None)
        stage, keys = chunk.key.stage, tuple(group.key for group in chunk.groups)
        if stage in self._stale or set(keys) != {key for key in self._choices if key.stage == stage}:
            self._stale[stage] = keys

    def _read_timings(self) -> None:
        waiting: list[_Timing] = []
        for timing in self._unread:
            seconds = self.lane.seconds(timing.start, timing.stop)
            if seconds is None:
                waiting.append(timing)
            elif timing.backward:
                self._measured[timing.key].backward_s = seconds
            else:
                self._measured[timing.key].forward_s = seconds
        self._unread = waiting

    def _plan(self) -> None:
        if not self._stale:
            return
        link = link_of(self.lane.spans())
        for stage, keys in list(self._stale.items()):
            groups = [self._measured.get(key) for key in keys]
            if not keys or link is None or any(group is None or group.forward_s is None for group in groups):
                continue
            budget = (self.policy.device_budget_bytes or 0) // self._most_live
            costs = [group.cost() for group in groups if group is not None]
            self.plans[stage] = choose(costs, budget, link, self.policy.prefetch)
            self._choices = {key: choice for key, choice in self._choices.items() if key.stage != stage}
            self._choices.update(zip(keys, self.plans[stage].choices, strict=True))
            del self._stale[stage]


def link_of(spans: Iterable[Span]) -> LinkSpeed | None:
    """The speeds of the copies that happened; None if there were none. A direction without copies is taken to be as
    fast as the other."""
    moved = {"out": 0, "in": 0}
    seconds = {"out": 0.0, "in": 0.0}
    for span in spans:
        moved[span.direction] += span.nbytes
        seconds[span.direction] += span.stop - span.start
    speeds = {way: moved[way] / seconds[way] for way in moved if moved[way] and seconds[way] > 0}
    if not speeds:
        return None
    any_speed = next(iter(speeds.values()))
    return LinkSpeed(to_host=speeds.get("out", any_speed), to_device=speeds.get("in", any_speed))


def _host_share(compress: str) -> float:
    """Host bytes for each byte that leaves."""
    return codec_for(compress, _FLOAT).most_bytes(_SAMPLE, _FLOAT) / (_SAMPLE * _FLOAT.itemsize)


def _drifted(planned: int, measured: int) -> bool:
    return abs(measured - planned) > _DRIFT * max(planned, 1)
