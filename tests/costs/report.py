"""Turns what the plugin took down into COSTS.md, for people, and files.json, by which `parts.py` divides the work."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "COSTS.md"
FILES = HERE / "files.json"

_DEAREST = 80  # tests that the page names


@dataclass
class Cost:
    """Of some tests: their number, seconds, CPU seconds, and what their processes did."""

    tests: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    thorough: float = 0.0  # CPU seconds of tests that only the second tier runs
    events: Counter[str] = field(default_factory=Counter)

    def add(self, other: Cost) -> None:
        """Add another cost to this one."""
        self.tests += other.tests
        self.seconds += other.seconds
        self.cpu += other.cpu
        self.thorough += other.thorough
        self.events += other.events

    def row(self, name: str) -> str:
        """A row of the page's tables."""
        counts = " | ".join(str(self.events[event] or "") for event in ("python", "torch", "ray"))
        seconds = " | ".join(f"{value:.1f}" for value in (self.seconds, self.cpu, self.cpu - self.thorough))
        return f"| `{name}` | {self.tests} | {seconds} | {counts} |"


Row = dict[str, Any]  # of a test, as the plugin wrote it


def read(folder: Path) -> tuple[list[Row], dict[str, Cost]]:
    """What the plugin wrote in a folder, and test -> its cost."""
    costs: dict[str, Cost] = defaultdict(Cost)
    rows = [json.loads(line) for file in sorted(folder.glob("tests-*")) for line in file.read_text().splitlines()]
    for row in rows:
        costs[row["test"]].add(Cost(1, row["seconds"], row["cpu"], row["cpu"] * row["thorough"]))
    for line in (folder / "processes").read_text().splitlines():
        event, _, test = line.partition("\t")
        if event == "ray":
            costs[test].events["python"] += 1
        costs[test].events[event] += 1
    return rows, costs


def by_file(rows: Iterable[Row]) -> dict[str, list[float]]:
    """file -> CPU seconds of its tests without Ray in the first tier, and of what the second adds; then the same of
    those with Ray, in seconds: these wait more than they compute."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for row in rows:
        file, _, _ = row["test"].partition("::")
        found[file][2 * row["ray"] + row["thorough"]] += row["seconds" if row["ray"] else "cpu"]
    return {file: [round(value, 1) for value in values] for file, values in sorted(found.items())}


def summed(costs: dict[str, Cost], parts: int) -> dict[str, Cost]:
    """The costs by the first ``parts`` parts of the tests' paths."""
    sums: dict[str, Cost] = defaultdict(Cost)
    for test, cost in costs.items():
        sums["/".join(test.partition("::")[0].split("/")[:parts])].add(cost)
    return dict(sorted(sums.items(), key=lambda item: -item[1].cpu))


def page(costs: dict[str, Cost]) -> str:
    """COSTS.md."""
    columns = ("tests", "seconds", "CPU seconds", "first tier", "interpreters", "imports of torch", "Ray nodes")
    head = "| {} | " + " | ".join(columns) + " |\n|---" + "|--:" * len(columns) + "|"
    total = Cost()
    for cost in costs.values():
        total.add(cost)
    dearest = sorted(costs.items(), key=lambda item: -item[1].cpu)[:_DEAREST]
    lines = [
        "# What the tests cost",
        "",
        "Written by `scripts/test --costs`. CPU seconds are those of all processes that a test starts.",
        "Interpreters are those that begin with a command line, Ray's workers among them, not forked ones. What",
        "outlives a test counts for those that run meanwhile.",
        "",
        head.format("folder"),
        total.row("all"),
        *(cost.row(name) for name, cost in summed(costs, 2).items()),
        "",
        f"## The {_DEAREST} dearest tests",
        "",
        head.format("test"),
        *(cost.row(name) for name, cost in dearest),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Read the folder that the command line names and write both files."""
    rows, costs = read(Path(sys.argv[1]))
    PAGE.write_text(page(costs))
    lines = ",\n".join(f" {json.dumps(file)}: {json.dumps(values)}" for file, values in by_file(rows).items())
    FILES.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
