"""An owner's matrices on their way to the ranks that multiply them, and back. [Note: products on ranks]"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayzero.concurrency.futures import chain, fail, failed, settle
from rayzero.errors import StoreError
from rayzero.kernels.newton_schulz import answer_from, answered, as_product
from rayzero.owner.owned_model import OwnedModel
from rayzero.owner.shard import OwnedShard, ShardWork, StepWork
from rayzero.protocol.products import PRODUCT_DTYPE, Matrix, matrices_of, multiplying_ranks, product_work, shards_ahead

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # for an answer, beside what a rank takes that computes ...
_SLOWEST_FLOPS = 1e11  # ... no slower than this, a second


@dataclass(eq=False, slots=True)
class _Exchange:
    """A shard's products for one update, from the first question for them to the update's end."""

    given: Future[Tensor] = field(default_factory=Future)  # what goes in: 1D, the shard's elements
    answer: Tensor | None = None  # what has come out, likewise
    pairs: list[tuple[Matrix, Tensor]] = field(default_factory=list)  # those with a gradient, in what is given


class ShardProducts:
    """The products of one owner's shards that its ranks compute.

    Knows versions, and which rank has which shard; not how bytes travel, or what an update does with a product.
    ``begin``, ``post`` and ``used`` are for the updater's thread. A rank that has not asked for anything since it let
    this owner wait is not waited for again."""

    def __init__(self, model: OwnedModel) -> None:
        spec = model.spec
        self._rank_of, self._work = multiplying_ranks(spec), product_work(spec.layout, spec.hyper, spec.group_of)
        self._spec, self._shards, self._rule = spec, model.shards, model.rule
        self._matrices = {index: matrices_of(spec, index) for index in model.shards if index in self._rank_of}
        self._lock = threading.Condition()
        self._coming = deque[tuple[int, ShardWork]]()  # of the step that is applied, in forward order
        self._ahead = 0  # shards that ranks have, or that wait for their update
        self._exchanges: dict[tuple[int, int], _Exchange] = {}  # by shard and version. freed by: _end()
        # by shard, the last version that nothing comes of any more
        self._over = dict.fromkeys(self._matrices, model.version)
        self._present = set[int]()  # ranks that are waited for
        self._closed = False

    # ---- calls of ranks

    def read(self, shard: int, version: int) -> Future[Tensor]:
        """What its rank is to multiply of a shard: bf16, 1D, the shard's elements. Fails with StoreError if there is
        nothing, or it is too late."""
        with self._lock:
            self._present.add(self._rank_of.get(shard, -1))
            there = self._exchanges.get((shard, version))
            if there is None:
                if self._closed or version <= self._over.get(shard, version):
                    return failed(_nothing(shard, version))
                there = self._exchanges[shard, version] = _Exchange()
        future: Future[Tensor] = Future()  # each caller may cancel its own
        chain(there.given, future)
        return future

    def take(self, shard: int, version: int, values: Tensor) -> None:
        """What has come out; dropped if nobody waits for it."""
        with self._lock:
            self._present.add(self._rank_of.get(shard, -1))
            there = self._exchanges.get((shard, version))
            if there is not None and there.given.done():
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
            self._closed, open_now = True, dict(self._exchanges)
            self._lock.notify_all()
        for asked, there in open_now.items():
            fail(there.given, _nothing(*asked))

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
        while self._coming and self._ahead <= shards_ahead(self._spec.world_size):
            index, work = self._coming.popleft()
            owned = self._shards[index]
            own = [each for each in self._matrices[index] if owned.groups[each.slice] == each.group]
            fed = self._rule.fed(owned, work, [each.slice for each in own])
            if not fed:
                self._end(index, work.version)
                continue
            given = torch.zeros(owned.shard.numel, dtype=PRODUCT_DTYPE, device="cpu")
            pairs = [(each, given[each.start : each.stop].view(each.shape)) for each in own if each.slice in fed]
            for each, place in pairs:
                place.copy_(fed[each.slice])
            with self._lock:
                there = self._exchanges.setdefault((index, work.version), _Exchange())
                there.pairs = pairs
            self._ahead += 1
            settle(there.given, given)

    @contextmanager
    def used(self, owned: OwnedShard, version: int) -> Iterator[list[float]]:
        """``answered``, with the answers for the update of a shard that makes ``version``; waits for them."""
        index = owned.shard.index
        there = self._exchanges.get((index, version))
        answer = None if there is None else self._awaited(index, there)
        pairs = [
            (given, as_product(answer[each.start : each.stop], each.shape))
            for each, given in (there.pairs if there is not None else ())
            if answer is not None
        ]
        with answered(answer_from(pairs)) as computed:
            yield computed
        if there is not None:
            self._ahead -= 1
            self._end(index, version)

    def _awaited(self, shard: int, there: _Exchange) -> Tensor | None:
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
            self._over[shard] = version
            gone = [key for key in self._exchanges if key[0] == shard and key[1] <= version]
            futures = [self._exchanges.pop(key).given for key in gone]
        for future in futures:
            fail(future, _nothing(shard, version))


def _nothing(shard: int, version: int) -> StoreError:
    return StoreError(f"shard {shard} v{version} has nothing to multiply, or has it no more")
