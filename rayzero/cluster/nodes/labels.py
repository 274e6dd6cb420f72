"""Ray's label selectors: which labels a node must carry. Pure.

A selector maps a label's name to a condition: ``"x"`` (is x), ``"!x"`` (is not x), ``"in(a, b)"`` (one of them),
``"!in(a, b)"`` (none of them). A node without the label meets only the two with ``!``, as in Ray.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["in_words", "matches"]


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels meets every condition of the selector."""
    return all(_meets(condition, labels.get(name)) for name, condition in selector.items())


def _meets(condition: str, value: str | None) -> bool:
    negated, condition = condition.startswith("!"), condition.removeprefix("!")
    if condition.startswith("in(") and condition.endswith(")"):
        wanted = {choice.strip() for choice in condition[3:-1].split(",")}
    else:
        wanted = {condition}
    return (value in wanted) is not negated


def in_words(selector: Mapping[str, str]) -> str:
    """``a=x,b=in(y,z)``."""
    return ",".join(f"{name}={condition}" for name, condition in selector.items())
