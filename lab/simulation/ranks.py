"""A group of ranks in simulated time: plays the recorded steps."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

from lab.simulation.fluid import Fluid, Line
from lab.simulation.owners import Owners
from lab.simulation.program import Op, Verb
from lab.simulation.resources import Load, Resources
from rayzero.layout.model_layout import ModelLayout
from rayzero.memory.pool import buffer_bytes

__all__ = ["Compute", "Ranks", "StepTimes"]

CAUSES = ("fetch", "push", "optimizer")  # of waits
_ROUNDING = 1e-6  # streams

Resume = Callable[[], object]
Pause = Callable[[Resume], object]  # what a rank waits for: calls back once


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Seconds that each unit computes alone, by index, in one micro-batch."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(slots=True)
class StepTimes:
    """When a rank began and ended one step, and what it waited for in it; seconds."""

    began: float
    ended: float = 0.0
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))  # as in metrics


@dataclass(slots=True)
class _Arrival:
    """A unit that was requested."""

    left: int  # parts that are not here
    published: float = 0.0  # when the last of them was
    here: bool = False
    resume: Resume | None = None


class _Streams:
    """The streams of a rank in one direction: units begin in their order while a stream is free, and all
    transfers of a unit share what there are."""

    def __init__(self, fluid: Fluid, number: int) -> None:
        self._fluid, self._number = fluid, number
        self._waiting: deque[tuple[Load, int, float, Resume]] = deque()
        self._open: Counter[int] = Counter()  # unit -> transfers under way
        self._taken = 0.0

    def add(self, load: Load, unit: int, streams: float, over: Resume) -> None:
        """Move the bytes of a unit between a rank and a group of owners, over so many streams."""
        self._waiting.append((load, unit, streams, over))
        self._begin()

    def _begin(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][1]):
            load, unit, streams, over = self._waiting.popleft()
            self._open[unit] += 1
            self._taken += streams

            def ended(unit: int = unit, streams: float = streams, over: Resume = over) -> None:
                self._open[unit] -= 1
                self._taken -= streams
                over()
                self._begin()

            self._fluid.work(load.seconds, load.demands, ended)

    def _has_room(self, unit: int) -> bool:
        return self._taken < self._number - _ROUNDING or self._open[unit] > 0


class Ranks:
    """One group of ranks.

    Knows its program and where bytes come from; not how the others do."""

    def __init__(
        self,
        fluid: Fluid,
        resources: Resources,
        which: int,
        layout: ModelLayout,
        owners: Sequence[Owners],
        compute: Compute,
        steps: Sequence[Sequence[Op]],
        *,
        overlaps: bool,
        finish: Callable[[int], object],
        ended: Resume | None = None,
    ) -> None:
        """``which``: its number. ``steps``: what it does; the last one again and again. ``overlaps``: the update runs
        beside the next forward. ``finish``: is told each step that is committed; ``ended``: each
        step that is over."""
        self.group = resources.groups.ranks[which]
        self.times: list[StepTimes] = []
        self.fetched = self.pushed = 0  # bytes of one rank that came from, or went to, owners
        self._fluid, self._resources, self._which, self._layout = fluid, resources, which, layout
        self._compute, self._program, self._overlaps, self._finish = compute, steps, overlaps, finish
        self._ended = ended
        self._costs, self._options = resources.costs, resources.options
        self._of_unit: dict[int, list[Owners]] = {}
        for each in owners:
            for unit in each.parts:
                self._of_unit.setdefault(unit, []).append(each)
        self._known = {id(each): dict.fromkeys(each.parts, 0) for each in owners}  # published, as it was told
        self._hopes: dict[tuple[int, int], list[Resume]] = {}  # (owner group, unit) -> who waits
        self._arrivals: dict[int, _Arrival] = {}
        self._down, self._up = (_Streams(fluid, resources.streams_of_rank) for _ in range(2))
        self._into, self._out, self._aside_of_units = Line(fluid), Line(fluid), Line(fluid)
        self._adding = [Line(fluid) for _ in range(max(1, self.group.each // resources.sums(self.group)))]
        self._aside = resources.aside(self.group)
        self._flying: dict[int, int] = {}  # push -> bytes, until its room is free
        self._unlanded = 0
        self._pushes = 0
        sizes = [buffer_bytes(unit.size_bytes) for unit in layout.units if unit.trainable]
        self._room = 2 * max(sizes, default=0)
        self._wake: list[Resume] = []
        self._version = 0
        for each in owners:
            remote = len(self.group.ranks) if self._is_wire else resources.groups.remote(self.group, each.group)[1]
            each.listen(partial(self._told, each), resources.listeners(self.group, remote))

    @property
    def _is_wire(self) -> bool:
        return self._options.transport == "grpc"

    def start(self, steps: int) -> None:
        """Take so many steps."""
        self._go_on(self._play(steps))

    def _go_on(self, playing: Generator[Pause, None, None]) -> None:
        pause = next(playing, None)
        if pause is not None:
            pause(lambda: self._go_on(playing))

    # ---- the loop

    def _play(self, steps: int) -> Generator[Pause, None, None]:
        for step in range(steps):
            self.times.append(StepTimes(self._fluid.now))
            for op in self._program[min(step, len(self._program) - 1)]:
                yield from self._do(op)
            self.times[-1].ended = self._fluid.now
            if self._ended is not None:
                self._ended()

    def _do(self, op: Op) -> Generator[Pause, None, None]:
        match op.verb:
            case Verb.FETCH:
                self._fetch(op.unit)
            case Verb.WAIT:
                yield from self._wait(op.unit)
            case Verb.FORWARD:
                yield self._computing(self._compute.forward[op.unit], self._costs.unit_s / 2)
            case Verb.BACKWARD:
                yield self._computing(self._compute.backward[op.unit], self._costs.unit_s / 2)
            case Verb.PUSH:
                yield from self._push(op.unit)
            case Verb.STEP:
                yield from self._step()
            case Verb.END:
                yield from self._end()

    def _computing(self, seconds: float, extra: float) -> Pause:
        load = self._resources.compute(self.group, seconds, extra)
        return lambda resume: self._fluid.work(load.seconds, load.demands, resume)

    def _waited(self, cause: str, since: float) -> None:
        self.times[-1].waits[cause] += self._fluid.now - since

    # ---- parameters

    def _told(self, owners: Owners, units: Sequence[int]) -> None:
        for unit in units:
            self._known[id(owners)][unit] += 1
            for resume in self._hopes.pop((id(owners), unit), []):
                resume()

    def _when_published(self, owners: Owners, unit: int, version: int, act: Resume) -> None:
        if self._known[id(owners)][unit] >= version:
            act()
        else:
            self._hopes.setdefault((id(owners), unit), []).append(act)

    def _fetch(self, unit: int) -> None:
        sources = self._of_unit.get(unit, [])
        arrival = self._arrivals[unit] = _Arrival(left=len(sources))
        for owners in sources:
            self._when_published(owners, unit, self._version, partial(self._move, owners, unit, arrival))

    def _move(self, owners: Owners, unit: int, arrival: _Arrival) -> None:
        """A unit's parts at one group of owners are published: bring them here."""
        arrival.published = self._fluid.now
        size = owners.parts[unit].elements * self._layout.units[unit].dtype.itemsize
        loads = self._ways(owners, size, "fetch")
        left = [len(loads)]

        def one_here() -> None:
            left[0] -= 1
            if left[0] <= 0:
                arrival.left -= 1
                if not arrival.left:
                    self._all_here(unit, arrival)

        if not loads:
            one_here()
        for load, times in loads:
            self.fetched += size * times
            self._down.add(load, unit, times * self._resources.share(self.group, "fetch"), one_here)

    def _ways(self, owners: Owners, size: int, way: str) -> list[tuple[Load, int]]:
        """The streams between one of these ranks and a group of owners: (load, how many). None within shared memory."""
        others, _ = self._resources.groups.remote(self.group, owners.group)
        here = len(owners.group.owners) - others
        found = []
        if others:
            found.append((self._resources.stream(self._which, owners.group, size, way), others))
        if here and self._is_wire:
            found.append((self._resources.loopback(self._which, owners.group, size, way), here))
        return found

    def _all_here(self, unit: int, arrival: _Arrival) -> None:
        if not self._resources.machine.gpus:
            self._arrived(arrival)
            return
        load = self._resources.to_device(self.group, self._layout.units[unit])
        self._into.add(load.seconds, load.demands, lambda: self._arrived(arrival))

    def _arrived(self, arrival: _Arrival) -> None:
        arrival.here = True
        if arrival.resume is not None:
            arrival.resume()

    def _wait(self, unit: int) -> Generator[Pause, None, None]:
        arrival, since = self._arrivals.pop(unit), self._fluid.now
        if arrival.here:
            return

        def pause(resume: Resume) -> None:
            arrival.resume = resume

        yield pause
        published = min(max(arrival.published, since), self._fluid.now)
        self.times[-1].waits["optimizer"] += published - since
        self._waited("fetch", published)

    # ---- gradients

    def _push(self, unit: int) -> Generator[Pause, None, None]:
        size, since = buffer_bytes(self._layout.units[unit].size_bytes), self._fluid.now
        if self._resources.adds_up(self.group):  # there is room for all, where ranks of the host read them
            size = 0
        while self._flying and sum(self._flying.values()) + size > self._room:
            yield self._wake.append
        self._waited("push", since)
        if self._options.transport == "inproc":  # owners read gradients where autograd has left them
            for owners in self._of_unit[unit]:
                owners.landed(unit, len(self.group.ranks))
            return
        self._pushes += 1
        self._flying[self._pushes] = size
        self._unlanded += 1
        load, aside = self._resources.gather(self.group, self._layout.units[unit].size_bytes), self._aside
        push = self._pushes
        self._out.add(load.seconds, load.demands, lambda: self._gathered(unit, push))
        self._aside_of_units.add(aside.seconds, aside.demands, lambda: None)

    def _gathered(self, unit: int, push: int) -> None:
        """All ranks of a host have a gradient: it is sent, or their sum."""
        if not self._resources.adds_up(self.group):
            self._send(unit, push)
            return
        layout = self._layout.units[unit]
        load = self._resources.add_up(self.group, layout.numel, layout.dtype.itemsize)
        adding = self._adding[push % len(self._adding)]
        adding.add(load.seconds, load.demands, lambda: self._send(unit, push))

    def _send(self, unit: int, push: int) -> None:
        targets = self._of_unit[unit]
        itemsize = self._resources.pushed_itemsize(self.group, self._layout.units[unit].dtype.itemsize)
        sent = [(each, self._ways(each, each.parts[unit].elements * itemsize, "push")) for each in targets]
        left = [sum(len(loads) for _, loads in sent)]
        if not left[0]:
            self._landed(push)

        def over() -> None:
            left[0] -= 1
            if not left[0]:
                self._landed(push)

        for owners, loads in sent:
            here = [len(loads)]

            def landed(owners: Owners = owners, here: list[int] = here) -> None:
                here[0] -= 1
                if here[0] <= 0:
                    self._land(owners, unit)
                over()

            if not loads:
                self._fluid.after(self._costs.latency_s, partial(self._land, owners, unit))
            for load, times in loads:
                self.pushed += owners.parts[unit].elements * itemsize * times
                self._up.add(load, unit, times * self._resources.share(self.group, "push"), landed)

    def _land(self, owners: Owners, unit: int) -> None:
        owners.landed(unit, round(self._resources.share(self.group, "push") * len(self.group.ranks)))

    def _landed(self, push: int) -> None:
        """A push has landed everywhere: its room is free."""
        self._unlanded -= 1
        del self._flying[push]
        self._wake_up()

    def _wake_up(self) -> None:
        waiting, self._wake = self._wake, []
        for resume in waiting:
            resume()

    # ---- the step

    def _step(self) -> Generator[Pause, None, None]:
        since = self._fluid.now
        while self._unlanded:
            yield self._wake.append
        self._waited("push", since)
        yield self._computing(0.0, self._costs.step_s)
        self._fluid.after(self._costs.latency_s, lambda: self._finish(self._which))
        self._version += 1
        self._arrivals.clear()

    def _end(self) -> Generator[Pause, None, None]:
        since = self._fluid.now
        if not self._overlaps:
            yield from self._all_published()
        self._waited("optimizer", since)

    def _all_published(self) -> Generator[Pause, None, None]:
        for unit, sources in self._of_unit.items():
            for owners in sources:
                if self._known[id(owners)][unit] < self._version:
                    yield partial(self._when_published, owners, unit, self._version)
