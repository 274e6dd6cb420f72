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
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from rayzero.checkpoint.state_values import to_bytes
from rayzero.engine.loop.comeback import Comeback, State, put_back
from rayzero.engine.loop.rank_state import generator_states, set_generator_states
from rayzero.engine.loop.repeated_means import RepeatedMeans, key_of
from rayzero.engine.loop.reports import RecentReports
from rayzero.engine.loop.tracked import Tracked
from rayzero.engine.optimizer.param_groups import saved_options
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.start.buffers import persistent_buffers
from rayzero.protocol.messages import AT_COMMIT, AT_FORWARD, MOST_LOOP_STATE, LoopState, MeanInput
from rayzero.quantities import format_bytes

log = logging.getLogger(__name__)

RNG_AT_FORWARD = "rng at forward"  # beside "rng": see [Note: two moments]


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
        self._returns = comeback is not None and comeback.state is not None  # and has not begun a forward
        self._means: list[str] = []  # keys of the calls of mean_over_ranks since the last commit
        self._repeated: RepeatedMeans | None = None  # [Note: calls before a forward] in repeated_means.py
        if comeback is not None and comeback.state is not None:
            self._repeated = RepeatedMeans(self._engine.rank, comeback.state["calls"], comeback.state["means"])
        self._open: int | None = None  # the step whose state lacks its second part
        self._too_large = False
        self.repeating = comeback is not None and comeback.at_commit is not None  # [Note: an unfinished iteration]

    def committing(self, step: int) -> None:
        """``step`` is committed next: keep the first part of the next one's state."""
        self._means = []
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
            rest = {
                "tracked": self._tracked.states(sources=False),
                RNG_AT_FORWARD: generator_states(self._engine.device),
                "buffers": persistent_buffers(self._engine.model),
                "written": self._written(),
                "calls": self._means,
            }
            self._keep(step, AT_FORWARD, self._after_tail() | rest)

    def mean(self, given: MeanInput) -> tuple[float, ...]:
        """See ``ParameterStore.mean``; a rank that has come back gets what its earlier life got. Waits."""
        store = self._engine.store
        if self._repeated is None:
            if self._open is not None:
                self._means.append(key_of(given))
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

    def _after_tail(self) -> dict[str, Any]:
        return {
            "options": saved_options(self._optimizer.param_groups),
            "means": self._engine.store.means,
            "saves": self._engine.store.saves,
            "reports": self._reports.state(),
        }

    def _keep(self, step: int, part: int, state: dict[str, Any]) -> None:
        content = to_bytes(state)
        if len(content) <= MOST_LOOP_STATE:
            self._engine.store.keep(LoopState(step=step, part=part, content=content))
        elif not self._too_large:
            self._too_large = True
            log.warning(
                "rank %d: the loop's state has %s, and at most %s are kept with each step: if this rank dies, the run "
                "goes on from its newest checkpoint. Track less, and give large tensors to save_checkpoint",
                self._engine.rank,
                format_bytes(len(content)),
                format_bytes(MOST_LOOP_STATE),
            )
