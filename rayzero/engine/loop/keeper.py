"""Keeps, with every step, what the loop needs to go on from there: a rank that dies is started again, and repeats only
its last step.

[Note: two moments] ``optimizer.step()`` is in the middle of a loop's iteration: the scheduler and the loss scaler are
stepped after it, and the next batch is taken before the next forward. So no single moment has the state with which an
iteration begins. The random generators, the buffers and the sources of data (objects that can be iterated) are taken as
the step is committed; generators, buffers, parameter groups and all other objects once more as the next forward with
gradients begins. A rank that comes back has the first generators from prepare() on, to draw its batch, and the second
ones in its first forward: a loop that makes the iterator of a DataLoader anew draws a number for it. (What a loop draws
or takes between ``step()`` and the end of its iteration is not seen by the next batch: validation should use a
generator of its own.) Whatever else the loop does between prepare() and its first forward, its former life had done:
what it begins with in every life (a load, a write, an added group), and what it does at an iteration's beginning. (A
forward before track() tries something out, and is no step's; numbers that were drawn before track() are drawn anew.) So
it is not done twice: the owners get no write, nothing is reported, and the forward begins with the state, whatever
became of it since.

[Note: an unfinished iteration] A rank may die after its commit and before the next forward, perhaps in a save. Its new
life then does that iteration again, over a store that answers for the decided step (``RankStore.repeat``). When it
comes to ``optimizer.step()``, everything is put back to what it was there, so that a loss that was computed with newer
weights leaves no trace; from there on it is the iteration's end, done once. Only the sources of data stay where the
repeat has left them, so it must have had as many forwards.

[Note: calls before a forward] The lead pairs the ranks' nth calls of ``mean_over_ranks``. Of those between
``optimizer.step()`` and the next forward, some end an iteration, and a rank that repeats the next one does not make
them; others begin the next one, and it does. Nothing in the loop says where the border is. But before its forward the
new life makes exactly the calls behind the border, and with the same values, because it computes the same: its calls
tell where they begin. Where several places fit (two flags that are 0), the lead must have one result for all of them.
If the lead has died, too, another rank may still wait for a call that the new life does not make again. So the new life
first tells the lead what its former life gave to all of them (``Comeback.restore``), and waits for no mean. It also
tells the lead which writes were made before the forward, and, when it repeats a write, whether it is published already.

[Note: a write in a step] What is written after the state of a step was taken, and reaches the owners before the next
state (with a clip, ``step()`` or a save), changes the version that a repeat begins with: a forward would compute with
other weights, and ``p.mul_(0.5)`` would be made twice. So before such a write is sent, the state says that it was, and
a rank that comes back there raises StateLostError: the run goes on from its newest checkpoint. What was written before
the forward is in the state: a repeat sends the same.

[Note: gradients that are dropped] After a clip, zero_grad() drops gradients with whose norm the lead has answered all
ranks. If one of several ranks repeats the step, the others do not, and the lead would make the next norm of its first
gradients and of their second ones. So the state says that it was so, and the rank raises StateLostError.
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
from rayzero.engine.autograd.touch import requires_grad_of
from rayzero.engine.loop.comeback import (
    DROPPED,
    WROTE,
    Comeback,
    State,
    call_state,
    generator_states,
    put_back,
    set_generator_states,
)
from rayzero.engine.loop.tracked import RecentReports, Tracked
from rayzero.engine.optimizer.param_groups import put_options, saved_options
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.start.buffers import ChangingBuffers
from rayzero.errors import StateLostError
from rayzero.protocol.messages import (
    AT_COMMIT,
    AT_FORWARD,
    COMPUTE,
    GROUP,
    MOST_LOOP_STATE,
    LoopState,
    MeanInput,
    digest_of,
)
from rayzero.quantities import count, format_bytes

log = logging.getLogger(__name__)

_MARK = 4096  # bytes of a part that are left for the name of a unit that is written to
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
        self._engine.cache.writes.loop = self
        state = None if comeback is None else comeback.state
        at_commit = None if comeback is None else comeback.at_commit
        self.returning = state is not None  # [Note: two moments]
        self._back_to = b"" if state is None else to_bytes(state)
        self._means: list[MeanInput] = []  # of the calls of mean_over_ranks since the last commit
        self._repeated: RepeatedMeans | None = None  # [Note: calls before a forward]
        if comeback is not None and state is not None:
            made = [key_of(given) for _, given in comeback.means]
            self._repeated = RepeatedMeans(self._engine.rank, made, state["means"])
        known = {name for former in (state, at_commit) if former is not None for name in former["buffers"]}
        self._buffers = ChangingBuffers(self._engine.model, known)
        units = [unit for unit in self._engine.units if unit.layout.trainable]
        self._trainable = [param for unit in units for param in unit.params]
        self._forwards = 0  # since the last commit, with gradients and in training mode (a validation may have some)
        self._open: int | None = None  # the step whose state lacks its second part
        self._newest: LoopState | None = None  # the last part that was kept
        self._marks: set[str] = set()  # that it has
        self._written_before: dict[int, str] = {}  # the digest of what was written to a unit before the forward
        if comeback is not None and state is not None and at_commit is None:
            self._newest = LoopState(step=comeback.step, part=AT_FORWARD, content=self._back_to)
            self._written_before = {index: digest_of(values) for index, values in state["written"]}
        self._too_large = False
        self.repeating = at_commit is not None  # [Note: an unfinished iteration]

    def committing(self, step: int) -> None:
        """``step`` is committed next: keep the first part of the next one's state."""
        self._means, self._written_before = [], {}
        if self._comeback is not None and step < self._comeback.decided:
            self._put_back(self._comeback.at_commit)
        elif self._tracked.active:
            self._take(step)
        self._forwards = 0

    def _put_back(self, state: State | None) -> None:
        """See [Note: an unfinished iteration]."""
        assert self._comeback is not None
        assert state is not None
        if state["forwards"] != self._forwards:
            raise StateLostError(
                f"rank {self._engine.rank} has died and come back, but its loop cannot repeat the end of step "
                f"{self._engine.step_state.step} alone: it comes to step() after {count(self._forwards, 'forward')} in "
                f"training mode, and came there after {state['forwards']} before it died; let nothing that is "
                "computed with the weights decide which batches a step takes, or resume the run from its newest "
                "checkpoint"
            )
        put_back(state, self._engine.store, self._engine.model, self._engine.device)
        self._put_back_rest(state)
        self._open = self._comeback.decided
        self._newest = LoopState(step=self._open, part=AT_COMMIT, content=to_bytes(state))

    def _put_back_rest(self, state: State) -> None:
        """Put back tracked objects, options and reports."""
        self._tracked.put_back(state["tracked"])
        groups, options = self._optimizer.param_groups, state["options"]
        if len(groups) != len(options):
            raise StateLostError(
                f"rank {self._engine.rank} has died and come back, but its loop cannot repeat its step alone: the "
                f"optimizer had {len(options)} parameter groups, and now it has {len(groups)}; call add_param_group() "
                "between prepare() and the loop, or resume the run from its newest checkpoint"
            )
        put_options(groups, options)
        self._reports.restore(state["reports"])

    def tracking(self) -> None:
        """The loop has called ``track``: what it draws next was drawn with these generators in its former life."""
        if self.returning:
            set_generator_states(from_bytes(self._back_to)["rng"], self._engine.device)

    def _begin_again(self) -> None:
        """The first forward of a rank that has come back begins: see [Note: two moments]."""
        assert self._comeback is not None
        state, engine = from_bytes(self._back_to), self._engine  # objects may have changed what they were given
        self.returning, self._back_to = False, b""
        self._put_back_rest(state)
        for param, on in zip(self._trainable, state["flags"].tolist(), strict=True):
            if param.requires_grad != on:
                param.requires_grad_(on)
        engine.step_state.carry(state["carried"])
        engine.cache.rewrite(dict(state["written"]))
        engine.cache.writes.came_back_at = self._comeback.decided
        put_back({**state, "rng": state[RNG_AT_FORWARD]}, engine.store, engine.model, engine.device)

    def _take(self, step: int) -> None:
        rest = {
            "began": self._began,
            "tracked": self._tracked.states(),
            "rng": generator_states(self._engine.device),
            "forwards": self._forwards,
            "buffers": self._buffers.values(),
        }
        self._keep(step + 1, AT_COMMIT, self._after_tail() | rest)
        self._open = step + 1

    def begin_forward(self) -> None:
        """The model's forward begins: with gradients, and after ``track``, the iteration before has ended."""
        if not (torch.is_grad_enabled() and self._tracked.active):
            return
        self._forwards += self._engine.model.training
        if self._repeated is not None:
            self._repeated.end()
            self._repeated = None
        if self.returning:
            self._begin_again()
        if self._open is not None:
            step, self._open, self.repeating = self._open, None, False
            written = self._written()
            rest = {
                "tracked": self._tracked.states(sources=False),
                RNG_AT_FORWARD: generator_states(self._engine.device),
                "buffers": self._buffers.values(),
                "written": written,
                "flags": requires_grad_of(self._trainable),
                "carried": self._engine.step_state.carried(),
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

    def sending(self, unit: int, kind: str, values: torch.Tensor) -> bool:
        """See ``LoopMoments`` and [Note: a write in a step]."""
        if self.returning or self._repeats_decided:
            return False
        known = self._written_before.get(unit) if kind == COMPUTE else None
        if kind == GROUP or (known is not None and self._open is None and digest_of(values) == known):
            return True  # the same when it is made again
        self._mark(WROTE, f"written to {self._engine.units[unit].layout.name!r}")
        return True

    @property
    def _repeats_decided(self) -> bool:
        return self._comeback is not None and self._engine.step_state.step < self._comeback.decided

    def dropping(self) -> None:
        """See [Note: gradients that are dropped]."""
        if self._repeats_decided:
            return
        self._mark(DROPPED, "dropped gradients whose norm all ranks had had")

    def _mark(self, mark: str, what: str) -> None:
        """Let the newest state of the open step say that it cannot be repeated, and why."""
        step, newest = self._engine.step_state.step, self._newest
        if newest is None:  # the loop's first step
            newest = LoopState(step=step, part=AT_COMMIT, content=to_bytes({"began": self._began}))
        if newest.step == step and mark not in self._marks:
            self._keep(step, newest.part, {**from_bytes(newest.content), mark: what})

    def _after_tail(self) -> dict[str, Any]:
        return {
            "options": saved_options(self._optimizer.param_groups),
            "means": self._engine.store.means,
            "saves": self._engine.store.saves,
            "reports": self._reports.state(),
        }

    def _keep(self, step: int, part: int, state: dict[str, Any]) -> bool:
        """Returns whether it is small enough."""
        content, most = to_bytes(state), MOST_LOOP_STATE - _MARK
        self._marks = {WROTE, DROPPED} & state.keys()
        if len(content) <= most or self._marks:
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
                format_bytes(most),
            )
        return False
