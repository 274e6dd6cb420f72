"""Brings shards from owners elsewhere into the memory of this host, each once for all of its ranks.

A rank that needs a shard looks at its word (store/shm/claims.py): it reads what is there, fetches what nobody fetches,
and waits for what another rank fetches. That one may die: then its claim is void, and whoever waits fetches. If it
lives and receives nothing for a while, a rank that has memory of its own for the shard fetches it there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from rayzero.concurrency.futures import fail, failed, settle, settled
from rayzero.concurrency.gather import Gather
from rayzero.errors import RayZeroError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.quantities import count
from rayzero.store.host.stall import StallWatch
from rayzero.store.host.transfers.wire import WireTransfers
from rayzero.store.rank.memory.relay_memory import RelayMemory
from rayzero.store.shm.claims import Move, next_move
from rayzero.store.shm.listener import Listener
from rayzero.store.wire.payload import CHUNK_BYTES

_LOOK_S = 0.25  # how often a rank that waits looks for fetchers that have died, or receive nothing
_SLOWEST_BYTES_PER_S = 1e6  # of a link
_QUIET_S = 0.5 + CHUNK_BYTES / _SLOWEST_BYTES_PER_S  # how long a fetcher may receive nothing: more than a chunk takes


@dataclass(eq=False, slots=True, kw_only=True)
class _Claim:
    """Shards that this rank fetches for its host."""

    shards: list[Shard]
    version: int
    outdated: set[int] = field(default_factory=set)  # of the shards: what comes is not what owners have by now


@dataclass(eq=False, slots=True, kw_only=True)
class _Wait:
    """Shards of one owner that this rank needs."""

    wire: WireTransfers
    unit: UnitLayout
    left: list[Shard]
    version: int
    content: int
    passes: bool  # it can be told to fetch a shard elsewhere
    passed: list[Shard] = field(default_factory=list)
    done: Future[list[Shard]] = field(default_factory=Future)
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)  # by fetcher: what it had received, and since when


class HostFetches:
    """What one rank fetches for its host, and waits for.

    Knows shards, versions and claims; not what a rank does with the bytes. Thread-safe: it settles futures and starts
    fetches outside its lock. One thread waits on the host's bell."""

    def __init__(
        self,
        rank: int,
        memory: RelayMemory,
        watch: StallWatch,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: returns seconds."""
        self.memory, self._rank, self._watch, self._clock = memory, rank, watch, clock
        self._lock = threading.Lock()
        self._waits: list[_Wait] = []
        self._claims: list[_Claim] = []
        self._error: RayZeroError | None = None
        self._listener = Listener(memory.bell, self._look, f"rayzero-rank{rank}-host", _LOOK_S)

    def bring(
        self,
        wire: WireTransfers,
        unit: UnitLayout,
        shards: Sequence[Shard],
        version: int,
        content: int,
        *,
        passes: bool,
    ) -> Future[list[Shard]]:
        """Bring published shards of one owner into the host's memory; does not block.

        wire: fetches them. content: the bytes have not changed since this version. passes: the caller has other memory
        for them. Returns a future of the shards that the caller has to fetch there; the others can be read until its
        finish. It fails with the error of the fetch."""
        wait = _Wait(wire=wire, unit=unit, left=list(shards), version=version, content=content, passes=passes)
        with self._lock:
            if self._error is not None:
                return failed(self._error)
            self._waits.append(wait)
        self._advance([wait])
        if not wait.done.done():
            awaited = f"{unit.name} v{version}, which another rank of this host fetches"
            self._watch.watch(wait.done, awaited, partial(self._describe, wait), partial(self._received, wait))
        return wait.done

    def are_here(self, shards: Sequence[Shard], version: int, content: int) -> bool:
        """Whether all shards can be read in the host's memory."""
        claims, is_dead = self.memory.claims, self.memory.is_dead
        return all(next_move(claims.look(shard.index), content, version, is_dead) is Move.READ for shard in shards)

    def forget(self, shards: Sequence[Shard]) -> None:
        """Owners are about to change these shards within a version: fetch none of them until ``allow``. The caller's
        own reads of them are over, and every rank of the host calls this before the change is made."""
        changing = {shard.index for shard in shards if self.memory.has(shard.index)}
        with self._lock:
            self.memory.changing |= changing
            for claim in self._claims:
                claim.outdated |= changing
        for shard in changing:
            self.memory.claims.forget(shard)

    def allow(self, shards: Sequence[Shard]) -> None:
        """Owners have made the change, or never will."""
        with self._lock:
            self.memory.changing -= {shard.index for shard in shards}
        self._look()

    # ---- progress

    def _look(self) -> None:
        with self._lock:
            waits = list(self._waits)
        if waits:
            self._advance(waits)

    def _advance(self, waits: Sequence[_Wait]) -> None:
        """Take what is there, claim what nobody fetches, and end the waits that have all."""
        begun: list[tuple[_Wait, _Claim]] = []
        ended: list[_Wait] = []
        with self._lock:
            for wait in waits:
                if wait not in self._waits:  # another thread has ended it
                    continue
                claimed = self._step(wait)
                if claimed:
                    claim = _Claim(shards=claimed, version=wait.version)
                    self._claims.append(claim)
                    begun.append((wait, claim))
                if not wait.left or wait.done.done():
                    self._waits.remove(wait)
                    ended.append(wait)
        for wait, claim in begun:
            self._begin(wait, claim)
        for wait in ended:
            settle(wait.done, wait.passed)

    def _step(self, wait: _Wait) -> list[Shard]:
        """Look at each shard that a wait lacks; returns those that are claimed now."""
        claims, claimed = self.memory.claims, []
        for shard in list(wait.left):
            while True:
                word = claims.look(shard.index)
                move = next_move(word, wait.content, wait.version, self.memory.is_dead)
                if move is not Move.CLAIM or shard.index in self.memory.changing:
                    break
                if claims.claim(shard.index, word, wait.version):
                    claimed.append(shard)
                    break
            if move is Move.READ:
                wait.left.remove(shard)
            elif move is Move.PASS or (move is Move.WAIT and self._is_quiet(wait, word.claimer)):
                self._pass(wait, shard)
        return claimed

    def _pass(self, wait: _Wait, shard: Shard) -> None:
        if wait.passes:
            wait.left.remove(shard)
            wait.passed.append(shard)

    def _is_quiet(self, wait: _Wait, fetcher: int) -> bool:
        """Whether a fetcher has received nothing for too long."""
        now, moved = self._clock(), self.memory.moved(fetcher)
        before, since = wait.seen.get(fetcher, (-1, now))
        if before != moved:
            wait.seen[fetcher] = (moved, now)
            return False
        return fetcher != self.memory.number and now - since > _QUIET_S

    # ---- fetching

    def _begin(self, wait: _Wait, claim: _Claim) -> None:
        gather = Gather(1)
        gather.future.add_done_callback(partial(self._fetched, wait, claim))
        wait.wire.fetch_kept(gather, wait.unit, claim.shards, claim.version, self._place, self.memory.move)

    def _place(self, shard: Shard) -> Tensor:
        return self.memory.tensor(shard.index)

    def _fetched(self, wait: _Wait, claim: _Claim, done: Future[None]) -> None:
        error = done.exception()
        with self._lock:
            self._claims.remove(claim)
            for shard in claim.shards:
                if error is None and shard.index not in claim.outdated:
                    self.memory.claims.publish(shard.index, claim.version)
                else:
                    self.memory.claims.give_up(shard.index, claim.version)
            if error is not None and wait in self._waits:
                self._waits.remove(wait)
        self.memory.bell.ring()
        if error is not None:
            fail(wait.done, error)
        self._look()

    # ---- what a wait that stalls says

    def _received(self, wait: _Wait) -> object:
        return [self.memory.moved(fetcher) for fetcher in self._fetchers_of(wait)]

    def _describe(self, wait: _Wait, timeout_s: float) -> Future[str]:
        fetchers = self._fetchers_of(wait)
        return settled(f"{count(len(wait.left), 'shard')} of it claimed by fetchers {fetchers}")

    def _fetchers_of(self, wait: _Wait) -> list[int]:
        return sorted({self.memory.claims.look(shard.index).claimer for shard in list(wait.left)})

    # ---- the end

    def end(self, error: RayZeroError) -> None:
        """Fail every wait, now and later. Idempotent."""
        with self._lock:
            error = self._error = self._error or error
            waits, self._waits = self._waits, []
        for wait in waits:
            fail(wait.done, error)

    def close(self) -> None:
        """End the thread, after ``end``. Fetches under way still end, and give their claims back."""
        self._listener.close()
