"""Sends gradients again to an owner on another host that may lack them: to the successor of one that has died, and to
an owner of the next epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from rayzero.layout.model_layout import Shard
from rayzero.protocol.gradient_sum import FormerRank
from rayzero.protocol.messages import Pushed
from rayzero.store.rank.memory.gradient_region import GradientRegion
from rayzero.store.rank.owner_link import Channel
from rayzero.store.rank.publish_board import PublishBoard
from rayzero.store.rank.push_order import PushOrder
from rayzero.store.rank.transfers.wire import PushedUnit, WireTransfers
from rayzero.store.shm.plan import SharedPlan

NOTHING = FormerRank({}, ())


class RepeatedPushes:
    """What one rank has pushed and owners elsewhere may have lost.

    Knows the rank's own memory and that of its last life; not when an owner has died."""

    def __init__(
        self,
        plan: SharedPlan,
        gradients: GradientRegion,
        wires: Sequence[WireTransfers],
        board: PublishBoard,
        order: PushOrder,
        timeout_s: float,
        former: FormerRank = NOTHING,
    ) -> None:
        """``wires``: by owner. ``timeout_s``: seconds to add to those that bytes may take. ``former``: what this rank
        had pushed of decided steps before it died."""
        self._plan, self._gradients, self._former = plan, gradients, former
        self._wires, self._board, self._order, self._timeout_s = wires, board, order, timeout_s

    def send(self, owner: int, channel: Channel) -> None:
        """Send an owner what it may lack; blocks. Gradients of decided steps go first: a successor takes no others
        before it has redone the decisions. Raises as ``Channel.answer`` does."""
        shards: dict[int, list[Shard]] = {}
        for shard in self._plan.shards_of(owner):
            shards.setdefault(shard.unit, []).append(shard)
        former = [(unit, pushed) for unit, pushed in self._former.pushed if self._lacks(shards.get(unit, []), pushed)]
        lacking = []
        for unit in sorted(shards.keys() & self._gradients.flats.keys()):
            newest = self._gradients.pushed(unit)
            if newest is not None:
                self._order.go_on(owner, unit, (newest.step, newest.attempt), newest.count)
                if self._lacks(shards[unit], newest):
                    lacking.append((newest.step, newest.attempt, unit))

        def pushes() -> Iterator[PushedUnit]:
            for unit, pushed in former:
                yield self._pushed(unit, shards[unit], pushed, self._former.gradients[unit])
            for step, attempt, unit in sorted(lacking):
                now, sums = self._gradients.copy(unit, shards[unit])
                if now is not None and (now.step, now.attempt) == (step, attempt):  # newer ones go by themselves
                    yield self._pushed(unit, shards[unit], now, sums)

        if former or lacking:
            units = [*(unit for unit, _ in former), *(unit for *_, unit in lacking)]
            size = sum(4 * shard.numel for unit in units for shard in shards[unit])  # as fp32, at most
            self._wires[owner].push_again(channel, pushes, size, self._timeout_s)

    def _lacks(self, shards: list[Shard], pushed: Pushed) -> bool:
        """Whether a shard among those of an owner may lack what was pushed of it."""
        return bool(shards) and self._board.content([shard.index for shard in shards], pushed.step + 1) is None

    def _pushed(self, unit: int, shards: list[Shard], pushed: Pushed, sums: Tensor) -> PushedUnit:
        return PushedUnit(unit=self._plan.spec.layout.units[unit], shards=shards, pushed=pushed, sums=sums)
