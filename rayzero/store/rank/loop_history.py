"""The states of a rank's loop, where they outlive the rank: with one owner, and in the rank's shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from rayzero.concurrency.futures import DONE, then
from rayzero.protocol.messages import LOOP_STEPS, LoopState
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.rank.memory.shared_memory import SharedRank
from rayzero.store.shm.loop_slab import loop_slabs
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.wire import translate


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
        """The states that earlier lives of this rank have left in shared memory, if their keeper is elsewhere."""
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
