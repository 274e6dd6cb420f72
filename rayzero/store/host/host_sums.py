"""Sums of a host's ranks, on their way to owners on other hosts: the ranks' gradients as their door sees them in its
host's memory, added before they travel.

store/shm/words.py says when a round is added. The door finds a rank's files by the names of its run and a digest of the
run's token. It maps a later life of a rank in addition to earlier ones, whose memory owners may still need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from itertools import count
from operator import or_
from pathlib import Path

import torch
from torch import Tensor

from rayzero.concurrency.futures import Gather
from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import EpochOverError, HandshakeError, StoreClosedError, StoreError
from rayzero.kernels import choose_adder
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import Contribution, FinishReport, Pushed
from rayzero.slabs.arena import Arena
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import FoundSlab
from rayzero.store.host.owner_link import AnyChannel
from rayzero.store.host.wire_transfers import PushedUnit, WireTransfers
from rayzero.store.shm.shared_plan import RANK, SharedPlan, of_lineage
from rayzero.store.shm.words import Finishes, Part, Stamps, cell_of, key_digest, settled

_Seen = Mapping["_Life", tuple[Sequence[Pushed], dict[int, FinishReport]]]  # what each has announced of a unit


class _Life:
    """One life of a rank: what it has announced, and its gradients."""

    def __init__(self, plan: SharedPlan, control: Slab, gradients: Arena) -> None:
        facts = control.header.facts
        self.rank, self.incarnation = facts.index, facts.incarnation
        self.control, self.gradients, self.stamps = control, gradients, Stamps(control, plan)
        self._memory = plan.gradient_memory(gradients)
        self._finishes = Finishes(control)
        self._reports: dict[int, FinishReport] = {}  # those that ``has_finished`` has seen

    def reports(self) -> dict[int, FinishReport]:
        """Its last finishes, by step."""
        return self._finishes.read()

    def has_finished(self) -> bool:
        """Whether it has announced a finish since the last call."""
        before, self._reports = self._reports, self.reports()
        return self._reports != before

    @property
    def step(self) -> int:
        """The newest step that it has finished; -1: none."""
        return max(self.reports(), default=-1)

    def gradient(self, unit: int, part: Part) -> Tensor | None:
        """What it has pushed of a unit in a round: 1D, unit.numel elements; None: it has given that back, because no
        owner needs it any more."""
        assert part.pushed is not None
        return self._memory.at(unit, part.pushed.place) if part.pushed in self.stamps.read(unit) else None

    def close(self) -> None:
        for slab in (self.control, *self.gradients.slabs):
            slab.close(unlink=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledUnit:
    """What the ranks have pushed of a unit in one round of a step."""

    contribution: Contribution
    parts: tuple[tuple[Part, _Life], ...]  # of each rank that has a gradient, ascending


class SummedRanks:
    """The ranks of a host whose gradients come to other hosts as one sum.

    Knows their memory and what they have announced; not owners, or how bytes travel. Thread-safe."""

    def __init__(
        self, plan: SharedPlan, directory: Path, ranks: Sequence[int], key: str, who: str, threads: int
    ) -> None:
        """``ranks``: ascending. ``key``: a secret that all ranks of one start of a run have, and no others. ``who``:
        the process that maps their memory, for messages. ``threads``: that add up a unit."""
        self.ranks, self._plan, self._directory, self._who = tuple(ranks), plan, directory, who
        self._key = key_digest(key)
        self._lock = threading.RLock()
        self._lives: dict[int, list[_Life]] = {rank: [] for rank in ranks}  # the newest first. freed by: close()
        self._others: set[str] = set()  # files that are none of theirs
        self._adders = ThreadPoolExecutor(
            threads, f"{who}-adds", initializer=use_torch_threads, initargs=(1,)
        )  # freed by: close()

    # ---- who is there

    def find(self) -> None:
        """Map the memory of ranks that have come."""
        with self._lock:
            found = of_lineage(self._plan.spec, self._directory)
            known = {str(life.control.path) for lives in self._lives.values() for life in lives} | self._others
            for slab, facts in found:
                if (facts.role, facts.kernel) == ("control", RANK) and str(slab.path) not in known:
                    grads = [each for each in found if _belongs(each[1], facts)]
                    life = self._open(slab, grads) if facts.index in self._lives else None
                    if life is not None:
                        lives = [*self._lives[life.rank], life]
                        self._lives[life.rank] = sorted(lives, key=lambda each: -each.incarnation)

    def _open(self, control: FoundSlab, grads: Sequence[tuple[FoundSlab, SlabFacts]]) -> _Life | None:
        """One life; None: it is of another start of the run, it has only begun, or its memory is gone."""
        plan = self._plan
        files = [slab for slab, _ in sorted(grads, key=lambda each: each[1].number)]
        attached: list[Slab] = []
        try:
            attached.append(plan.attach(str(control.path), self._who, writable=False))
            key = cell_of(attached[0], "key").read()
            if key is not None and key[1] == self._key and len(files) == len(plan.gradients().slabs):
                attached += [plan.attach(str(slab.path), self._who, writable=False) for slab in files]
                return _Life(plan, attached[0], Arena(plan.gradients(), attached[1:]))
        except (HandshakeError, StoreError):  # it is removed just now, or from another rayzero
            key = 0, b""
        for slab in attached:
            slab.close(unlink=False)
        if key is not None:  # else it will say so when it is ready
            self._others.add(str(control.path))
        return None

    def _forget_former(self) -> None:
        """Leave the memory of lives of which owners have applied everything."""
        for rank, lives in self._lives.items():
            for former in lives[1:]:
                if lives[0].step >= former.step + 3:
                    self._lives[rank] = [life for life in self._lives[rank] if life is not former]
                    self._others.add(str(former.control.path))
                    former.close()

    # ---- what they have announced

    def news(self) -> set[int]:
        """The trained units of which something has changed since the last call."""
        with self._lock:
            self._forget_former()
            everything, changed = False, set[int]()
            for life in [life for lives in self._lives.values() for life in lives]:
                changed |= {unit for unit, _ in life.stamps.news()}
                everything |= life.has_finished()
        return self.units if everything else changed

    @property
    def units(self) -> set[int]:
        """All that have sums."""
        return {unit.index for unit in self._plan.spec.layout.units if unit.trainable}

    @property
    def most_elements(self) -> int:
        """Of the largest unit that has a sum."""
        return max((self._plan.spec.layout.units[unit].numel for unit in self.units), default=0)

    # ---- sums

    def settled(self, unit: int, number: int = 0) -> SettledUnit | None:
        """What is to be added of a unit in a round, counted from 0: of the newest step of which every part of the first
        round is settled, and any rank has a gradient. None: there is none, or not all of it yet."""
        layout = self._plan.spec.layout.units[unit]
        found = self._parts(layout, number)
        if found is None:
            return None
        step, parts = found
        pushing = tuple((part, life) for part, life in parts if part.pushed is not None)
        present = reduce(or_, (_bits(part) for part, _ in pushing))
        contribution = Contribution(
            step=step,
            attempt=0,
            rank=self.ranks[0],
            unit=unit,
            seq=number,
            presence=present.to_bytes((len(layout.slots) + 7) // 8, "little"),
            summands=tuple(part.summand for part, _ in parts),
        )
        return SettledUnit(contribution=contribution, parts=pushing)

    def add(self, ready: SettledUnit, shards: Sequence[Shard], memory: Tensor) -> Tensor | None:
        """Add up some shards of a unit, in rank order. ``memory``: 1D, at least the unit's elements, fp32. Returns its
        first unit.numel elements; None: a rank has given its part back, because no owner needs it any more."""
        unit = self._plan.spec.layout.units[ready.contribution.unit]
        gradients = [life.gradient(unit.index, part) for part, life in ready.parts]
        there = [each for each in gradients if each is not None]
        if len(there) < len(gradients):
            return None
        values = memory[: unit.numel]
        present = [_bits(part) for part, _ in ready.parts]
        list(self._adders.map(partial(_add, values, unit, gradients=there, present=present), shards))
        return values

    def _parts(self, unit: UnitLayout, number: int) -> tuple[int, list[tuple[Part, _Life]]] | None:
        """For the newest step of which every rank's part of the first round is settled, and some rank has a gradient:
        that step, and of each rank its part of round ``number`` with the life that made it, the same as in the first
        round. None: there is no such step, or a part is missing."""
        with self._lock:
            lives = {rank: list(each) for rank, each in self._lives.items()}
        seen = {life: (life.stamps.read(unit.index), life.reports()) for each in lives.values() for life in each}
        steps = {pushed[0].step for pushed, _ in seen.values() if pushed}
        steps |= {step for _, reports in seen.values() for step in reports}

        def parts_of(step: int, number: int, lives: Mapping[int, Sequence[_Life]]) -> list[tuple[Part, _Life]] | None:
            found = [self._part(unit.index, step, number, rank, lives[rank], seen) for rank in self.ranks]
            whole = [each for each in found if each is not None]
            return whole if len(whole) == len(found) and any(part.pushed is not None for part, _ in whole) else None

        for step in sorted(steps, reverse=True):
            if (first := parts_of(step, 0, lives)) is not None:
                now = {life.rank: [life] for _, life in first}
                found = first if number == 0 else parts_of(step, number, now)
                return None if found is None else (step, found)
        return None

    def _part(
        self, unit: int, step: int, number: int, rank: int, lives: Sequence[_Life], seen: _Seen
    ) -> tuple[Part, _Life] | None:
        """The part of a rank in its newest life that has one."""
        for life in lives:
            pushed, reports = seen[life]
            part = settled(rank, unit, step, number, pushed, reports.get(step))
            if part is not None:
                return part, life
        return None

    def close(self) -> None:
        """Leave their memory. Idempotent."""
        with self._lock:
            lives, self._lives = self._lives, {rank: [] for rank in self.ranks}
        self._adders.shutdown()
        for life in [life for each in lives.values() for life in each]:
            life.close()


def _belongs(facts: SlabFacts, control: SlabFacts) -> bool:
    """Whether a slab has gradients of the rank and life of a control slab."""
    return facts.role == "grads" and (facts.index, facts.incarnation) == (control.index, control.incarnation)


def _bits(part: Part) -> int:
    return 0 if part.pushed is None else int.from_bytes(part.pushed.presence, "little")


# ---- adding


def _add(out: Tensor, unit: UnitLayout, shard: Shard, *, gradients: Sequence[Tensor], present: Sequence[int]) -> None:
    """Add gradients of ranks of one group, in their order, over one shard's range. ``gradients``: the unit's, of each
    rank, flat. ``present``: bits of the parameters that it has. Those that no rank has, and padding, are zero."""
    total, whole = choose_adder(), (1 << len(unit.slots)) - 1
    if all(bits & whole == whole for bits in present):
        total.sum_group(out[shard.start : shard.stop], [each[shard.start : shard.stop] for each in gradients])
        return
    out[shard.start : shard.stop].zero_()
    for start, stop, members in _ranges(unit, shard, present):
        total.sum_group(out[start:stop], [gradients[each][start:stop] for each in members])


def _ranges(unit: UnitLayout, shard: Shard, bits: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(start, stop, which parts have it) of each parameter in a shard that any part has."""
    for i, slot in enumerate(unit.slots):
        start, stop = max(slot.start, shard.start), min(slot.stop, shard.stop)
        members = tuple(part for part, each in enumerate(bits) if each >> i & 1)
        if start < stop and members:
            yield start, stop, members


AT_ONCE = 2  # sums in memory, for each group of ranks; plan/tiers.py counts them

Lacks = Callable[[int, int, int], bool]  # owner, unit, step: it may not have applied the step's gradients of the unit


class HostSums:
    """Adds up and sends each round of each unit as soon as its last rank has pushed it, one after the other.

    Knows which sums each owner has been sent; not how ranks are seen, or how bytes travel. One unit is added at a time;
    at most two sums are in memory, so that a network that is slower than backward fills none. Pushes do not wait for
    it, and a step's norm does: owners give theirs once they have the sums.

    [Note: sums made again] An owner that dies loses what was sent to it. Its successor gets every unit's newest sums
    again, made from the ranks' memory, which keeps a step's gradients until their version is published. Those of
    earlier steps go first: a successor takes none of the open step before it has redone the decisions. So does a door
    that takes another one's place."""

    def __init__(
        self,
        ranks: SummedRanks,
        units: Sequence[UnitLayout],
        owners: Mapping[int, Mapping[int, list[Shard]]],
        senders: Mapping[int, WireTransfers],
        lacks: Lacks,
        failed: Callable[[BaseException], None],
        name: str,
    ) -> None:
        """``owners``: by unit, the shards of each owner that gets sums. ``senders``: by owner. ``failed``: called, at
        most once, with why the sums of this host do not reach an owner."""
        self.ranks, self._units, self._owners, self._senders = ranks, units, owners, senders
        self._lacks, self._failed = lacks, failed
        self._lock = threading.Condition()
        self._due: dict[int, None] = {}  # units that may have a new sum, in the order in which that was noticed
        self._moving: set[int] = set()  # units whose sums are in memory
        self._sent: dict[tuple[int, int], Contribution] = {}  # by owner and unit, the last one
        self._free: list[Tensor] = []  # memory of sums that have left, for the next ones
        self._over = self._closing = False  # ``failed`` was called; ``close`` was
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """A rank has come, perhaps another life of one."""
        self.ranks.find()
        steps = self._steps(self._owners)
        with self._lock:
            self._due = dict.fromkeys(sorted(steps, key=lambda unit: (steps[unit], -unit))) | self._due
            self._lock.notify_all()

    def _steps(self, units: Iterable[int]) -> dict[int, int]:
        """Of those units that have a sum, the step of the newest one."""
        newest = {unit: self.ranks.settled(unit) for unit in units}
        return {unit: each.contribution.step for unit, each in newest.items() if each is not None}

    def look(self) -> None:
        """Something was announced, perhaps."""
        try:
            changed = self.ranks.news() & self._owners.keys()
        except Exception as error:  # whatever it is, it ends the run
            self._fail(error)
            return
        if changed:
            with self._lock:
                self._due |= dict.fromkeys(sorted(changed, reverse=True))  # as backward makes them
                self._lock.notify_all()

    def send_again(self, owner: int, channel: AnyChannel, timeout_s: float) -> None:
        """Send the successor of an owner what it may lack, over a channel to it; blocks. ``timeout_s``: seconds to add
        to those that bytes may take. See [Note: sums made again]. Raises as ``Channel.answer`` does."""
        shards = {unit: owners[owner] for unit, owners in self._owners.items() if owner in owners}
        steps = {unit: step for unit, step in self._steps(shards).items() if self._lacks(owner, unit, step)}

        def pushes() -> Iterator[PushedUnit]:
            for step, unit in sorted((step, unit) for unit, step in steps.items()):
                for each in self._rounds(unit):
                    made, layout = each.contribution, self._units[unit]
                    if made.step != step:  # newer ones go by themselves
                        break
                    memory = torch.empty(layout.numel, dtype=torch.float32, device="cpu")
                    values = self.ranks.add(each, shards[unit], memory)
                    if values is not None:
                        yield PushedUnit(unit=layout, shards=shards[unit], contribution=made, values=values)

        if steps:
            size = sum(4 * shard.numel for unit in steps for shard in shards[unit])
            size *= max(len(list(self._rounds(unit))) for unit in steps)
            self._senders[owner].push_again(channel, pushes, size, timeout_s)

    def _rounds(self, unit: int) -> Iterator[SettledUnit]:
        """The rounds of a unit that have sums."""
        for number in count():
            ready = self.ranks.settled(unit, number)
            if ready is None:
                return
            yield ready

    def _work(self) -> None:
        use_torch_threads(1)
        while (unit := self._next()) is not None:
            try:
                self._send_next(unit)
            except Exception as error:  # whatever it is, it ends the run
                self._fail(error)
                self._end(unit)

    def _next(self) -> int | None:
        """The next unit to look at; None at the end."""
        with self._lock:
            while not self._closing:
                unit = next((unit for unit in self._due if unit not in self._moving), None)
                if unit is not None and len(self._moving) < AT_ONCE:
                    del self._due[unit]
                    self._moving.add(unit)
                    return unit
                self._lock.wait()
        return None

    def _send_next(self, unit: int) -> None:
        """Send a unit's next sum to the owners that were not sent it."""
        found = self._next_sum(unit)
        if found is None:
            self._end(unit)
            return
        ready, owners = found
        made, layout = ready.contribution, self._units[unit]
        memory = self._take()
        values = self.ranks.add(ready, [shard for shards in owners.values() for shard in shards], memory)
        self._sent |= {(owner, unit): made for owner in owners}
        with self._lock:  # its next round may be there already
            self._due[unit] = None
        if values is None:
            self._end(unit, memory)
            return
        gather = Gather(len(owners))
        gather.future.add_done_callback(partial(self._ended, unit, memory))
        for owner, shards in owners.items():
            self._senders[owner].push(gather, layout, shards, made, values)

    def _next_sum(self, unit: int) -> tuple[SettledUnit, dict[int, list[Shard]]] | None:
        """The first sum of a unit that owners were not sent, and the shards of each of them; None: there is none yet.
        Whatever the number of rounds, only two are looked at."""
        while (first := self.ranks.settled(unit)) is not None:
            made = first.contribution
            numbers = {
                owner: number
                for owner in self._owners[unit]
                if (number := next_round(made, self._sent.get((owner, unit)))) is not None
                and self._lacks(owner, unit, made.step)
            }
            if not numbers:
                return None
            number = min(numbers.values())
            ready = self.ranks.settled(unit, number) if number else first
            if ready is None:
                return None
            if goes_on(ready.contribution, made):  # else a rank has begun another attempt in between
                owners = self._owners[unit].items()
                return ready, {owner: shards for owner, shards in owners if numbers.get(owner) == number}
        return None

    def _take(self) -> Tensor:
        with self._lock:
            if self._free:
                return self._free.pop()
        return torch.empty(self.ranks.most_elements, dtype=torch.float32, device="cpu")

    def _ended(self, unit: int, memory: Tensor, sending: Future[None]) -> None:
        error = CancelledError() if sending.cancelled() else sending.exception()
        if error is not None:
            self._fail(error)
        self._end(unit, memory if error is None else None)

    def _end(self, unit: int, memory: Tensor | None = None) -> None:
        """``memory``: that nothing reads any more."""
        with self._lock:
            if memory is not None:
                self._free.append(memory)
            self._moving.discard(unit)
            self._lock.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            first, self._over = not (self._over or self._closing), True
        if first and not isinstance(error, StoreClosedError | EpochOverError):
            self._failed(error)

    def stop(self) -> None:
        """Add nothing more. Idempotent."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()

    def close(self) -> None:
        """End the thread, after ``stop``, and leave the ranks' memory. Sums on their way end with their links."""
        self._thread.join()
        self.ranks.close()


def next_round(first: Contribution, sent: Contribution | None) -> int | None:
    """The number of the round whose sum has to be sent next. ``first``: the first round, of the newest attempts.
    ``sent``: what was sent last. None: that is of a later step."""
    if sent is None or first.step > sent.step:
        return 0
    if first.step < sent.step:
        return None
    return sent.seq + 1 if goes_on(first, sent) else 0


def goes_on(made: Contribution, before: Contribution) -> bool:
    """Whether two sums are rounds of the same attempts."""
    attempts, earlier = ([each.attempt for each in push.summands] for push in (made, before))
    return made.step == before.step and attempts == earlier
