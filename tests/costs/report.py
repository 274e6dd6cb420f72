"""Turns what the plugin took down into COSTS.md, for people, and files.json, by which `parts.py` divides the work."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

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


def read(folder: Path) -> dict[str, Cost]:
    """test -> its cost, from a folder that the plugin wrote."""
    costs: dict[str, Cost] = defaultdict(Cost)
    for file in sorted(folder.glob("tests-*")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            costs[row["test"]].add(Cost(1, row["seconds"], row["cpu"], row["cpu"] * row["thorough"]))
    for line in (folder / "processes").read_text().splitlines():
        event, _, test = line.partition("\t")
        if event == "ray":
            costs[test].events["python"] += 1
        costs[test].events[event] += 1
    return costs


def summed(costs: dict[str, Cost], parts: int) -> dict[str, Cost]:
    """The costs by the first ``parts`` parts of the tests' paths."""
    sums: dict[str, Cost] = defaultdict(Cost)
    for test, cost in costs.items():
        sums["/".join(test.partition("::")[0].split("/")[:parts])].add(cost)
    return dict(sorted(sums.items(), key=lambda item: -item[1].cpu))


def page(costs: dict[str, Cost]) -> str:
    """COSTS.md."""
    columns = ("tests", "seconds", "CPU seconds", "first tier", "interpreters", "imports of torch", "Rays")
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
    costs = read(Path(sys.argv[1]))
    PAGE.write_text(page(costs))
    by_file = {
        name: [round(cost.cpu - cost.thorough, 1), round(cost.thorough, 1)]
        for name, cost in sorted(summed(costs, 9).items())
        if name
    }
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in by_file.items())
    FILES.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main()
