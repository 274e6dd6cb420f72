"""Which elements of which parameters the host updates: exact to 64 elements, in a fixed order, pure.

A parameter's first elements are the host's, the rest the device's. At most one parameter is cut.
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
    weight: int  # bytes that one element counts
    whole: bool = False  # it must not be cut
    on_host: bool = False  # it lives there anyway: not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of one parameter's elements that is updated on one side."""

    param: int  # index over all parameter groups
    start: int
    stop: int
    whole: bool  # it is the parameter: its tensors have the parameter's shape, those of other pieces are 1D

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.stop - self.start


def total_bytes(items: Sequence[Item]) -> int:
    """What a fraction is of: the bytes of everything that may live on either side."""
    return sum(item.numel * item.weight for item in items if not item.on_host)


def host_elements(items: Sequence[Item], target: int, *, order: Order = "first", at_least: bool = False) -> list[int]:
    """How many of each item's elements, from its first one on, the host gets, so that they count ``target`` bytes.

    Items are taken in ``order``, each as a whole while the target leaves room; the item on the border is cut at the
    multiple of 64 elements that is nearest to the target (``at_least``: that reaches it). Where that one must stay
    whole, it goes where it leaves the smaller error (``at_least``: to the host)."""
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
