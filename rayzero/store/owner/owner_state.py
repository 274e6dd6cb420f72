"""What the calls of one owner's server share, and how they wait: on the event loop, holding no thread."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import StoreError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.lead.lead import StepLead
from rayzero.owner.service import ShardService
from rayzero.protocol.messages import COMPUTE, ModelSpec
from rayzero.protocol.ownership import owner_map
from rayzero.store.owner.notice_board import NoticeBoard
from rayzero.store.owner.peers.local import LocalPeer
from rayzero.store.owner.shared_memory import SharedOwner
from rayzero.store.owner.step_calls import StepCalls

T = TypeVar("T")

NEVER = 1 << 62  # a version


async def ended(future: Future[Any], timeout_s: float | None = None) -> bool:
    """Wait until ``future`` is done, holding no thread and never cancelling it; False after ``timeout_s``."""
    if future.done():
        return True
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    try:
        await asyncio.wait_for(done.wait(), timeout_s)
    except TimeoutError:
        return future.done()
    return True


async def result_of(future: Future[T]) -> T:
    """The result of a future that another thread completes."""
    await ended(future)
    return future.result()


def as_store_error(error: BaseException | None) -> StoreError:
    return error if isinstance(error, StoreError) else StoreError(f"an owner failed: {error!r}")


def _computing_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "rayzero-owner-work", initializer=use_torch_threads, initargs=(1,))


@dataclass
class OwnerState:
    """What the handlers of one prepared model share."""

    service: ShardService
    board: NoticeBoard
    poll_s: float  # how long a long poll waits before it answers "ask again"
    local: LocalPeer
    shared: SharedOwner | None = None  # where this owner shares memory with its host
    lead: StepLead | None = None  # set by connect_peers; used only by the owner of shard 0
    spec: ModelSpec | None = None  # set by the first attach
    leads: bool = False  # this owner has shard 0
    left: set[int] = field(default_factory=set)  # ranks that left on purpose
    stopping: bool = False
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    pool: ThreadPoolExecutor = field(default_factory=_computing_pool)  # freed by: OwnerServer.stop()

    @cached_property
    def steps(self) -> StepCalls:
        """What is asked within a step, whoever carries it."""
        return StepCalls(self.require_lead, self.local)

    async def compute(self, work: Callable[..., T], *args: Any) -> T:
        """Run what allocates or computes off the event loop. It must wait for no other client."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around every call: ``end_calls`` ends it with a StoreError."""
        task = asyncio.current_task()
        assert task is not None
        self.calls.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.stopping:
                raise  # the caller is gone
            raise StoreError(f"optimizer {self.service.owner} was stopped") from None
        finally:
            self.calls.discard(task)

    def end_calls(self) -> None:
        """End every call that runs now."""
        for task in self.calls:
            task.cancel()

    def take_spec(self, spec: ModelSpec) -> None:
        """Remember what the first rank attached with, and from then on tell everyone when the service fails."""
        if self.spec is not None:
            return
        owners = owner_map(spec, self.service.num_owners)
        self.spec, self.leads = spec, owners.owns(self.service.owner, 0)
        mine = owners.shards_of(self.service.owner)
        if mine:  # a version that no step will reach: the read ends exactly when the service has failed or is closed
            doomed = self.service.read(mine[0], NEVER, COMPUTE)
            doomed.add_done_callback(lambda read: self.board.abort(as_store_error(read.exception())))

    def require_lead(self) -> StepLead:
        """The lead; an error when this owner is not it."""
        if self.lead is None or not self.leads:
            raise StoreError(f"optimizer {self.service.owner} is not the lead owner, or no rank has attached to it")
        return self.lead

    def shard(self, index: int, unit: int | None = None) -> tuple[Shard, UnitLayout]:
        """A shard and its unit; an error when the layout has no such shard or it is not of ``unit``."""
        if self.spec is None:
            raise StoreError(f"optimizer {self.service.owner}: attach before anything else")
        shards = self.spec.layout.shards
        if not 0 <= index < len(shards) or unit not in (None, shards[index].unit):
            raise StoreError(f"optimizer {self.service.owner}: no shard {index} in unit {unit}")
        return shards[index], self.spec.layout.units[shards[index].unit]


class Repeats:
    """The calls that wait for others, by their request: asked again (a long poll, a retry), they are the same call.

    Knows a rank's last calls; not what they do."""

    def __init__(self, kept: int = 8) -> None:
        self._kept = kept
        self._calls: dict[int, dict[bytes, Future[Any]]] = defaultdict(dict)  # freed by: newer calls of the rank

    def once(self, rank: int, request: Any, start: Callable[[], Future[T]]) -> Future[T]:
        """The future of this request, started at its first arrival."""
        key = type(request).__name__.encode() + request.SerializeToString(deterministic=True)
        calls = self._calls[rank]
        if key not in calls:
            calls[key] = start()
            self._forget(calls)
        return calls[key]

    def _forget(self, calls: dict[bytes, Future[Any]]) -> None:
        done = [key for key, future in calls.items() if future.done()]
        for key in done[: max(0, len(calls) - self._kept)]:
            del calls[key]
