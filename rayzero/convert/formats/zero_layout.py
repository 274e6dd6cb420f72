"""Where DeepSpeed's ZeRO stages put a parameter's elements: pure arithmetic over flat partitions.

A *group* is what DeepSpeed flattens together: an optimizer's parameter group in stages 1 and 2, a sub-group of one in
stage 3. Rank r of W keeps one partition of each group. The layouts are those that DeepSpeed's own ``zero_to_fp32.py``
reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayzero.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]  # of one group's parameters, in their order


@dataclass(frozen=True, slots=True)
class PartitionSegment:
    """Elements of one parameter, in C order, in one rank's partition of a group."""

    rank: int
    group: int
    start: int  # elements from the partition's start
    stop: int


def stage3_segments(groups: Sequence[Shapes], sizes: Sequence[Sequence[int]]) -> dict[str, list[PartitionSegment]]:
    """Stage 3: each rank has ceil(numel / W) elements of every parameter, the last ones partly padding; a partition
    holds these pieces of all parameters of its group, one after another.

    sizes: [rank][group] elements of the partitions. Raises CheckpointError if they do not fit the shapes."""
    world = len(sizes)
    found: dict[str, list[PartitionSegment]] = {}
    for group, shapes in enumerate(groups):
        offset = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            part = -(-numel // world)
            pieces = ((rank, min(part, numel - rank * part)) for rank in range(world))
            found[name] = [PartitionSegment(rank, group, offset, offset + size) for rank, size in pieces if size > 0]
            offset += part
        for rank in range(world):
            _require(sizes[rank][group] == offset, rank, group, sizes[rank][group], offset)
    return found


def stage12_segments(
    groups: Sequence[Shapes], sizes: Sequence[Sequence[int]], paddings: Sequence[Sequence[int]] | None = None
) -> dict[str, list[PartitionSegment]]:
    """Stages 1 and 2: a group is one flat vector, padded at its end to a multiple of 2 W elements and cut into W equal
    partitions. Masters are kept without that padding, so the last partitions may be shorter or empty.

    sizes: [rank][group] elements of the partitions. paddings: [group][parameter] elements behind each parameter, where
    DeepSpeed aligns parameters. Raises CheckpointError if the sizes do not fit the shapes."""
    world = len(sizes)
    found: dict[str, list[PartitionSegment]] = {}
    for group, shapes in enumerate(groups):
        held = [sizes[rank][group] for rank in range(world)]
        behind = paddings[group] if paddings is not None else [0] * len(shapes)
        if len(behind) != len(shapes):
            raise CheckpointError(f"group {group} has {len(shapes)} parameters and {len(behind)} paddings")
        offset = 0
        for (name, shape), padding in zip(shapes.items(), behind, strict=True):
            numel = math.prod(shape)
            found[name] = _cut(group, held, offset, offset + numel)
            offset += numel + padding
        align = 2 * world
        _require(-(-offset // align) == -(-sum(held) // align) and sum(held) >= offset, None, group, sum(held), offset)
    return found


def _cut(group: int, held: Sequence[int], start: int, stop: int) -> list[PartitionSegment]:
    """The parts of the range [start, stop) of a vector whose partitions have ``held`` elements."""
    segments: list[PartitionSegment] = []
    begin = 0
    for rank, size in enumerate(held):
        low, high = max(start, begin), min(stop, begin + size)
        if low < high:
            segments.append(PartitionSegment(rank, group, low - begin, high - begin))
        begin += size
    return segments


def _require(fits: bool, rank: int | None, group: int, got: int, needed: int) -> None:
    if not fits:
        whose = "the ranks have" if rank is None else f"rank {rank} has"
        raise CheckpointError(
            f"{whose} {got:,} elements of group {group}, but its parameters need {needed:,}: shards are missing, cut "
            "short, or of another checkpoint"
        )
