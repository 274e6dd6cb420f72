"""Chooses by cost, per group, whether to keep, offload or recompute. Pure: measurements in, choices out.

The model: groups run forward one after another and backward in reverse. An offloaded group leaves after its forward and
comes back once the backward of the group ``prefetch`` places later has begun; its own backward waits for it. Each
direction of the link carries one group at a time. The backward of a recomputed group takes its forward's time too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_CANDIDATES = 12  # groups that each decision tries, for offload and for recomputation


class Choice(Enum):
    """What happens to a group's saved tensors."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """The measurements of one group: seconds of computation, bytes of saved tensors."""

    nbytes: int  # on the device
    host_bytes: int  # on the link (fewer when compressed)
    forward_s: float
    backward_s: float
    can_recompute: bool = False
    input_bytes: int = 0  # stay on the device when it is recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Measured copy speeds in bytes per second."""

    out: float
    back: float


@dataclass(frozen=True, slots=True)
class CostPlan:
    """The choices in forward order, the device bytes that they hold at the end of the forward, and their cost."""

    choices: tuple[Choice, ...]
    held_bytes: int
    extra_s: float  # seconds more than keeping everything
    fits: bool  # into the budget


def held_bytes(groups: Sequence[GroupCost], choices: Sequence[Choice]) -> int:
    """The device bytes that the choices hold at the end of the forward."""
    kept = {Choice.KEEP: lambda group: group.nbytes, Choice.RECOMPUTE: lambda group: group.input_bytes}
    return sum(kept[choice](group) for group, choice in zip(groups, choices, strict=True) if choice in kept)


def extra_seconds(groups: Sequence[GroupCost], choices: Sequence[Choice], link: Link, prefetch: int) -> float:
    """The seconds that forward and backward take beyond those of keeping everything."""
    left = _departures(groups, choices, link)
    now = sum(group.forward_s for group in groups)
    plain = now + sum(group.backward_s for group in groups)
    link_free = now
    returned: dict[int, float] = {}
    waiting = [index for index in reversed(range(len(groups))) if choices[index] is Choice.OFFLOAD]
    for index in reversed(range(len(groups))):
        while waiting and index - waiting[0] <= prefetch:
            coming = waiting.pop(0)
            link_free = max(link_free, now, left[coming]) + groups[coming].host_bytes / link.back
            returned[coming] = link_free
        now = max(now, returned.get(index, now))
        again = groups[index].forward_s if choices[index] is Choice.RECOMPUTE else 0.0
        now += groups[index].backward_s + again
    return now - plain


def choose(groups: Sequence[GroupCost], budget_bytes: int, link: Link, prefetch: int = 1) -> CostPlan:
    """Choices that hold at most ``budget_bytes``: found greedily by the least time per byte, then improved one by one.

    If that is impossible, ``fits`` is False and no group is kept."""
    choices = [Choice.KEEP] * len(groups)
    while held_bytes(groups, choices) > budget_bytes:
        best = _cheapest(groups, choices, link, prefetch)
        if best is None:
            break
        choices[best[0]] = best[1]
    fits = held_bytes(groups, choices) <= budget_bytes
    if fits:
        _improve(groups, choices, budget_bytes, link, prefetch)
    return CostPlan(tuple(choices), held_bytes(groups, choices), extra_seconds(groups, choices, link, prefetch), fits)


def _departures(groups: Sequence[GroupCost], choices: Sequence[Choice], link: Link) -> dict[int, float]:
    now = link_free = 0.0
    left: dict[int, float] = {}
    for index, (group, choice) in enumerate(zip(groups, choices, strict=True)):
        now += group.forward_s
        if choice is Choice.OFFLOAD:
            link_free = max(link_free, now) + group.host_bytes / link.out
            left[index] = link_free
    return left


def _cheapest(
    groups: Sequence[GroupCost], choices: list[Choice], link: Link, prefetch: int
) -> tuple[int, Choice] | None:
    """The change to one kept group that costs the least time per byte that it frees; None if nothing can change."""
    now = extra_seconds(groups, choices, link, prefetch)
    best: tuple[float, int, int, Choice] | None = None
    for index, choice in _options(groups, choices):
        freed = groups[index].nbytes - (groups[index].input_bytes if choice is Choice.RECOMPUTE else 0)
        trial = [*choices[:index], choice, *choices[index + 1 :]]
        cost = (extra_seconds(groups, trial, link, prefetch) - now) / freed
        if best is None or (cost, index) < best[:2]:
            best = (cost, index, -freed, choice)
    return None if best is None else (best[1], best[3])


def _options(groups: Sequence[GroupCost], choices: Sequence[Choice]) -> list[tuple[int, Choice]]:
    """Offload for the kept groups that are reused last, recompute for those that are cheapest per byte."""
    kept = [index for index, choice in enumerate(choices) if choice is Choice.KEEP]
    movable = [index for index in kept if groups[index].nbytes > 0]
    again = [i for i in kept if groups[i].can_recompute and groups[i].nbytes > groups[i].input_bytes]
    again.sort(key=lambda i: groups[i].forward_s / (groups[i].nbytes - groups[i].input_bytes))
    options = [(index, Choice.OFFLOAD) for index in movable[:_CANDIDATES]]
    return options + [(index, Choice.RECOMPUTE) for index in again[:_CANDIDATES]]


def _improve(groups: Sequence[GroupCost], choices: list[Choice], budget_bytes: int, link: Link, prefetch: int) -> None:
    """Change single groups where that saves time and fits, in two rounds."""
    now = extra_seconds(groups, choices, link, prefetch)
    for index in [*range(len(groups)), *range(len(groups))]:
        for choice in Choice:
            if choice is Choice.RECOMPUTE and not groups[index].can_recompute:
                continue
            before, choices[index] = choices[index], choice
            time = extra_seconds(groups, choices, link, prefetch)
            if time < now and held_bytes(groups, choices) <= budget_bytes:
                now = time
            else:
                choices[index] = before
