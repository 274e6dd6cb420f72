"""The real lead in simulated time: its messages take the lead's core one after another, and their time on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from lab.simulation.fluid import Fluid, Line
from lab.simulation.groups import Groups, RankGroup
from lab.simulation.owners import Owners, Peer, answer_all
from lab.simulation.resources import Resources
from rayzero.layout.shard_map import ShardMap
from rayzero.lead.lead import StepLead
from rayzero.protocol.messages import Edit, EditKind, FinishReport, ModelSpec, NormParts, StepInputs

__all__ = ["Lead", "Tree"]

_CLIP = Edit(EditKind.CLIP_NORM, 1.0)


@dataclass(frozen=True, slots=True)
class Tree:
    """How the lead's questions reach the owners: each owner passes them on to ``fan_out`` others, one after another,
    and their answers back."""

    fan_out: int
    between: int  # owners that a question passes on its way to the farthest
    share: float  # of the messages to and from owners that the lead handles itself

    @classmethod
    def of(cls, owners: int, fan_out: int) -> Tree:
        """The flattest tree over so many owners. ``fan_out``: 0: the lead asks all of them itself."""
        if not 0 < fan_out < owners:
            return cls(owners, 0, 1.0)
        reached, level = fan_out, 1
        while reached < owners:
            level += 1
            reached += fan_out**level
        return cls(fan_out, level - 1, fan_out / owners)


class Lead:
    """``StepLead`` with simulated owners as peers and simulated ranks as callers.

    Knows who sends how many messages; what they lead to, the real class decides."""

    def __init__(
        self,
        fluid: Fluid,
        resources: Resources,
        spec: ModelSpec,
        shards: ShardMap,
        owners: Sequence[Owners],
        pushes: int,
        part_s: float,
    ) -> None:
        """``pushes``: of each unit by each rank, a step. ``part_s``: seconds of the lead for each part of a norm."""
        self.messages = 0.0  # taken and sent so far
        self.decided = 0
        self._fluid, self._resources, self._spec, self._owners = fluid, resources, spec, owners
        self._pushes, self._part_s = pushes, part_s
        self._groups: Groups = resources.groups
        self.line = Line(fluid)
        self._asked: dict[tuple[int, str], list[tuple[Peer, Future[Any]]]] = {}
        peers: dict[int, Peer] = {}
        for which, each in enumerate(owners):
            for owner in each.group.owners:
                parts = NormParts(step=0, parts=_norm_parts(spec, shards.shards_of(owner)))
                peers[owner] = Peer(partial(self._ask, which), parts)
        self._lead = StepLead([peers[owner] for owner in sorted(peers)])
        for rank in range(spec.world_size):
            self._lead.attach(rank, spec)
        self._step = [0] * len(self._groups.ranks)
        self._tree = Tree.of(len(peers), resources.options.fan_out)
        costs = resources.costs
        self._away_s = costs.latency_s + self._tree.between * (self._tree.fan_out * costs.message_s + costs.latency_s)

    def finish(self, which: int) -> None:
        """The finishes of a group of ranks have come, one message each, or one of each host's door."""
        group, step = self._groups.ranks[which], self._step[which]
        self._step[which] += 1
        self._handle(*self._resources.questions(group), lambda: self._take(group, step))

    def _take(self, group: RankGroup, step: int) -> None:
        counts = tuple(self._pushes if unit.trainable else 0 for unit in self._spec.layout.units)
        inputs = StepInputs(edits=(_CLIP,), hyper=self._spec.hyper)
        for rank in group.ranks:
            report = FinishReport(step=step, attempt=0, rank=rank, counts=counts)
            norm = self._lead.finish(report, inputs)
            if rank == group.ranks[-1]:
                norm.add_done_callback(lambda done: self._answer(group, done))

    def _answer(self, group: RankGroup, norm: Future[Any]) -> None:
        norm.result()  # raises what the real lead found wrong
        self._handle(*self._resources.questions(group), lambda: None)

    def _handle(self, messages: float, asking: int, then: Callable[[], object], *, more: float = 0.0) -> None:
        """Take or send so many messages, in which doors ask for ``asking`` ranks, and compute ``more`` seconds, behind
        what the lead does already."""
        self.messages += messages
        load = self._resources.messages(messages, asking)
        self.line.add(load.seconds + more, load.demands, then)

    # ---- what the real lead asks

    def _ask(self, which: int, what: str, peer: Peer, answer: Future[Any]) -> None:
        """A group is asked once the real lead has asked all its owners."""
        asked = self._asked.setdefault((which, what), [])
        asked.append((peer, answer))
        owners = self._owners[which]
        if len(asked) < len(owners.group.owners):
            return
        del self._asked[which, what]
        more = 0.0
        if what == "apply" and which == 0:
            self.decided += 1
            more = self._resources.costs.round_s
        then = self._begin(owners, what, asked)
        self._handle(len(asked) * self._tree.share, 0, lambda: self._fluid.after(self._away_s, then), more=more)

    def _begin(self, owners: Owners, what: str, asked: list[tuple[Peer, Future[Any]]]) -> Callable[[], object]:
        """What a group does with a question, up to its answer at the lead."""
        step = self.decided
        parts = sum(len(peer.parts.parts) for peer, _ in asked) if what == "collect" else 0

        def answered() -> None:
            more = parts * self._part_s
            self._handle(len(asked) * self._tree.share, 0, lambda: answer_all(asked, step, what), more=more)

        def answer() -> None:
            self._fluid.after(self._away_s, answered)

        def apply() -> None:
            owners.apply()
            answer()

        return (lambda: owners.collect(answer)) if what == "collect" else apply


def _norm_parts(spec: ModelSpec, shards: Sequence[int]) -> tuple[tuple[int, int, float], ...]:
    """The parts of an owner's norm, as many as the real ones; each square is 1."""
    layout = spec.layout
    return tuple(
        (shard, part.slot, 1.0)
        for shard in shards
        if layout.units[layout.shards[shard].unit].trainable
        for part in layout.slices(layout.shards[shard])
    )
