"""Decides how many bytes of a chunk leave: exact to the byte, the earliest first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayzero.activations.policy import OffloadPolicy


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """The eligible bytes of a chunk that has run, group by group in forward order."""

    groups: tuple[int, ...]

    @property
    def total(self) -> int:
        """The eligible bytes of all groups."""
        return sum(self.groups)


def bytes_to_offload(policy: OffloadPolicy, groups: Sequence[int], margin: int) -> int:
    """``round(fraction * (total - bytes of the last margin groups - rank * delta_bytes))``, at least 0."""
    first_kept = max(0, len(groups) - margin)
    return _share(policy, sum(groups[:first_kept]))


class ChunkQuota:
    """Deals out one chunk's share while its forward runs.

    Knows byte counts; not tensors. With ``expected``, the chunk's bytes the last time, the share is exact to the byte
    if the chunk is the same. Without it, a whole tensor leaves whenever the share stays within ``fraction``, and
    ``margin`` and ``delta_bytes`` have no effect."""

    def __init__(self, policy: OffloadPolicy, expected: ChunkBytes | None, *, margin: int) -> None:
        self._policy = policy
        self._expected = expected
        self._first_kept = None if expected is None else max(0, len(expected.groups) - margin)
        self._target = 0 if expected is None else bytes_to_offload(policy, expected.groups, margin)
        self._seen = self._offloaded = 0

    @property
    def offloaded(self) -> int:
        """The bytes that were dealt out so far."""
        return self._offloaded

    def in_margin(self, group: int) -> bool:
        """Whether the chunk's ``group``-th group is one of the last, which stay."""
        return (
            self._first_kept is not None
            and self._expected is not None
            and (self._first_kept <= group < len(self._expected.groups))
        )

    def take(self, nbytes: int, *, group: int) -> int:
        """How many of a tensor's ``nbytes`` leave: all, none, or as many as are left up to the target."""
        if self.in_margin(group):
            return 0
        self._seen += nbytes
        taken = self._exact(nbytes) if self._expected is not None else self._whole(nbytes)
        self._offloaded += taken
        return taken

    def put_back(self, nbytes: int) -> None:
        """Take back bytes that were dealt out but had to stay, for example because the host had no room."""
        self._offloaded -= nbytes

    def _exact(self, nbytes: int) -> int:
        target = max(self._target, _share(self._policy, self._seen))  # a bigger chunk than last time keeps its share
        return max(0, min(nbytes, target - self._offloaded))

    def _whole(self, nbytes: int) -> int:
        return nbytes if self._offloaded + nbytes <= round(self._policy.fraction * self._seen) else 0


def _share(policy: OffloadPolicy, nbytes: int) -> int:
    return max(0, round(policy.fraction * (nbytes - policy.rank * policy.delta_bytes)))
