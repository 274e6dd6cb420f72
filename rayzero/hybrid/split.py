"""Splits parameters between host and device: exact to 64 elements, in a fixed order. Pure functions.

The host gets a parameter's first elements, the device the rest. At most one parameter is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rayzero.layout.model_layout import ALIGN

Order = Literal["first", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One parameter as the split sees it."""

    numel: int
    weight: int  # bytes that an element counts as
    whole: bool = False  # must not be cut
    on_host: bool = False  # on the host in any case: not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of one parameter's elements, updated on one side."""

    param: int  # index over all parameter groups
    start: int
    stop: int
    whole: bool  # the whole parameter: its tensors have the parameter's shape; other pieces' are 1D

    @property
    def numel(self) -> int:
        return self.stop - self.start


def total_bytes(items: Sequence[Item]) -> int:
    """The bytes that a fraction refers to: those of every parameter that either side could update."""
    return sum(item.numel * item.weight for item in items if not item.on_host)


def host_elements(items: Sequence[Item], target: int, *, order: Order = "first", at_least: bool = False) -> list[int]:
    """How many of each item's first elements the host gets, so that together they count ``target`` bytes.

    Takes whole items in ``order`` while the target leaves room. Cuts the item on the border at the multiple of 64
    elements nearest to the target (``at_least``: at the first that reaches it). If that item must stay whole, it goes
    to the side that leaves the smaller error (``at_least``: to the host)."""
    found = [0] * len(items)
    left = target
    for index in range(len(items)) if order == "first" else reversed(range(len(items))):
        item = items[index]
        found[index] = item.numel if item.on_host else _share(item, left, at_least=at_least)
        left -= 0 if item.on_host else item.numel * item.weight  # below zero after the item on the border
    return found


def _share(item: Item, left: int, *, at_least: bool) -> int:
    size = item.numel * item.weight
    if left <= 0 or size == 0:
        return 0
    if left >= size:
        return item.numel
    if item.whole:
        return item.numel if at_least or 2 * left >= size else 0
    line = ALIGN * item.weight
    lines = -(-left // line) if at_least else (left + line // 2) // line
    return min(item.numel, lines * ALIGN)


def chunks(param: int, numel: int, start: int, stop: int, most: int | None) -> list[Piece]:
    """``[start, stop)`` of a parameter of ``numel`` elements as pieces of at most ``most`` elements, a multiple of 64
    (None: one piece)."""
    step = most or max(1, stop - start)
    cuts = range(start, stop, step)
    whole = start == 0 and stop == numel and len(cuts) == 1
    return [Piece(param=param, start=at, stop=min(at + step, stop), whole=whole) for at in cuts]
