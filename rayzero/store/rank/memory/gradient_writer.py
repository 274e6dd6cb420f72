"""Writes pushes into a rank's own memory: decides when each may be written, and announces it to the owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from torch import Tensor

from rayzero.concurrency.futures import DONE, fail, failed, future_raises, is_well, settle, when_all
from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import StoreClosedError
from rayzero.protocol.messages import Contribution, Pushed
from rayzero.protocol.scattered import ScatteredUnit
from rayzero.store.host.push_order import PushOrder
from rayzero.store.rank.memory.gradient_region import GradientRegion

Announce = Callable[[int, Sequence[Pushed]], None]  # of a unit, what there is of it


class GradientWriter:
    """Writes one rank's pushes, each in its turn and not before the range is free.

    Knows pushes and their memory; not owners. A push that need not wait is written in the caller's thread, one that
    has to wait in the writer's.

    [Note: other readers] A push that was gathered in the region is sent from there to the unit's owners on other
    hosts. Until they have it, the unit's next push waits, because it would be added to the same bytes."""

    def __init__(
        self,
        region: GradientRegion,
        name: str,
        *,
        published: Callable[[int, int], Future[int]],
        need: Callable[[int, Pushed], bool],
        announce: Announce,
        note: Announce,
    ) -> None:
        """``published``: of a unit and a version, done when the owners that read here have published it, and so have
        read the unit's gradients of the step before. ``need``: whether an owner, on this host or another, has not read
        what was pushed of a unit. ``announce``, ``note``: see ``Joined``."""
        self.region = region
        self._published, self._need, self._announce, self._note = published, need, announce, note
        self._free: dict[int, Future[int]] = {}  # unit -> done when its range is free for the step below
        self._steps: dict[int, int] = {}  # unit -> the newest step of its pushes
        self._sent: dict[int, Future[None]] = {}  # unit -> done when nothing is sent from its range any more
        self._order = PushOrder()
        self._worker = ThreadPoolExecutor(1, f"{name}-push", initializer=use_torch_threads, initargs=(1,))

    def _when_free(self, push: Contribution) -> Future[int]:
        """Done when the push's range may be written; the owners are asked once a step."""
        if self._steps.get(push.unit, -1) < push.step:
            self._free[push.unit] = self._published(push.unit, push.step)
            self._steps[push.unit] = push.step
        return self._free[push.unit]

    def _when_sent(self, push: Contribution) -> Future[None]:
        """Done when nothing is being sent from the push's range."""
        return self._sent.get(push.unit, DONE)

    def landing(self, push: Contribution) -> Tensor | None:
        """Where the gradients may be gathered before ``push`` (1D, unit.numel elements, the unit's dtype); None where
        they may not, or not yet."""
        self.give_back(push.unit)
        if self.region.is_stale(push) or not (is_well(self._when_free(push)) and self._when_sent(push).done()):
            return None
        return self.region.landing(push)

    def give_back(self, wanted: int | None = None) -> None:
        """Give back the ranges of pushes that nobody needs any more; any thread may. A successor of an owner must not
        look there: so it is noted before another push can have the range. ``wanted``: a unit that is to have one;
        None: every unit."""
        for unit, count in self.region.held(wanted):
            pushed = self.region.given(unit, count)
            if pushed is None or self._need(unit, pushed) or not self._sent.get(unit, DONE).done():
                continue
            self.region.give_back(unit, pushed, partial(self._note, unit))

    @future_raises
    def push(self, push: Contribution, grads: Tensor | ScatteredUnit, sent: Future[None] = DONE) -> Future[None]:
        """Write a push once its range is free; one that need not wait is written before this returns.

        ``grads``: 1D, unit.numel elements, the unit's dtype, or scattered. ``sent``: done, never failed, when no sender
        reads ``grads`` any more. The future raises StoreClosedError for a push that still waits at ``close``."""
        if self.region.is_stale(push):  # what a repeat would wait for may be long gone
            return DONE
        turn, free = self._order.turn(0, push), self._when_free(push)
        if is_well(turn) and is_well(free) and self._when_sent(push).done():
            error = self._write(push, grads, sent)
            return DONE if error is None else failed(error)
        done: Future[None] = Future()

        def its_turn(_: object) -> None:  # only now is it known what was gathered in the range
            self._when_sent(push).add_done_callback(lambda _: self._write_later(push, grads, sent, done))

        when_all([turn, free], its_turn, partial(fail, done))
        return done

    def _write_later(
        self, push: Contribution, grads: Tensor | ScatteredUnit, sent: Future[None], done: Future[None]
    ) -> None:
        def write() -> None:
            error = self._write(push, grads, sent)
            settle(done, None) if error is None else fail(done, error)

        try:
            self._worker.submit(write)
        except RuntimeError:  # shut down by close()
            fail(done, StoreClosedError(f"rank {push.rank} closed its store"))

    def _write(self, push: Contribution, grads: Tensor | ScatteredUnit, sent: Future[None]) -> Exception | None:
        """Write a push and announce it; returns its error, if any."""
        try:
            if isinstance(grads, Tensor) and self.region.holds(push.unit, grads):
                self._sent[push.unit] = sent
            pushed = self.region.put(push, grads)
            if pushed:
                self._announce(push.unit, pushed)
                self.region.announced(push.unit)
        except Exception as exc:  # whatever it is, the push's future raises it
            self._order.end(0, push, exc)
            return exc
        self._order.end(0, push, None)
        return None

    def close(self) -> None:
        """Write the pushes that no longer wait, fail the others, then end the thread. Idempotent."""
        self._order.fail(StoreClosedError("the store was closed before the push had its turn"))
        self._worker.shutdown(wait=True)
