"""Applies a decision to an owner's shards: updates each, publishes it, and records measurements."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from rayzero.owner.checkpoint import CheckpointWriter
from rayzero.owner.gradients.contributions import Contributions
from rayzero.owner.owned_model import OwnedModel
from rayzero.owner.publisher import Publisher
from rayzero.owner.shard import Contributors, OwnedShard, ShardState, ShardWork, StepWork
from rayzero.owner.update.group_norms import GroupNorms
from rayzero.protocol.messages import Action
from rayzero.telemetry.names import OPTIMIZER_BYTES, OPTIMIZER_PARAMS, OPTIMIZER_UPDATE_SECONDS
from rayzero.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class _RunningUpdate:
    """The update in progress, for messages."""

    owned: OwnedShard
    tile: int
    tiles: int


class StepUpdates:
    """Updates shards and publishes them in forward order, so that the ranks' next forward can begin with the first.

    Knows shards and the rule; not who made a decision, nor who reads. ``run`` runs in the updater's thread."""

    def __init__(
        self,
        model: OwnedModel,
        contributions: Contributions,
        publisher: Publisher,
        checkpoints: CheckpointWriter,
        recorder: Recorder,
        norms_every: int | None,
    ) -> None:
        """``norms_every``: steps between measurements of norms by layer group; None: never."""
        self._model, self._recorder = model, recorder
        self._contributions, self._publisher, self._checkpoints = contributions, publisher, checkpoints
        self._norms_every = norms_every
        self._norms: GroupNorms | None = None  # created at the first measured step
        self._progress: _RunningUpdate | None = None

    @property
    def scratch_bytes(self) -> int:
        """Bytes that measuring norms keeps between steps."""
        return 0 if self._norms is None else self._norms.scratch_bytes

    def run(self, step: StepWork) -> None:
        """Update and publish the shards; neighbours that do not change are published together."""
        started = time.perf_counter()
        norms = self._measured_norms(step)
        for changes, group in groupby(
            self._model.shards.values(), key=lambda owned: step.shards[owned.shard.index] is not None
        ):
            alike = list(group)
            if not changes:  # also if a former life of this owner has made it, but perhaps not published it
                self._publish(alike, step.version)
            for owned in alike if changes else ():
                self._update(owned, step.shards[owned.shard.index], norms)
                self._publish([owned], step.version)
        if norms is not None:  # after the last publication, so that nothing waits for it
            norms.tell(step.parts.result())
        self._recorder.observe(OPTIMIZER_UPDATE_SECONDS, time.perf_counter() - started)
        self._checkpoints.reached(step.version)

    def _measured_norms(self, step: StepWork) -> GroupNorms | None:
        every, decision = self._norms_every, step.decision
        if every is None or decision.step % every or decision.action is not Action.APPLY:
            return None
        if self._norms is None:
            model = self._model
            self._norms = GroupNorms(model.spec, model.shards, model.square_sum, self._recorder)
        return self._norms

    def _update(self, owned: OwnedShard, work: ShardWork | None, norms: GroupNorms | None) -> None:
        assert work is not None
        self._checkpoints.protect(owned)  # before nobody can read it: it may wait
        self._publisher.updating(owned)

        def on_tile(done: int, tiles: int) -> None:
            self._progress = _RunningUpdate(owned, done, tiles)

        on_tile(0, 1)
        if norms is not None:
            norms.before(owned)
        over = self._recorder.spans.begin("update", _name(owned), work.version - 1)
        self._model.rule.update(owned, work, on_tile)
        over()
        if norms is not None:
            norms.after(owned)
        self._progress = None
        owned.applied(work.version, [index for index, ranks in enumerate(work.contributors) if ranks])
        self._contributions.release(owned)
        _tell_update(self._recorder, owned, work)

    def _publish(self, shards: list[OwnedShard], version: int) -> None:
        if shards:
            over = self._recorder.spans.begin("publish", _name(*shards), version - 1)
            self._publisher.publish(shards, version)
            over()

    def describe(self, owned: OwnedShard) -> str:
        """A description of what a shard is waiting for, for errors about waits."""
        progress = self._progress
        if owned.state is ShardState.EMPTY:
            return "waiting for rank 0 to load it"
        if progress is not None and owned.pending:
            where = "" if progress.owned is owned else f" of {progress.owned.unit.name} first"
            return f"updating tile {progress.tile}/{progress.tiles}{where}"
        published = f"v{owned.published} is published"
        if owned.pending:
            return f"{published}, the next update is queued"
        if missing := self._contributions.missing_ranks:
            return f"{published}, waiting for counted pushes of ranks {missing}"
        return f"{published}, step {owned.published} is not decided"


def _name(first: OwnedShard, *others: OwnedShard) -> str:
    """The name of a shard, or of several neighbours, for messages."""
    more = f" and {len(others)} more" if others else ""
    return f"{first.unit.name} shard {first.shard.index}{more}"


def _tell_update(recorder: Recorder, owned: OwnedShard, work: ShardWork) -> None:
    kept = sum(state.nbytes for state in owned.states.values()) / owned.shard.numel
    states = 2 * (4 + kept)  # master and states, read and written
    written = 0 if owned.params is owned.master else owned.params.itemsize
    updated = _elements(owned, work.contributors)
    read = {ranks: sum(work.gradients[rank].itemsize for rank in ranks) for ranks in updated}
    recorder.add(OPTIMIZER_PARAMS, updated.total())
    recorder.add(OPTIMIZER_BYTES, sum(count * (states + written + read[ranks]) for ranks, count in updated.items()))


def _elements(owned: OwnedShard, contributors: Contributors) -> Counter[tuple[int, ...]]:
    """Updated elements by contributors."""
    if len(set(contributors)) == 1:  # the usual case; models have many parameters
        return Counter({contributors[0]: owned.filled if contributors[0] else 0})
    updated = Counter[tuple[int, ...]]()
    for part, ranks in zip(owned.slices, contributors, strict=True):
        updated[ranks] += part.numel if ranks else 0
    return updated
