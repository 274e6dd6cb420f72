"""Takes a rank's pushes to the owners: into its own memory, once each may be written there, and to senders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rayzero.concurrency.futures import DONE, Gather, fail, failed, future_raises, is_well, settle, when_all
from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import StoreClosedError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.gradient_sum import ScatteredUnit
from rayzero.protocol.messages import Contribution, Pushed
from rayzero.store.host.waits import PushOrder
from rayzero.store.rank.connection import Announce, Connection, GradientSender, Joined, Transfers, Versions, nothing
from rayzero.store.rank.gradient_region import GradientRegion
from rayzero.store.traffic import count_bytes, watch_gradients
from rayzero.telemetry.recorder import End


@dataclass(frozen=True)
class Route:
    """One unit's shards by owner, in shard order, and the transfers that reach each owner."""

    unit: UnitLayout
    parts: list[tuple[Transfers, list[Shard]]]
    away: list[tuple[GradientSender, list[Shard]]]  # by owner, those that gradients are sent to
    keeps: bool  # gradients go into this rank's memory first, also if they are only sent
    here_by: Mapping[str, int]  # elements whose gradients are read in this rank's memory, by transport
    shards: Sequence[int]  # all of them
    versions: Versions

    @property
    def here(self) -> int:
        """Elements whose owners, or the door that adds them up, read gradients in this rank's memory."""
        return sum(self.here_by.values())

    def content(self, version: int) -> int | None:
        """The version that the unit's content is from; None while a shard lacks ``version``."""
        return self.versions.content(self.shards, version)


def route_of(joined: Joined, unit: UnitLayout) -> Route:
    """The way to the owners of a unit."""
    by_owner: dict[int, list[Shard]] = {}
    for shard in joined.spec.layout.shards_by_unit[unit.index]:
        by_owner.setdefault(joined.shard_map.owner(shard.index), []).append(shard)
    parts = [(joined.transfers[owner], shards) for owner, shards in by_owner.items()]
    here_by = Counter[str]()
    for way, shards in parts:
        if way.owner not in joined.senders:
            here_by["host" if way.transport == "grpc" else way.transport] += sum(shard.numel for shard in shards)
    return Route(
        unit=unit,
        parts=parts,
        away=[(joined.senders[owner], shards) for owner, shards in by_owner.items() if owner in joined.senders],
        keeps=joined.keeps_pushed,
        here_by={transport: numel for transport, numel in here_by.items() if numel},
        shards=[shard.index for shard in joined.spec.layout.shards_by_unit[unit.index]],
        versions=joined.versions,
    )


class Pushes:
    """Writes one rank's pushes where owners read them, each in its turn and not before the range is free, and sends
    them to owners that do not read there.

    Knows pushes and their memory; not what owners do with them. A push that need not wait is written in the caller's
    thread, one that has to wait in a thread of its own.

    [Note: other readers] A push that was gathered in the region is sent from there to the unit's owners on other
    hosts. Until they have it, the unit's next push waits, because it would be added to the same bytes."""

    def __init__(self, connection: Connection, published: Callable[[int, int], Future[int]]) -> None:
        """``published``: of a unit and a version, done when the owners that read here have published it, and so have
        read the unit's gradients of the step before."""
        self.connection = connection  # of the present epoch
        self.region: GradientRegion | None = None  # this rank's memory, if owners read gradients there
        self._published = published
        self._joined: Joined | None = None
        self._routes: list[Route] = []  # by unit
        self._announce: Announce = nothing
        self._note: Announce = nothing
        self._released = False  # the pages of the region
        self._unwatch: End = lambda: None  # stops reporting the region
        self.announces_at_finish = False  # while it pushes, the rank needs all cores for itself
        self._unannounced: set[int] = set()  # units whose pushes wait for the finish
        self._free: dict[int, Future[int]] = {}  # unit -> done when its range is free for the step below
        self._steps: dict[int, int] = {}  # unit -> the newest step of its pushes
        self._sent: dict[int, Future[None]] = {}  # unit -> done when nothing is sent from its range any more
        self._order = PushOrder()
        self._worker = ThreadPoolExecutor(  # freed by: close()
            1, f"rayzero-rank{connection.rank}-push", initializer=use_torch_threads, initargs=(1,)
        )

    def join(self, joined: Joined, routes: list[Route]) -> None:
        """Push to these owners from now on. ``routes``: by unit."""
        region = joined.gradients
        if self.region is None and region is not None:
            self.region, self._announce, self._note = region, joined.announce, joined.note
            self.connection.on_bell(self.give_back)
            self._unwatch = watch_gradients(self.connection.recorder, lambda: region.held_bytes, joined.gradient_tier)
        self._joined, self._routes = joined, routes

    # ---- ranges of the region

    def landing(self, push: Contribution) -> Tensor | None:
        """Where the gradients may be gathered before ``push`` (1D, unit.numel elements, the unit's dtype); None where
        they may not, or not yet."""
        if self.region is None:
            return None
        self._take()
        self.give_back(push.unit)
        if self.region.is_stale(push) or not (is_well(self._when_free(push)) and self._when_sent(push).done()):
            return None
        return self.region.landing(push)

    def _when_free(self, push: Contribution) -> Future[int]:
        """Done when the push's range may be written; the owners are asked once a step."""
        if self._steps.get(push.unit, -1) < push.step:
            self._free[push.unit] = self._published(push.unit, push.step)
            self._steps[push.unit] = push.step
        return self._free[push.unit]

    def _when_sent(self, push: Contribution) -> Future[None]:
        """Done when nothing is being sent from the push's range."""
        return self._sent.get(push.unit, DONE)

    def give_back(self, wanted: int | None = None) -> None:
        """Give back the ranges of pushes that nobody needs any more; any thread may. A successor of an owner must not
        look there: so it is noted before another push can have the range. ``wanted``: a unit that is to have one;
        None: every unit."""
        if self.region is None:
            return
        for unit, count in self.region.held(wanted):
            pushed = self.region.given(unit, count)
            if pushed is None or self.is_needed(unit, pushed) or not self._sent.get(unit, DONE).done():
                continue
            self.region.give_back(unit, pushed, partial(self._note, unit))

    def is_needed(self, unit: int, pushed: Pushed) -> bool:
        """Whether an owner, on this host or another, has not read what was pushed of a unit."""
        if self.connection.in_totals(unit, pushed):
            return False
        return self._routes[unit].content(pushed.step + 1) is None

    def release(self) -> None:
        """See ``ParameterStore.release``."""
        if self.region is not None and self._joined is not None and self._joined.pages is not None:
            self.give_back()
            self._joined.pages.release()
            self._released = True

    def _take(self) -> None:
        """Have pages for gradients again. Several threads may call it at once."""
        if self._released and self._joined is not None and self._joined.pages is not None:
            self._joined.pages.take()
            self._released = False

    # ---- a push

    def push(
        self, route: Route, push: Contribution, grads: Tensor | ScatteredUnit, over: Callable[[], None]
    ) -> Future[None]:
        """Take one unit's gradients to its owners; see ``ParameterStore.push``. ``over``: called once they are there.

        The future raises StoreClosedError for a push that still waits for its turn at ``close``."""
        if route.here and not route.away:
            written = self._write_here(route, push, grads, DONE)
            written.add_done_callback(lambda done: over() if is_well(done) else None)
            return written
        assert isinstance(grads, Tensor), "all owners of a rank that pushes scattered gradients are in its process"
        if route.keeps and route.away:
            return self._push_kept(route, push, grads, over)
        gather = Gather((len(route.away) > 0) + (route.here > 0), over)  # none of a unit without elements
        sent = self._send(gather, route, push, grads) if route.away else DONE
        if route.here:
            written = self._write_here(route, push, grads, sent)
            written.add_done_callback(lambda done: gather.end(done.exception()))
        return gather.future

    def _push_kept(self, route: Route, push: Contribution, grads: Tensor, over: Callable[[], None]) -> Future[None]:
        """Write the gradients into this rank's memory, and only then send them: what an owner may have is kept here
        until its version is published, so that the owner's successor can have it again."""
        gather, sent = Gather(1, over), Future[None]()
        written = self._write_here(route, push, grads, sent)

        def send(_: object) -> None:
            sending = self._send(gather, route, push, grads)
            sending.add_done_callback(lambda _: settle(sent, None))

        def give_up(error: BaseException) -> None:
            settle(sent, None)
            gather.end(error)

        when_all([written], send, give_up)
        return gather.future

    def _send(self, gather: Gather, route: Route, push: Contribution, grads: Tensor) -> Future[None]:
        """Send to owners on other hosts, as one part of ``gather``. The future is done, never failed, once nothing
        reads ``grads`` any more."""
        sent = Future[None]()

        def send() -> Future[None]:
            away = self._routes[route.unit.index].away
            sending = Gather(len(away))
            for sender, shards in away:
                sender.push(sending, route.unit, shards, push, grads)
            return sending.future

        def over(all_sent: Future[None]) -> None:
            settle(sent, None)
            gather.end(all_sent.exception())

        self.connection.epochs.make(send).add_done_callback(over)
        return sent

    @future_raises
    def _write_here(
        self, route: Route, push: Contribution, grads: Tensor | ScatteredUnit, sent: Future[None]
    ) -> Future[None]:
        """Write a push into this rank's memory, where owners of its host read it, and count its bytes. ``sent``: done,
        never failed, when no sender reads ``grads`` any more."""

        def count(done: Future[None]) -> None:
            if is_well(done) and route.here:
                for transport, numel in route.here_by.items():
                    count_bytes(self.connection.recorder, "push", transport, numel, grads.dtype)

        self._take()
        written = self._write_when_free(push, grads, sent)
        written.add_done_callback(count)
        return written

    def _write_when_free(self, push: Contribution, grads: Tensor | ScatteredUnit, sent: Future[None]) -> Future[None]:
        """Write a push once its range is free; one that need not wait is written before this returns."""
        assert self.region is not None
        if self.region.is_stale(push):  # what a repeat would wait for may be long gone
            return DONE
        turn, free = self._order.turn(0, push), self._when_free(push)
        if is_well(turn) and is_well(free) and self._when_sent(push).done():
            error = self._write(self.region, push, grads, sent)
            return DONE if error is None else failed(error)
        done: Future[None] = Future()
        write = partial(self._write_later, self.region, push, grads, sent, done)

        def its_turn(_: object) -> None:  # only now is it known what was gathered in the range
            self._when_sent(push).add_done_callback(lambda _: write())

        when_all([turn, free], its_turn, partial(fail, done))
        return done

    def _write_later(
        self,
        region: GradientRegion,
        push: Contribution,
        grads: Tensor | ScatteredUnit,
        sent: Future[None],
        done: Future[None],
    ) -> None:
        def write() -> None:
            error = self._write(region, push, grads, sent)
            settle(done, None) if error is None else fail(done, error)

        try:
            self._worker.submit(write)
        except RuntimeError:  # shut down by close()
            fail(done, StoreClosedError(f"rank {push.rank} closed its store"))

    def _write(
        self, region: GradientRegion, push: Contribution, grads: Tensor | ScatteredUnit, sent: Future[None]
    ) -> Exception | None:
        """Write a push and announce it; returns its error, if any."""
        try:
            if isinstance(grads, Tensor) and region.holds(push.unit, grads):
                self._sent[push.unit] = sent
            pushed = region.put(push, grads)
            if pushed and self.announces_at_finish:
                self._note(push.unit, pushed)
                self._unannounced.add(push.unit)
            elif pushed:
                self._tell(region, push.unit, pushed)
        except Exception as exc:  # whatever it is, the push's future raises it
            self._order.end(0, push, exc)
            return exc
        self._order.end(0, push, None)
        return None

    def _tell(self, region: GradientRegion, unit: int, pushed: Sequence[Pushed]) -> None:
        self._announce(unit, pushed)
        region.announced(unit)

    def announce(self) -> None:
        """Announce the pushes that wait for the rank's finish, which comes next."""
        region, units, self._unannounced = self.region, self._unannounced, set()
        for unit in units:
            assert region is not None
            self._tell(region, unit, region.pushed(unit))

    def close(self) -> None:
        """Write the pushes that no longer wait, fail the others, then end the thread. Idempotent."""
        self._unwatch()
        self._order.fail(StoreClosedError("the store was closed before the push had its turn"))
        self._worker.shutdown(wait=True)
