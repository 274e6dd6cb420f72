"""Versions as readers see them: who waits for which, and who wants to be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future

from torch import Tensor

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import StoreError
from rayzero.owner.shard import OwnedShard, ShardState

Published = list[tuple[int, int, int]]  # (shard, its version, the version that its content is from)
Listener = Callable[[Published], None]
Read = tuple[int, str, "Future[Tensor]"]  # version, kind, the reader's future

_READABLE = (ShardState.PUBLISHED, ShardState.DECIDED)


def is_readable(owned: OwnedShard, version: int) -> bool:  # locked
    """Whether the shard's memory holds ``version`` now."""
    return owned.published == version and owned.state in _READABLE


class Publications:
    """Reads that wait for a version.

    Knows versions and readers; not how a version comes to be. Its methods are called under the service's lock;
    ``ready`` ones are settled outside it."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Read]] = {}

    def read(self, owned: OwnedShard, version: int, kind: str, future: Future[Tensor]) -> bool:
        """True when ``version`` is there now; otherwise ``future`` waits for it. Raises when it is gone."""
        if is_readable(owned, version):
            return True
        if owned.published >= version:
            raise StoreError(
                f"{owned.unit.name!r} v{version} is gone: shard {owned.shard.index} is at v{owned.published}, "
                f"{owned.state.name.lower()}; a rank's reads of a version must end before its finish"
            )
        self._waiting.setdefault(owned.shard.index, []).append((version, kind, future))
        return False

    def ready(self, owned: OwnedShard) -> list[Read]:
        """Take out the reads that ``owned.published`` answers."""
        waiting = self._waiting.pop(owned.shard.index, [])
        later = [read for read in waiting if read[0] > owned.published]
        if later:
            self._waiting[owned.shard.index] = later
        return [read for read in waiting if read[0] <= owned.published]

    def beyond(self, version: int) -> list[Future[Tensor]]:
        """Take out the reads of versions after ``version``, to fail them."""
        dropped = [read[2] for reads in self._waiting.values() for read in reads if read[0] > version]
        kept = {shard: [read for read in reads if read[0] <= version] for shard, reads in self._waiting.items()}
        self._waiting = {shard: reads for shard, reads in kept.items() if reads}
        return dropped


def answer(reads: Iterable[Read], owned: OwnedShard, read: Callable[[OwnedShard, str], Tensor]) -> None:
    """Settle reads of the version that ``owned`` has now; those of versions that were passed over fail."""
    for version, kind, future in reads:
        if version != owned.published:
            fail(future, StoreError(f"{owned.unit.name!r} v{version} was never readable: v{owned.published} is there"))
            continue
        try:
            settle(future, read(owned, kind))
        except StoreError as exc:
            fail(future, exc)
