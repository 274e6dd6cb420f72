"""What a rank can say to successors: to a lead's, what it has asked and was answered; to a keeper's, the states of its
loop.

[Note: asked or answered] A rank asks again what it has had no answer to. What it has had an answer to it does not ask
again, but other ranks may still wait for the same answer: so the successor of a lead has to know it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rayzero.concurrency.futures import DONE, then
from rayzero.errors import RayZeroError
from rayzero.protocol.messages import (
    LOOP_STEPS,
    BegunSave,
    CheckpointInfo,
    Decision,
    EndedSave,
    FinishReport,
    LoopState,
    MeanInput,
    Norm,
    StepInputs,
    Told,
    ToldAttempt,
    ToldStep,
    Write,
)
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.rank.memory.shared_memory import SharedRank
from rayzero.store.shm.loop_slab import loop_slabs
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.wire import translate

# ---- the lead ----------------------------------------------------------------------------------------------------

_MEANS = 8  # a rank makes its means one after the other, so that the last one would do


class LeadHistory:
    """Notes a rank's calls to the lead, each before it is sent, and the answers as they come. Thread-safe.

    Knows calls and answers; not how they travel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, ToldStep] = {}  # freed by: a later step's norm, or the decision
        self._means: dict[int, MeanInput] = {}  # by number
        self._saved: EndedSave | None = None
        self._begun: BegunSave | None = None

    def told(self) -> Told:
        """All of it."""
        with self._lock:
            steps = tuple(self._steps[step] for step in sorted(self._steps))
            return Told(steps=steps, means=tuple(self._means.items()), saved=self._saved, begun=self._begun)

    # ---- calls

    def finish(self, report: FinishReport, inputs: StepInputs | None) -> None:
        """The rank asks for a norm."""
        with self._lock:
            step = self._step(report.step)
            kept = ToldAttempt() if report.clamp is None else step.attempt
            attempt = replace(kept, reports=(*kept.reports, report), inputs=inputs)
            self._steps[report.step] = replace(step, attempt=attempt)

    def commit(self, step: int, inputs: StepInputs) -> None:
        """The rank commits a step that it has finished."""
        with self._lock:
            told = self._step(step)
            self._steps[step] = replace(told, attempt=replace(told.attempt, inputs=inputs))

    def mean(self, number: int, given: MeanInput) -> None:
        """The rank asks for a mean."""
        with self._lock:
            self._means[number] = given
            self._means.pop(number - _MEANS, None)

    def _step(self, step: int) -> ToldStep:
        return self._steps.get(step) or ToldStep(step=step)

    # ---- answers: each is noted before the call that waits for it returns

    def normed(self, norm: Norm) -> Norm:
        """A norm of a step is here, so the steps before are decided."""
        with self._lock:
            told = self._step(norm.step)
            attempt = replace(told.attempt, norms=(*told.attempt.norms, norm))
            self._steps = {step: each for step, each in self._steps.items() if step > norm.step}
            self._steps[norm.step] = replace(told, attempt=attempt)
        return norm

    def decided(self, decision: Decision) -> Decision:
        """A step is decided."""
        with self._lock:
            self._steps = {step: each for step, each in self._steps.items() if step > decision.step}
        return decision

    def discarded(self, step: int) -> None:
        """The present attempt at a step is discarded."""
        with self._lock:
            told = self._step(step)
            self._steps[step] = replace(told, discards=told.discards + 1, discarded=told.attempt, attempt=ToldAttempt())

    def written(self, write: Write) -> None:
        """A write is made, so the steps before are decided."""
        with self._lock:
            told = self._step(write.version)
            self._steps = {step: each for step, each in self._steps.items() if step > write.version}
            self._steps[write.version] = replace(told, written=(*told.written, write))

    def begun(self, number: int, step: int, directory: Path) -> None:
        """A save has begun, and the training goes on."""
        with self._lock:
            self._begun = BegunSave(number=number, step=step, directory=str(directory))

    def saved(self, number: int, step: int, directory: Path, outcome: CheckpointInfo | RayZeroError) -> None:
        """A save has ended."""
        with self._lock:
            self._saved = EndedSave(number=number, step=step, directory=str(directory), outcome=outcome)


# ---- the loop ----------------------------------------------------------------------------------------------------


class Keeper(Protocol):
    """The owner that keeps the states of a rank's loop."""

    def ask(self, method: str, request: Any) -> Future[Any]:
        """Make a call to it; does not block. The future has the answer."""
        ...


class LoopHistory:
    """What one rank has kept of its loop, and where. It goes on with the owners of the next epoch.

    Its keeper maps the rank's slab or gets the bytes. A rank that shares memory writes its slab in any case: its next
    life finds that, also if the keeper dies too. Knows steps and parts; not what is in a state."""

    def __init__(
        self,
        rank: int,
        keeper: Keeper,
        plan: SharedPlan,
        shared: SharedRank | None,
        directory: Path | None,
        *,
        maps: bool,
        back_at: int | None,
    ) -> None:
        """``shared``: this rank's shared memory, if it has any. ``directory``: where former lives may have left theirs;
        None: nowhere. ``maps``: the keeper maps the slab. ``back_at``: the step with which this rank has come back, and
        before which its former lives have left memory; None: it never died."""
        self._rank, self._keeper, self._plan = rank, keeper, plan
        self._shared, self._directory, self._maps, self._back_at = shared, directory, maps, back_at
        self._sent: list[pb.KeepRequest] = []  # what the keeper has, for a successor

    def keep(self, state: LoopState) -> Future[None]:
        """See ``Connection.keep``. Raises MemoryPlanError if there is no room."""
        new = None if self._shared is None else self._shared.keep(state)
        self._forget_former_lives(state.step)
        if self._maps:
            if new is not None:  # rare: the owner maps it before this rank may die
                self._sent = [pb.KeepRequest(rank=self._rank, slab=new)]
                self._keeper.ask("Keep", self._sent[0]).result()
            return DONE
        request = pb.KeepRequest(rank=self._rank, state=translate.loop_state_to_pb(state))
        self._sent = [*(sent for sent in self._sent if sent.state.step >= state.step - 1), request]
        return then(self._keeper.ask("Keep", request), lambda _: None)

    def _forget_former_lives(self, step: int) -> None:
        if self._shared is not None and self._back_at is not None and step >= self._back_at + 3:
            # a step is decided behind theirs, so all that they pushed is applied, and this one's loop has newer states
            self._shared.remove_former_lives()
            self._back_at = None

    def kept(self) -> list[LoopState]:
        """See ``Connection.kept``."""
        answer = self._keeper.ask("GetKept", pb.GetKeptRequest(rank=self._rank)).result()
        return newest([*self._left_here(), *map(translate.loop_state_from_pb, answer.states)])

    def _left_here(self) -> list[LoopState]:
        """The states that earlier lives of this rank have left in shared memory, if their keeper is on another host."""
        if self._directory is None or self._maps:
            return []
        found = loop_slabs(self._plan, f"rank {self._rank}", self._directory, lambda rank: rank == self._rank)
        states = [state for slab in found.get(self._rank, []) for state in slab.states()]
        for slab in found.get(self._rank, []):
            slab.close()
        return states

    # ---- another keeper

    def is_with(self, keeper: Keeper) -> bool:
        """Whether this is the keeper."""
        return keeper is self._keeper

    def give(self, send: Callable[[pb.KeepRequest], object]) -> None:
        """Give the keeper's successor what the keeper had. ``send``: sends it one request, and blocks until it has
        answered."""
        for sent in self._sent:
            send(sent)

    def enter(self, keeper: Keeper) -> None:
        """An owner of the next epoch is the keeper from now on; it has nothing before ``give_all``."""
        self._keeper = keeper

    def give_all(self, plan: SharedPlan, *, maps: bool) -> None:
        """Give the keeper of another epoch everything that is kept; blocks. ``plan``: of this epoch. ``maps``: see
        ``__init__``."""
        self._plan, self._maps = plan, maps
        path, states = (None, []) if self._shared is None else self._shared.kept()
        if path is not None and maps:
            self._sent = [pb.KeepRequest(rank=self._rank, slab=path)]
        elif path is not None:
            self._sent = [pb.KeepRequest(rank=self._rank, state=translate.loop_state_to_pb(each)) for each in states]
        for sent in self._sent:
            self._keeper.ask("Keep", sent).result()


def newest(states: Iterable[LoopState]) -> list[LoopState]:
    """Those of the newest ``LOOP_STEPS`` steps, in their order, each part once: the last one among ``states``."""
    parts = {(state.step, state.part): state for state in states}
    oldest = max((step for step, _ in parts), default=0) - LOOP_STEPS
    return [state for (step, _), state in sorted(parts.items()) if step > oldest]
