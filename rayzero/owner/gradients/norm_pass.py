"""The norm parts of the open step: computed as contributions arrive, handed out when every counted push is there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import groupby
from operator import itemgetter

from torch import Tensor

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import StepMismatchError, StoreError
from rayzero.owner.gradients.contributions import Collection, Contributors, check_reports
from rayzero.owner.model import OwnedModel
from rayzero.owner.shard import OwnedShard
from rayzero.owner.updater import Task
from rayzero.protocol.messages import Clamp, FinishReport, NormParts

EARLY = 1 << 20  # elements: summing fewer (0.1 ms) can wait for the finish


class NormPass:
    """Sums squares shard by shard, early where it can, and never hands out a part that is out of date.

    Knows contributions and the collect that waits for them; not decisions, versions or who asks. Methods with
    ``# locked`` are called under the service's lock, the others outside it; futures are settled outside."""

    def __init__(self, model: OwnedModel, lock: threading.RLock, submit: Callable[[Task], None]) -> None:
        """``submit``: hands a task to the updater thread, where all computing is done."""
        self._model = model
        self._lock = lock
        self._submit = submit
        self.collection: Collection | None = None  # of the open step, once its reports are here
        self._ripe: list[OwnedShard] = []  # expected pushes are all there, and no task was made for their parts yet
        self._ripe_numel = 0

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """Ask for the parts of ``step``, which is open; other reports than before replace what was asked for.

        Raises StepMismatchError or StoreError where reports do not fit each other or what has arrived."""
        spec, contributions = self._model.spec, self._model.contributions
        check_reports(step, reports, spec.world_size, len(spec.layout.units))
        new = Collection(step, {report.rank: report for report in reports})
        with self._lock:
            old = self.collection
            if old is not None and old.step == step and old.reports == new.reports:
                return old.future
            contributions.collect(new)
            contributions.remember(new.reports)
            self.collection = new
        if old is not None:
            fail(old.future, StepMismatchError(f"step {old.step} was reopened"))
        self._submit(lambda: self._sum_missing(new))
        return new.future

    def arrived(self, owned: OwnedShard, rank: int, open_step: int) -> None:  # locked
        """A push of ``rank`` landed: compute the shard's part if it was the last one that is counted, or expected."""
        contributions, collection = self._model.contributions, self.collection
        if collection is not None:
            if contributions.arrived(collection, owned, rank):
                self._submit(lambda: self._sum(owned, open_step))
        elif contributions.looks_complete(owned, open_step):
            self._ripen(owned, open_step)

    def _ripen(self, owned: OwnedShard, step: int) -> None:  # locked
        """Compute parts early, some at a time: waking the updater's thread takes as long as summing many elements."""
        self._ripe.append(owned)
        self._ripe_numel += owned.shard.numel
        if self._ripe_numel < EARLY:
            return
        ripe, self._ripe, self._ripe_numel = self._ripe, [], 0

        def sum_ripe() -> None:
            for each in ripe:
                self._sum(each, step)

        self._submit(sum_ripe)

    def decided(self) -> None:  # locked
        """The step is over."""
        self.collection = None
        self._ripe, self._ripe_numel = [], 0

    def fail(self, error: StoreError) -> None:
        """The step will never be decided."""
        with self._lock:
            collection = self.collection
        if collection is not None:
            fail(collection.future, error)

    def missing_ranks(self) -> list[int]:  # locked
        """Ranks with counted pushes that are not there."""
        missing = self.collection.missing.values() if self.collection is not None else ()
        return sorted({rank for ranks in missing for rank in ranks})

    # ---- in the updater thread

    def _sum_missing(self, collection: Collection) -> None:
        """Compute the parts that nobody computed early; completes a collection that has no shards at all."""
        with self._lock:
            missing = self._model.contributions.unsummed(collection)
        for owned in missing:
            self._sum(owned, collection.step)
        self._hand_out()

    def _sum(self, owned: OwnedShard, step: int) -> None:
        """Compute a shard's part, unless the one that is kept will do."""
        contributions = self._model.contributions
        with self._lock:
            collection = self.collection
            known = collection is not None and contributions.has_part(owned, collection)
            if collection is None:
                ranks = contributions.landed_ranks(owned, step)
            else:
                ranks = contributions.counted_ranks(owned, collection)
            clamp = None if collection is None else collection.clamp
            key, contributors = contributions.key(owned, ranks, clamp), contributions.contributors(owned, ranks)
            gradients = contributions.gradients(owned)
        squares = None if known else self._squares(owned, gradients, contributors, clamp)
        with self._lock:
            if squares is not None:
                contributions.keep_part(owned, key, squares)
            if self.collection is not None:
                contributions.check_off(owned, self.collection)
        self._hand_out()

    def _squares(
        self, owned: OwnedShard, gradients: list[Tensor], contributors: Contributors, clamp: Clamp | None
    ) -> tuple[float, ...]:
        """Per slice; neighbours with the same contributors in one call, because models have many parameters."""
        squares: list[float] = []
        for members, group in groupby(zip(contributors, owned.slices, strict=True), key=itemgetter(0)):
            ranges = tuple((part.start, part.stop) for _, part in group)
            parts = self._model.square_sum.parts
            squares += parts(gradients, members, ranges, clamp) if members else [0.0] * len(ranges)
        return tuple(squares)

    def _hand_out(self) -> None:
        with self._lock:
            collection = self.collection
            if collection is None or collection.unsummed:
                return
            parts = self._model.contributions.norm_parts(collection)
        settle(collection.future, parts)
