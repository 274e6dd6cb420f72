"""Measures groups during the run, and plans from the measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from rayzero.activations.policy import OffloadPolicy
from rayzero.activations.schedule.cost import Choice, CostPlan, GroupCost, Link, choose
from rayzero.activations.schedule.group import Chunk, Group, GroupKey
from rayzero.codecs import codec_for
from rayzero.lanes import Event, Lane, Span

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


def link_of(spans: Iterable[Span]) -> Link | None:
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
    return Link(out=speeds.get("out", any_speed), back=speeds.get("in", any_speed))


def _host_share(compress: str) -> float:
    """Host bytes for each byte that leaves."""
    return codec_for(compress, _FLOAT).most_bytes(_SAMPLE, _FLOAT) / (_SAMPLE * _FLOAT.itemsize)


def _drifted(planned: int, measured: int) -> bool:
    return abs(measured - planned) > _DRIFT * max(planned, 1)
