"""Which way leads from a rank to each owner: over gRPC, through the owner's memory, or through its host's copy. And
how a rank repeats pushes that an owner on another host may lack: the successor of one that has died, or an owner of the
next epoch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Executor
from functools import partial

from torch import Tensor

from rayzero.errors import RayZeroError
from rayzero.layout.model_layout import Shard
from rayzero.protocol.gradient_sum import NOTHING_LEFT, FormerRank, has_totals
from rayzero.protocol.messages import Contribution, Pushed
from rayzero.store.host.channel import QUICK_S, BrokenLinkError
from rayzero.store.host.owner_link import AnyChannel, OwnerLink, answers_of
from rayzero.store.host.transfer_calls import TransferThreads
from rayzero.store.host.waits import Describe, PublishBoard, PushOrder, StallWatch
from rayzero.store.host.wire_transfers import PushedUnit, WireTransfers
from rayzero.store.rank.connection import GradientSender
from rayzero.store.rank.gradient_region import GradientRegion
from rayzero.store.rank.shared_memory import SharedRank
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.telemetry.recorder import Recorder


class Ways:
    """The ways from one rank to the owners of an epoch, and the threads that move bytes. All lead over gRPC at first.

    Knows which way leads to which owner; not why, or what travels."""

    def __init__(
        self,
        rank: int,
        links: Sequence[OwnerLink],
        compression: str,
        *,
        board: PublishBoard,
        watch: StallWatch,
        lead_says: Describe,
        recorder: Recorder,
    ) -> None:
        """``links``: by owner. ``compression``: see ``WireTransfers``. ``lead_says``: asks the lead whom the step waits
        for."""
        self.threads = TransferThreads(len(links), f"rank {rank}")  # freed by: close()
        self.order = PushOrder()
        self.wires = [
            WireTransfers(
                link,
                self.threads,
                board=board,
                order=self.order,
                watch=watch,
                lead_says=lead_says,
                compression=compression,
                recorder=recorder,
            )
            for link in links
        ]
        self.senders: dict[int, GradientSender] = {wire.owner: wire for wire in self.wires}
        self._used = set(self.senders)

    def use(self, owners: Collection[int]) -> None:
        """Only these owners have shards, so that bytes travel to them and from them."""
        self._used = set(owners)
        self.senders = {owner: sender for owner, sender in self.senders.items() if owner in self._used}

    def share(self, owners: Iterable[int], shared: SharedRank) -> None:
        """Reach owners of this host, whose files are mapped, through shared memory."""
        for owner in owners:
            self.senders.pop(owner, None)
            self.wires[owner].read_in(partial(shared.shard, owner), copied=False)

    def mirror(self, owners: Iterable[int], shared: SharedRank) -> None:
        """Read what owners on other hosts publish in this host's copy."""
        for owner in owners:
            self.wires[owner].read_in(partial(shared.shard, owner), copied=True)

    @property
    def transport(self) -> str:
        """The run's transport, as metrics call it: "shm", "grpc", or "shm+grpc"."""
        return "+".join(sorted({way.transport for way in self.wires if way.owner in self._used}, reverse=True))

    def give_up(self) -> None:
        """Repeat nothing any more after a pause."""
        self.threads.closing.set()

    def end(self, error: RayZeroError) -> None:
        """End every wait for a turn with ``error``. Idempotent."""
        self.give_up()
        self.order.fail(error)

    def close(self) -> None:
        """End every transfer and thread, after ``end`` and once the links are closed. Idempotent."""
        self.threads.close()


class RepeatedPushes:
    """What one rank has pushed and owners on other hosts may have lost.

    Knows the rank's own memory and that of its last life; not when an owner has died."""

    def __init__(
        self,
        rank: int,
        plan: SharedPlan,
        gradients: GradientRegion,
        wires: Sequence[WireTransfers],
        board: PublishBoard,
        order: PushOrder,
        timeout_s: float,
        former: FormerRank = NOTHING_LEFT,
    ) -> None:
        """``wires``: by owner. ``timeout_s``: seconds to add to those that bytes may take. ``former``: what this rank
        had pushed of decided steps before it died."""
        self._plan, self._gradients, self._former = plan, gradients, former
        self._rank = rank
        self._wires, self._board, self._order, self._timeout_s = wires, board, order, timeout_s

    def send(self, owner: int, channel: AnyChannel) -> None:
        """Send an owner what it may lack; blocks. Gradients of decided steps go first: a successor takes no others
        before it has redone the decisions. Raises as ``Channel.answer`` does."""
        shards: dict[int, list[Shard]] = {}
        for shard in self._plan.shards_of(owner):
            shards.setdefault(shard.unit, []).append(shard)
        former = [(unit, pushed) for unit, pushed in self._former.pushed if self._lacks(shards.get(unit, []), pushed)]
        lacking = []
        for unit in sorted(shards.keys() & set(self._gradients.units)):
            pushes = self._gradients.pushed(unit)
            if pushes:
                newest = pushes[-1]
                self._order.go_on(owner, unit, (newest.step, newest.attempt), newest.count)
                if self._lacks(shards[unit], newest):
                    lacking += [(pushed.step, pushed.attempt, unit, pushed.count, pushed) for pushed in pushes]

        def pushes_again() -> Iterator[PushedUnit]:
            for unit, pushed in former:
                values = self._former.memory.at(unit, pushed.place)
                if values is not None:
                    yield self._pushed(unit, shards[unit], pushed, values)
            for *_, unit, _, pushed in sorted(lacking, key=lambda each: each[:-1]):
                values = self._gradients.copy(unit, pushed, shards[unit])
                if values is not None:  # newer ones go by themselves
                    yield self._pushed(unit, shards[unit], pushed, values)

        if former or lacking:
            units = [*(unit for unit, _ in former), *(unit for _, _, unit, _, _ in lacking)]
            size = sum(4 * shard.numel for unit in units for shard in shards[unit])  # as fp32, at most
            self._wires[owner].push_again(channel, pushes_again, size, self._timeout_s)

    def send_all(self, links: Iterable[OwnerLink], threads: Executor) -> None:
        """Send several owners at once what they may lack; blocks. Raises the first error."""
        sending = [threads.submit(self._send_over, link) for link in links]
        futures.wait(sending)
        for each in sending:
            each.result()

    def _send_over(self, link: OwnerLink) -> None:
        """Send an owner what it may lack, over whatever channel is open. If that breaks, all of it goes over the next
        one: who answers there may be a successor, which drops what it has already. Raises StallError if the link stays
        down."""
        deadline_s, channel = max(QUICK_S, self._timeout_s), None
        while True:
            channel = answers_of({link: link.when_open(after=channel)}, deadline_s)[0]
            try:
                self.send(link.owner, channel)
                return
            except BrokenLinkError as error:
                link.broke(channel, error)

    def _lacks(self, shards: list[Shard], pushed: Pushed) -> bool:
        """Whether a shard among those of an owner may lack what was pushed of it."""
        return bool(shards) and self._lacks_step(shards, pushed.step)

    def _lacks_step(self, shards: list[Shard], step: int) -> bool:
        return self._board.content([shard.index for shard in shards], step + 1) is None

    def _pushed(self, unit: int, shards: list[Shard], pushed: Pushed, sums: Tensor) -> PushedUnit:
        """A push that is not part of a longer sum goes as it went before, in the same encoding."""
        layout = self._plan.spec.layout.units[unit]
        alone = has_totals(self._plan.spec.world_size) or (pushed.count == 1 and sums.dtype is layout.dtype)
        contribution = Contribution(
            step=pushed.step,
            attempt=pushed.attempt,
            rank=self._rank,
            unit=unit,
            seq=pushed.count - 1,
            presence=pushed.presence,
            sum_of=0 if alone else pushed.count,
        )
        return PushedUnit(unit=layout, shards=shards, contribution=contribution, values=sums)
