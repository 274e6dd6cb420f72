"""An owner's matrices on their way to the ranks that multiply them, and back. [Note: products on ranks]"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import StoreError
from rayzero.kernels.torch_classes.newton_schulz import Products, answered, as_product
from rayzero.owner.shard import OwnedShard, ShardWork, StepWork
from rayzero.protocol.messages import ModelSpec
from rayzero.protocol.products import PRODUCT_DTYPE, Matrix, ProductPlan, matrices_of, shards_ahead

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # for an answer, beside what a rank takes that computes ...
_SLOWEST_FLOPS = 1e11  # ... no slower than this, a second


class DividedRule(Protocol):
    """An update rule whose products can be computed before the update."""

    def fed(self, owned: OwnedShard, work: ShardWork, slices: Sequence[int]) -> Mapping[int, Tensor]:
        """What the update will feed into Newton-Schulz for these slices, (m, n) in bf16; changes nothing. Without those
        that have no gradient; empty if a former life has made the update."""
        ...


@dataclass(eq=False, slots=True)
class _Open:
    """A shard whose products are computed, or wait for the update."""

    version: int
    matrices: Sequence[Matrix]  # those with a gradient
    given: Tensor  # 1D, the shard's elements
    answer: Tensor | None = None  # likewise


class ShardProducts:
    """The products of one owner's shards that its ranks compute.

    Knows versions, and which rank has which shard; not how bytes travel, or what an update does with a product.
    ``begin``, ``post`` and ``used`` are for the updater's thread. A rank that has not asked for anything since it let
    this owner wait is not waited for again."""

    def __init__(self, spec: ModelSpec, shards: Mapping[int, OwnedShard], rule: DividedRule, version: int) -> None:
        """``version``: of the shards."""
        plan = ProductPlan.of(spec)
        self._rank_of, self._work = plan.rank_of, plan.work
        self._spec, self._shards, self._rule = spec, shards, rule
        self._matrices = {index: matrices_of(spec, index) for index in shards if index in self._rank_of}
        self._lock = threading.Condition()
        self._coming = deque[tuple[int, ShardWork]]()  # of the step that is applied, in forward order
        self._open: dict[int, _Open] = {}  # by shard. freed by: used()
        self._over = dict.fromkeys(
            self._matrices, version
        )  # by shard, the last version of which nothing comes any more
        self._asked: dict[int, list[tuple[int, Future[Tensor]]]] = {}  # by shard: versions that ranks wait for
        self._present = set[int]()  # ranks that are waited for
        self._closed = False

    # ---- calls of ranks

    def read(self, shard: int, version: int) -> Future[Tensor]:
        """What its rank is to multiply of a shard: bf16, 1D, the shard's elements. Fails with StoreError if there is
        nothing, or it is too late."""
        future: Future[Tensor] = Future()
        with self._lock:
            self._present.add(self._rank_of.get(shard, -1))
            there = self._open.get(shard)
            if there is not None and there.version == version:
                settle(future, there.given)
            elif self._closed or version <= self._over.get(shard, version):
                fail(future, _nothing(shard, version))
            else:
                self._asked.setdefault(shard, []).append((version, future))
        return future

    def take(self, shard: int, version: int, values: Tensor) -> None:
        """What has come out; dropped if it is too late."""
        with self._lock:
            self._present.add(self._rank_of.get(shard, -1))
            there = self._open.get(shard)
            if there is not None and there.version == version:
                there.answer = values
                self._lock.notify_all()

    def left(self, rank: int) -> None:
        """A rank is gone: wait for it no more."""
        with self._lock:
            self._present.discard(rank)
            self._lock.notify_all()

    def close(self) -> None:
        """Wait for no rank any more, and let none wait."""
        with self._lock:
            self._closed = True
            asked, self._asked = self._asked, {}
            self._lock.notify_all()
        for shard, waits in asked.items():
            for version, future in waits:
                fail(future, _nothing(shard, version))

    # ---- one step

    def begin(self, step: StepWork) -> None:
        """A decision is applied next."""
        work = {index: step.shards[index] for index in self._shards if index in self._matrices}
        self._coming = deque((index, each) for index, each in work.items() if each is not None)
        for index, each in work.items():
            if each is None:
                self._end(index, step.version)

    def post(self) -> None:
        """Let ranks have what comes next, as far as there is room for it."""
        while self._coming and len(self._open) <= shards_ahead(self._spec.world_size):
            index, work = self._coming.popleft()
            owned = self._shards[index]
            own = [each for each in self._matrices[index] if owned.groups[each.slice] == each.group]
            fed = self._rule.fed(owned, work, [each.slice for each in own])
            if not fed:
                self._end(index, work.version)
                continue
            given = torch.zeros(owned.shard.numel, dtype=PRODUCT_DTYPE, device="cpu")
            present = [each for each in own if each.slice in fed]
            for each in present:
                given[each.start : each.stop].copy_(fed[each.slice].view(-1))
            with self._lock:
                self._open[index] = _Open(work.version, present, given)
                waits = self._asked.pop(index, [])
            for version, future in waits:
                if version == work.version:
                    settle(future, given)
                else:
                    fail(future, _nothing(index, version))

    @contextmanager
    def used(self, owned: OwnedShard) -> Iterator[None]:
        """A context in which this thread's Newton-Schulz has the answers for a shard; waits for them."""
        index = owned.shard.index
        there = self._open.get(index)
        if there is None:
            yield
            return
        answer = self._awaited(index, there)
        pairs = [
            (
                there.given[each.start : each.stop].view(each.shape),
                as_product(answer[each.start : each.stop], each.shape),
            )
            for each in there.matrices
            if answer is not None
        ]
        with answered(Products(pairs)):
            yield
        self._end(index, there.version)

    def _awaited(self, shard: int, there: _Open) -> Tensor | None:
        """The answer for a shard; None: its rank is gone, or late."""
        rank, work = self._rank_of[shard], self._work[shard]
        until = time.monotonic() + _PATIENCE_S + work / _SLOWEST_FLOPS
        with self._lock:
            while there.answer is None and rank in self._present and not self._closed:
                left = until - time.monotonic()
                if left <= 0:
                    self._present.discard(rank)
                    log.warning(
                        "rank %d has not multiplied shard %d in time: this owner does it, until the rank asks for more",
                        rank,
                        shard,
                    )
                else:
                    self._lock.wait(left)
            return there.answer

    def _end(self, shard: int, version: int) -> None:
        """Nothing comes of a version any more."""
        with self._lock:
            self._open.pop(shard, None)
            self._over[shard] = version
            waits = self._asked.pop(shard, [])
            late = [future for wanted, future in waits if wanted <= version]
            if later := [(wanted, future) for wanted, future in waits if wanted > version]:
                self._asked[shard] = later
        for future in late:
            fail(future, _nothing(shard, version))


def _nothing(shard: int, version: int) -> StoreError:
    return StoreError(f"shard {shard} v{version} has nothing to multiply, or has it no more")
