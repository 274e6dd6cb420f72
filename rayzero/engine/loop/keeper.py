"""Keeps, with every step, what the loop needs to go on from there: a rank that dies is started again, and repeats only
its last step.

[Note: two moments] ``optimizer.step()`` is in the middle of a loop's iteration: the scheduler and the loss scaler are
stepped after it, and the next batch is taken before the next forward. So no single moment has the state with which an
iteration begins. The random generators, the buffers and the sources of data (objects that can be iterated) are taken as
the step is committed; generators, buffers, parameter groups and all other objects once more as the next forward with
gradients begins. A rank that comes back has the first generators from prepare() on, to draw its batch, and the second
ones in its first forward: a loop that makes the iterator of a DataLoader anew draws a number for it. (What a loop draws
or takes between ``step()`` and the end of its iteration is not seen by the next batch: validation should use a
generator of its own.)

[Note: an unfinished iteration] A rank may die after its commit and before the next forward, perhaps in a save. Its new
life then does that iteration again, over a store that answers for the decided step (``RankStore.repeat``). When it
comes to ``optimizer.step()``, everything is put back to what it was there, so that a loss that was computed with newer
weights leaves no trace; from there on it is the iteration's end, done once.

[Note: calls before a forward] The lead pairs the ranks' nth calls of ``mean_over_ranks``. Of those between
``optimizer.step()`` and the next forward, some end an iteration, and a rank that repeats the next one does not make
them; others begin the next one, and it does. Nothing in the loop says where the border is. But before its forward the
new life makes exactly the calls behind the border, and with the same values, because it computes the same: its calls
tell where they begin. Where several places fit (two flags that are 0), the lead must have one result for all of them.
If the lead has died, too, another rank may still wait for a call that the new life does not make again. So the new life
first tells the lead what its former life gave to all of them (``Comeback.restore``), and waits for no mean. In the same
way it tells of writes: of those made before the forward, and of each that it finds published as it makes it again.

[Note: a write in a step] What is written after the state of a step was taken, and reaches the owners before the next
state (with a clip, ``step()`` or a save), changes the version that a repeat begins with: a forward would compute with
other weights, and ``p.mul_(0.5)`` would be made twice. So before such a write is sent, the state says that it was, and
a rank that comes back there raises StateLostError: the run goes on from its newest checkpoint. What was written before
the forward is in the state: a repeat sends the same.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rayzero.checkpoint.state_values import from_bytes, to_bytes
from rayzero.engine.loop.comeback import Comeback, State, call_state, put_back
from rayzero.engine.loop.rank_state import generator_states, set_generator_states
from rayzero.engine.loop.reports import RecentReports
from rayzero.engine.loop.tracked import Tracked
from rayzero.engine.optimizer.param_groups import saved_options
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.start.buffers import persistent_buffers
from rayzero.errors import StateLostError
from rayzero.protocol.bits import digest_of
from rayzero.protocol.messages import AT_COMMIT, AT_FORWARD, MOST_LOOP_STATE, LoopState, MeanInput
from rayzero.quantities import format_bytes

log = logging.getLogger(__name__)

RNG_AT_FORWARD = "rng at forward"  # beside "rng": see [Note: two moments]


def key_of(given: MeanInput) -> str:
    """Equal for equal names, shapes, values (bit for bit) and weights."""
    numbers = struct.pack(f"<{len(given.values) + 1}d", *given.values, given.weight)
    return hashlib.sha256(repr((given.names, given.shape)).encode() + numbers).hexdigest()[:32]


class RepeatedMeans:
    """Finds the numbers of the calls that a rank makes before the first forward of its new life.

    Knows what was given and in which order; not the results."""

    def __init__(self, rank: int, made: list[str], newest: int) -> None:
        """``made``: keys of the earlier life's calls between its last commit and its next forward; ``newest``: the
        number of the last one, or of the last call of all if there is none."""
        self._rank, self._made, self._first = rank, made, newest - len(made) + 1
        self._starts = list(range(len(made)))  # places where the repeated calls may begin
        self._asked = 0

    def next(self, given: MeanInput) -> list[int]:
        """The numbers that the next call may have, at least one. Raises StateLostError if the earlier life made no
        such call here."""
        key, at = key_of(given), self._asked
        starts = [start for start in self._starts if self._made[start + at : start + at + 1] == [key]]
        if not starts:
            raise self._lost(f"calls mean_over_ranks() of {given} before a forward with gradients, and did not before")
        self._starts, self._asked = starts, at + 1
        return [self._first + start + at for start in starts]

    def end(self) -> None:
        """The forward begins. Raises StateLostError if the earlier life made further calls before it."""
        if self._asked and len(self._made) - self._asked not in self._starts:
            raise self._lost("begins a forward with gradients after fewer calls of mean_over_ranks() than before")

    def unclear(self) -> StateLostError:
        """The error if the calls of the numbers have different results."""
        return self._lost("repeats one of several calls of mean_over_ranks() with the same values and other results")

    def _lost(self, why: str) -> StateLostError:
        return StateLostError(
            f"rank {self._rank} has died and come back, but its loop cannot repeat its step alone: it {why}. Between "
            "optimizer.step() and the next forward give it values that a repeat computes again, and none between "
            "prepare() and the loop; or resume the run from its newest checkpoint"
        )


class LoopKeeper:
    """Takes the state of one rank's loop and gives it to the store.

    Knows when; not where it is kept. A loop that tracks nothing is not kept."""

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        tracked: Tracked,
        reports: RecentReports,
        comeback: Comeback | None,
        began: Path | None,
    ) -> None:
        """``comeback``: of a rank that has come back; it may repeat a step that is decided. ``began``: the checkpoint
        that the run began with."""
        self._began = None if began is None else str(began)
        self._optimizer, self._tracked, self._reports, self._comeback = optimizer, tracked, reports, comeback
        self._engine = optimizer.engine
        self._engine.cache.writes.sent = self
        self._returns = comeback is not None and comeback.state is not None  # and has not begun a forward
        self._means: list[MeanInput] = []  # of the calls of mean_over_ranks since the last commit
        self._repeated: RepeatedMeans | None = None  # [Note: calls before a forward]
        if comeback is not None and comeback.state is not None:
            made = [key_of(given) for _, given in comeback.means]
            self._repeated = RepeatedMeans(self._engine.rank, made, comeback.state["means"])
        self._open: int | None = None  # the step whose state lacks its second part
        self._newest: LoopState | None = None  # the last part that was kept
        self._says_written: LoopState | None = None  # this, if it says that a write was sent behind it
        self._written_before: dict[int, str] = {}  # the digest of what was written to a unit before the forward
        if comeback is not None and comeback.state is not None and comeback.at_commit is None:
            self._newest = LoopState(step=comeback.step, part=AT_FORWARD, content=to_bytes(comeback.state))
            self._written_before = {index: digest_of(values) for index, values in comeback.state["written"]}
        self._too_large = False
        self.repeating = comeback is not None and comeback.at_commit is not None  # [Note: an unfinished iteration]

    def committing(self, step: int) -> None:
        """``step`` is committed next: keep the first part of the next one's state."""
        self._means, self._written_before = [], {}
        if self._comeback is not None and step < self._comeback.decided:
            self._put_back(self._comeback.at_commit)
        elif self._tracked.active:
            self._take(step)

    def _put_back(self, state: State | None) -> None:
        """See [Note: an unfinished iteration]."""
        assert self._comeback is not None
        assert state is not None
        self._tracked.put_back(state["tracked"])
        put_back(state, self._engine.store, self._engine.model, self._engine.device)
        self._reports.restore(state["reports"])
        self._open = self._comeback.decided
        self._newest = LoopState(step=self._open, part=AT_COMMIT, content=to_bytes(state))

    def _take(self, step: int) -> None:
        rest = {
            "began": self._began,
            "tracked": self._tracked.states(),
            "rng": generator_states(self._engine.device),
            "buffers": persistent_buffers(self._engine.model),
        }
        self._keep(step + 1, AT_COMMIT, self._after_tail() | rest)
        self._open = step + 1

    def begin_forward(self) -> None:
        """The model's forward begins: the iteration before has ended."""
        if self._repeated is not None and torch.is_grad_enabled():
            self._repeated.end()
            self._repeated = None
        if self._returns and torch.is_grad_enabled():
            self._returns = False
            assert self._comeback is not None
            assert self._comeback.state is not None
            set_generator_states(self._comeback.state[RNG_AT_FORWARD], self._engine.device)
        if self._open is not None and torch.is_grad_enabled():
            step, self._open, self.repeating = self._open, None, False
            written = self._written()
            rest = {
                "tracked": self._tracked.states(sources=False),
                RNG_AT_FORWARD: generator_states(self._engine.device),
                "buffers": persistent_buffers(self._engine.model),
                "written": written,
                "made": [asdict(write) for write in self._engine.store.written if write.version == step],
                "calls": [call_state(given) for given in self._means],
            }
            if self._keep(step, AT_FORWARD, self._after_tail() | rest):
                self._written_before = {index: digest_of(values) for index, values in written}

    def mean(self, given: MeanInput) -> tuple[float, ...]:
        """See ``ParameterStore.mean``; a rank that has come back gets what its earlier life got. Waits."""
        store = self._engine.store
        if self._repeated is None:
            if self._open is not None:
                self._means.append(given)
            return store.mean(given).result()
        means = []
        for number in self._repeated.next(given):
            store.means = number - 1
            means.append(store.mean(given).result())
        if len(set(map(repr, means))) > 1:
            raise self._repeated.unclear()
        return means[-1]

    def _written(self) -> list[tuple[int, torch.Tensor]]:
        """What the user has written since the last call that told the owners, by unit."""
        found = ((unit.index, self._engine.cache.writes.values(unit)) for unit in self._engine.units)
        return [(index, values) for index, values in found if values is not None]

    def sending(self, unit: int, values: torch.Tensor | None) -> None:
        """See ``SentWrites`` and [Note: a write in a step]."""
        if values is not None and self._open is None and digest_of(values) == self._written_before.get(unit):
            return
        step, newest = self._engine.step_state.step, self._newest
        if self._comeback is not None and step < self._comeback.decided:
            return  # it is not sent: the step is decided
        if newest is None:  # the loop's first step
            newest = LoopState(step=step, part=AT_COMMIT, content=to_bytes({"began": self._began}))
        if newest.step == step and newest is not self._says_written:
            name = self._engine.units[unit].layout.name
            self._keep(step, newest.part, {**from_bytes(newest.content), "wrote": name})
            self._says_written = self._newest

    def _after_tail(self) -> dict[str, Any]:
        return {
            "options": saved_options(self._optimizer.param_groups),
            "means": self._engine.store.means,
            "saves": self._engine.store.saves,
            "reports": self._reports.state(),
        }

    def _keep(self, step: int, part: int, state: dict[str, Any]) -> bool:
        """Whether it is not too large."""
        content = to_bytes(state)
        if len(content) <= MOST_LOOP_STATE:
            self._newest = LoopState(step=step, part=part, content=content)
            self._engine.store.keep(self._newest)
            return True
        if not self._too_large:
            self._too_large = True
            log.warning(
                "rank %d: the loop's state has %s, and at most %s are kept with each step: if this rank dies, the run "
                "goes on from its newest checkpoint. Track less, and give large tensors to save_checkpoint",
                self._engine.rank,
                format_bytes(len(content)),
                format_bytes(MOST_LOOP_STATE),
            )
        return False
