"""What a decision does to an owner's shards: which of them change, by what, and the change itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

from rayzero.errors import StepMismatchError
from rayzero.owner.gradients.contributions import Collection, Contributions
from rayzero.owner.group_norms import GroupNorms
from rayzero.owner.measures import tell_update
from rayzero.owner.model import OwnedModel
from rayzero.owner.publisher import Publisher
from rayzero.owner.shard import OwnedShard, ShardState
from rayzero.owner.update.rules import ShardWork
from rayzero.protocol.messages import Action, Decision, NormParts
from rayzero.telemetry.names import OPTIMIZER_UPDATE_SECONDS
from rayzero.telemetry.recorder import Recorder

Work = Mapping[int, ShardWork | None]  # by shard; None: its content does not change


def counted(
    decision: Decision, collection: Collection | None, model: OwnedModel, owner: int, open_step: int
) -> Collection:
    """The collection that a decision of the open step, or a later one, counts. Raises StepMismatchError where it was
    decided too early, or counts something else than what ``owner`` collected."""
    if decision.step > open_step or collection is None:
        raise StepMismatchError(
            f"optimizer {owner} is in step {open_step} ({'collected' if collection else 'not collected'}), "
            f"got the decision of step {decision.step}"
        )
    if decision.attempts != collection.attempts:
        raise StepMismatchError(
            f"the decision of step {decision.step} counts attempts {decision.attempts}, "
            f"optimizer {owner} collected {collection.attempts}"
        )
    if any(owned.state is ShardState.EMPTY for owned in model.shards.values()):
        raise StepMismatchError(f"step {decision.step} was decided before optimizer {owner} was loaded")
    return collection


def work_of(decision: Decision, collection: Collection, model: OwnedModel) -> Work:
    """What the decision does to each shard, with the contributions that ``collection`` counts."""
    changes = decision.action is Action.APPLY
    return {
        index: _shard_work(owned, decision, collection, model.contributions) if changes and owned.trainable else None
        for index, owned in model.shards.items()
    }


def _shard_work(
    owned: OwnedShard, decision: Decision, collection: Collection, contributions: Contributions
) -> ShardWork | None:
    contributors = contributions.contributors(owned, contributions.counted_ranks(owned, collection))
    if not any(contributors):
        return None
    return ShardWork(
        version=decision.step + 1,
        gradients=contributions.gradients(owned),
        contributors=contributors,
        scale=decision.scale,
        limit=decision.limit,
        hyper=decision.hyper,
    )


@dataclass(frozen=True, slots=True)
class _Progress:
    """What is being worked on, for people."""

    owned: OwnedShard
    tile: int
    tiles: int


class ShardUpdates:
    """Updates shards and publishes them, in forward order, so that ranks' next forward can begin with the first.

    Knows shards and the rule; not who made a decision, nor who reads. Everything but ``describe`` runs in the updater
    thread; the lock is the service's."""

    def __init__(
        self,
        model: OwnedModel,
        publisher: Publisher,
        recorder: Recorder,
        lock: threading.RLock,
        freed: Callable[[], None],
    ) -> None:
        """``freed()``: gradients of some shards have been read; their memory may be written again."""
        self._model = model
        self._publisher = publisher
        self._recorder = recorder
        self._lock = lock
        self._freed = freed
        self._norms: GroupNorms | None = None  # made at the first measured step
        self._progress: _Progress | None = None

    @property
    def scratch_bytes(self) -> int:
        """What measuring norms keeps between steps."""
        return 0 if self._norms is None else self._norms.scratch_bytes

    def run(self, version: int, work: Work, parts: NormParts | None) -> None:
        """Update and publish; neighbours that do not change go together. ``parts``: given where the norms of this
        step are measured."""
        started = time.perf_counter()
        norms = None if parts is None else self._measured_norms()
        for changes, group in groupby(
            self._model.shards.values(), key=lambda owned: work[owned.shard.index] is not None
        ):
            alike = list(group)
            if not changes:
                self._publish(alike, version)
            for owned in alike if changes else ():
                self._update(owned, work[owned.shard.index], norms)
                self._publish([owned], version)
        if norms is not None and parts is not None:  # after the last publication: nobody waits for it
            norms.tell(parts)
        self._recorder.observe(OPTIMIZER_UPDATE_SECONDS, time.perf_counter() - started)

    def _measured_norms(self) -> GroupNorms:
        if self._norms is None:
            self._norms = GroupNorms(self._model, self._recorder)
        return self._norms

    def _update(self, owned: OwnedShard, work: ShardWork | None, norms: GroupNorms | None) -> None:
        assert work is not None
        with self._lock:
            owned.move(ShardState.UPDATING)

        def on_tile(done: int, tiles: int) -> None:
            self._progress = _Progress(owned, done, tiles)

        on_tile(0, 1)
        if norms is not None:
            norms.before(owned)
        over = self._recorder.spans.begin("update", _name(owned), work.version - 1)
        self._model.rule.update(owned, work, on_tile)
        over()
        if norms is not None:
            norms.after(owned)
        self._progress = None
        if owned.journal is not None:
            owned.journal.applied(work.version)
        updated = [index for index, ranks in enumerate(work.contributors) if ranks]
        for index in updated:
            owned.steps[index] += 1
        tell_update(self._recorder, owned, work)

    def _publish(self, shards: list[OwnedShard], version: int) -> None:
        if not shards:
            return
        over = self._recorder.spans.begin("publish", _name(*shards), version - 1)
        with self._lock:
            for owned in shards:
                if owned.state is ShardState.UPDATING:
                    owned.pending_reads -= 1
                    owned.content = version
                owned.pending -= 1
                owned.published = version
                owned.move(ShardState.PUBLISHED)
                if owned.pending:
                    owned.move(ShardState.DECIDED)
        self._publisher.announce(shards)
        over()
        self._freed()

    def describe(self, owned: OwnedShard, missing: list[int]) -> str:  # locked
        """What is being done for a shard, for messages about waits. ``missing``: ranks with counted pushes that are
        not there."""
        progress = self._progress
        if owned.state is ShardState.EMPTY:
            return "waiting for rank 0 to load it"
        if progress is not None and owned.pending:
            where = "" if progress.owned is owned else f" of {progress.owned.unit.name} first"
            return f"updating tile {progress.tile}/{progress.tiles}{where}"
        published = f"v{owned.published} is published"
        if owned.pending:
            return f"{published}, the next update is queued"
        if missing:
            return f"{published}, waiting for counted pushes of ranks {missing}"
        return f"{published}, step {owned.published} is not decided"


def _name(first: OwnedShard, *others: OwnedShard) -> str:
    """What people call a shard, or neighbours of it."""
    more = f" and {len(others)} more" if others else ""
    return f"{first.unit.name} shard {first.shard.index}{more}"
