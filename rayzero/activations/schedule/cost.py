"""Keep, offload or recompute, per group, by what each costs. Pure: measurements in, choices out.

The forward's groups run one after another, the backward's in reverse. A group that is offloaded leaves over the link
out after its forward, in turn, and comes back over the link in, in turn, not before the backward of the group
``prefetch`` places later has begun; its own backward waits for it. A recomputed group's backward takes its forward
again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_CANDIDATES = 12  # groups looked at per decision and choice


class Choice(Enum):
    """What happens to a group's saved tensors."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """What one group was measured to be; seconds of compute, bytes of saved tensors."""

    nbytes: int  # on the device
    host_bytes: int  # on the link (fewer when compressed)
    forward_s: float
    backward_s: float
    can_recompute: bool = False
    input_bytes: int = 0  # stay on the device when it is recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Measured copy speeds, bytes per second."""

    out: float
    back: float


@dataclass(frozen=True, slots=True)
class CostPlan:
    """The choices in forward order, what they hold on the device at the end of the forward, and what they cost."""

    choices: tuple[Choice, ...]
    held_bytes: int
    extra_s: float  # beyond keeping everything
    fits: bool


def held_bytes(groups: Sequence[GroupCost], choices: Sequence[Choice]) -> int:
    """Device bytes at the end of the forward."""
    kept = {Choice.KEEP: lambda group: group.nbytes, Choice.RECOMPUTE: lambda group: group.input_bytes}
    return sum(kept[choice](group) for group, choice in zip(groups, choices, strict=True) if choice in kept)


def extra_seconds(groups: Sequence[GroupCost], choices: Sequence[Choice], link: Link, prefetch: int) -> float:
    """Time of forward and backward beyond that of keeping everything."""
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
    """Choices that hold at most ``budget_bytes``, found greedily by least time per byte, then improved one by one.

    ``fits`` is False when even the least is more than the budget: then the least is what is chosen."""
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
    """The change of one kept group that costs the least time per byte it frees."""
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
    """Offload for the kept groups with the longest time until reuse, recompute for those cheapest per byte."""
    kept = [index for index, choice in enumerate(choices) if choice is Choice.KEEP]
    movable = [index for index in kept if groups[index].nbytes > 0]
    again = [i for i in kept if groups[i].can_recompute and groups[i].nbytes > groups[i].input_bytes]
    again.sort(key=lambda i: groups[i].forward_s / (groups[i].nbytes - groups[i].input_bytes))
    options = [(index, Choice.OFFLOAD) for index in movable[:_CANDIDATES]]
    return options + [(index, Choice.RECOMPUTE) for index in again[:_CANDIDATES]]


def _improve(groups: Sequence[GroupCost], choices: list[Choice], budget_bytes: int, link: Link, prefetch: int) -> None:
    """Change single groups while that saves time and fits; at most two rounds."""
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
