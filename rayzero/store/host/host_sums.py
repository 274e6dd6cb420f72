"""Sends the sums of a host's ranks to owners on other hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from itertools import count

import torch
from torch import Tensor

from rayzero.concurrency.futures import Gather
from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import EpochOverError, StoreClosedError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import Contribution
from rayzero.store.host.links.owner_link import AnyChannel
from rayzero.store.host.summed_ranks import SettledUnit, SummedRanks
from rayzero.store.host.transfers.wire import PushedUnit, WireTransfers

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
        settled = {unit: self.ranks.settled(unit) for unit in units}
        return {unit: each.contribution.step for unit, each in settled.items() if each is not None}

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
                for settled in self._rounds(unit):
                    made, layout = settled.contribution, self._units[unit]
                    if made.step != step:  # newer ones go by themselves
                        break
                    memory = torch.empty(layout.numel, dtype=torch.float32, device="cpu")
                    values = self.ranks.add(settled, shards[unit], memory)
                    if values is not None:
                        yield PushedUnit(unit=layout, shards=shards[unit], contribution=made, values=values)

        if steps:
            size = sum(4 * shard.numel for unit in steps for shard in shards[unit])
            size *= max(len(list(self._rounds(unit))) for unit in steps)
            self._senders[owner].push_again(channel, pushes, size, timeout_s)

    def _rounds(self, unit: int) -> Iterator[SettledUnit]:
        """The rounds of a unit that have sums."""
        for number in count():
            settled = self.ranks.settled(unit, number)
            if settled is None:
                return
            yield settled

    def _work(self) -> None:
        use_torch_threads(1)
        while (unit := self._next()) is not None:
            try:
                self._bring(unit)
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

    def _bring(self, unit: int) -> None:
        """Send a unit's next sum to the owners that were not sent it."""
        found = self._next_sum(unit)
        if found is None:
            self._end(unit)
            return
        settled, owners = found
        made, layout = settled.contribution, self._units[unit]
        memory = self._take()
        values = self.ranks.add(settled, [shard for shards in owners.values() for shard in shards], memory)
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
            settled = self.ranks.settled(unit, number) if number else first
            if settled is None:
                return None
            if goes_on(settled.contribution, made):  # else a rank has begun another attempt in between
                owners = self._owners[unit].items()
                return settled, {owner: shards for owner, shards in owners if numbers.get(owner) == number}
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
