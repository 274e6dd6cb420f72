"""Round-robin ownership of numbered partitions: partition ``i`` belongs to rank ``i mod world_size``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rayzero.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankMapping:
    """Which of ``world_size`` ranks owns which partition, seen from ``rank``.

    Knows indices; not what a partition holds. ``rank`` may also be an optimizer actor's index. Invariants: the ranks'
    ``owned_partition_count`` add up to the total, and the two index maps are inverses of each other. Raises ConfigError
    if ``rank`` is not in 0..world_size - 1, and every method does if a number is negative."""

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"world_size must be at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank must be in 0..{self.world_size - 1} (world_size {self.world_size}), got {self.rank}"
            )

    def owns_partition(self, partition: int) -> bool:
        """Whether this rank owns ``partition``."""
        return self.get_parameter_owner(partition) == self.rank

    def get_parameter_owner(self, partition: int) -> int:
        """The rank that owns ``partition``."""
        return _counted("partition", partition) % self.world_size

    def owned_partitions(self, total: int) -> list[int]:
        """This rank's partitions among the first ``total``, ascending."""
        return list(range(self.rank, _counted("total", total), self.world_size))

    def owned_partition_count(self, total: int) -> int:
        """``len(owned_partitions(total))``, without the list."""
        share, rest = divmod(_counted("total", total), self.world_size)
        return share + (self.rank < rest)

    def global_to_local_partition(self, partition: int) -> int | None:
        """This rank's own number for ``partition``, or None if another rank owns it."""
        return partition // self.world_size if self.owns_partition(partition) else None

    def local_to_global_partition(self, local: int) -> int:
        """The partition that this rank numbers ``local``."""
        return _counted("local partition", local) * self.world_size + self.rank

    def communication_group(self, partitions: Iterable[int]) -> list[int]:
        """The distinct owners of ``partitions``, ascending."""
        return sorted({self.get_parameter_owner(partition) for partition in partitions})


def _counted(what: str, value: int) -> int:
    if value < 0:
        raise ConfigError(f"{what} must be >= 0, got {value}")
    return value
