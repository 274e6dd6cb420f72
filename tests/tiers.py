"""Which tests are in the first tier (`scripts/test`), which in the second alone (`scripts/test --all`), and which in
neither but in the third (`scripts/soak tests`).

A test with the mark `thorough` is in the second tier alone. So is what a test with several parameters has beyond each
value of each parameter once: the whole product is for the second tier. Of a test with the mark `spread(n)`, n cases are
in the first tier, evenly spread over all; with `spread(n, second=m)` m are in the first and the second. Only the third
tier has the others, the tests with the mark `soak`, and of a parameter `seed` all values but the first third: they try
again what those of the second tier hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import pytest

Values = Sequence[object]  # of one test's parameters, in their order


def covering(products: Sequence[Values]) -> list[int]:
    """Positions in ``products``, few of them, in which each value of each parameter occurs. Values are told apart by
    identity. The first that has the most new values is taken, again and again."""
    wanted = {(at, id(value)) for values in products for at, value in enumerate(values)}
    chosen: list[int] = []
    while wanted:
        gains = [len(wanted.intersection((at, id(v)) for at, v in enumerate(values))) for values in products]
        best = gains.index(max(gains))
        chosen.append(best)
        wanted.difference_update((at, id(value)) for at, value in enumerate(products[best]))
    return chosen


def spread(number: int, of: int) -> list[int]:
    """``number`` of the positions 0 ... ``of`` - 1, the first among them, evenly spread; all if there are fewer."""
    return [at * of // number for at in range(number)] if number < of else list(range(of))


def further_seeds(cases: Sequence[Mapping[str, object]]) -> list[int]:
    """Positions of the cases of one test that differ from others in their ``seed`` alone, but for the first third."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for at, params in enumerate(cases):
        if "seed" not in params:
            return []
        alike.setdefault(tuple((name, id(value)) for name, value in params.items() if name != "seed"), []).append(at)
    return [at for positions in alike.values() for at in positions[-(-len(positions) // 3) :]]


def mark_soak(items: Iterable[pytest.Item]) -> None:
    """Give the mark `soak` to the cases of each test that only the third tier runs."""
    for cases in _by_test(items):
        further = set(further_seeds([case.callspec.params for case in cases]))
        mark = cases[0].get_closest_marker("spread")
        if mark is not None and "second" in mark.kwargs:
            further |= set(range(len(cases))).difference(spread(mark.kwargs["second"], len(cases)))
        for at in further:
            cases[at].add_marker(pytest.mark.soak)


def mark_thorough(items: Iterable[pytest.Item]) -> None:
    """Give the mark `thorough` to the cases of each test that only the second tier runs."""
    for each in _by_test(items):
        cases = [item for item in each if item.get_closest_marker("thorough") is None]
        for item in _beyond_the_first_tier(cases):
            item.add_marker(pytest.mark.thorough)


def _by_test(items: Iterable[pytest.Item]) -> list[list[pytest.Function]]:
    """The cases of each test that has parameters, in their order."""
    with_parameters = [item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    with_parameters.sort(key=_test_of)  # stable; pytest puts cases that share a fixture of the session side by side
    return [list(cases) for _, cases in groupby(with_parameters, _test_of)]


def _test_of(item: pytest.Function) -> tuple[str, str, str]:
    return str(item.path), item.cls.__name__ if item.cls else "", item.originalname or item.name


def _beyond_the_first_tier(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    if not cases:
        return []
    mark = cases[0].get_closest_marker("spread")
    if mark is not None:
        kept = spread(mark.args[0], len(cases))
    else:
        kept = covering([list(item.callspec.params.values()) for item in cases])
    return [item for at, item in enumerate(cases) if at not in set(kept)]
