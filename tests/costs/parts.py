"""Divides the files of tests among what runs side by side, by what `report.py` knows of their cost.

    parts.py first        the files of the first tier, or those of
    parts.py all          the whole suite, or
    parts.py quarter N    the N-th quarter (modulo 4) of what the second tier adds

Prints a line for each part: its name, then its files. Tests that start a Ray on this host are one part, because Rays of
one host find each other; those that start it on hosts of their own another; all others are three, or in the first tier
four."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

TESTS = Path(__file__).parents[1]
_UNKNOWN = (1.0, 1.0, 100.0, 100.0)  # of what is newer than the figures


Costs = dict[str, Sequence[float]]  # file -> see `report.by_file`


def is_thorough(source: str) -> bool:
    """Whether a whole file of tests is in the second tier."""
    assigned = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return any("pytest.mark.thorough" in ast.unparse(node) for node in assigned)


def divide(
    files: Iterable[str], number: int, cost: Callable[[str], float], together: Collection[str] = ()
) -> list[list[str]]:
    """Files in ``number`` parts of about equal cost: the dearest first, each to the part that has least so far. The
    first part has those of ``together``."""
    parts: list[list[str]] = [[] for _ in range(number)]
    parts[0] += sorted(file for file in files if file in together)  # sums of floats depend on their order
    sums = [sum(map(cost, part)) for part in parts]
    for file in sorted(set(files).difference(together), key=lambda name: (-cost(name), name)):
        least = sums.index(min(sums))
        parts[least].append(file)
        sums[least] += cost(file)
    return [sorted(part) for part in parts]


def parts_of(files: dict[str, str], tier: str, quarter: int, costs: Costs) -> dict[str, list[str]]:
    """Name of a part -> its files. ``files``: path -> text. ``tier``: "first", "all" or "quarter"."""
    first = {file for file in files if not is_thorough(files[file])}
    hosts = {file for file in files if file.startswith("tests/hosts/")}
    rays = {file for file in files if "mark.ray" in files[file]} - hosts

    def cost(file: str, with_ray: bool) -> float:
        early, late = (costs.get(file, ())[2 * with_ray :] or _UNKNOWN[2 * with_ray :])[:2]
        return {"first": early, "all": early + late, "quarter": late}[tier]

    computes, waits = partial(cost, with_ray=False), partial(cost, with_ray=True)

    def chosen(group: set[str], seconds: Callable[[str], float]) -> set[str]:
        if tier == "first":
            return group & first
        return group if tier == "all" else set(divide(group, 4, seconds)[quarter % 4])

    waiting = chosen(rays | hosts, waits)
    # what takes seconds to import is imported in one process: transformers and what stands on it, DCP, the compiler
    folders = ("tests/integrations/", "tests/convert/")
    words = ("transformers", "zoo", "distributed.checkpoint", "torch.compile")
    heavy = {f for f, text in files.items() if f.startswith(folders) or any(word in text for word in words)}
    # Sevenths of what computes. In the first tier those of Ray and hosts, one after the other, end early: a seventh
    # comes after them, and three parts of two sevenths run beside, because many tests wait. In the second tier two
    # sevenths come after those of hosts, and one after those of Ray.
    pieces = divide(chosen(set(files) - hosts, computes), 7, computes, heavy)
    if tier == "first":
        sevenths = {"one": (0, 3), "two": (1, 4), "three": (6,), "four": (2, 5)}
    else:
        sevenths = {"one": (0, 1, 2, 3), "two": (5, 6), "three": (4,)}
    computing = {name: sorted(chain(*(pieces[at] for at in which))) for name, which in sevenths.items()}
    return {"rays": sorted(rays & waiting), "hosts": sorted(hosts & waiting), **computing}


def main() -> None:
    """Print the parts that the command line asks for."""
    tier, quarter = sys.argv[1], int((sys.argv[2:] or ["0"])[0])
    figures = Path(__file__).with_name("files.json")
    costs: Costs = json.loads(figures.read_text())
    files = {str(path.relative_to(TESTS.parent)): path.read_text() for path in sorted(TESTS.rglob("test_*.py"))}
    for name, part in parts_of(files, tier, quarter, costs).items():
        print(name, *part)


if __name__ == "__main__":
    main()
