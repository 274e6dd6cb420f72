"""README.md's table: what came of every case, as it was last recorded (``results/<category>.json``)."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .case import Case
from .engines import Result

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE / "README.md"

HEAD = """# Training programs

What trains unsharded, and what becomes of it with one line (RayZero: 1, 2 and 3 ranks, both precisions, stores in
turn) and under FSDP2 (torch 2.13, CPU, 2 ranks, fp32). "same": the weights, and what the program returned, are those of
unsharded training whose gradients are averaged over the ranks. Written by `pytest tests/programs --record`, and again
with `--engine fsdp2`; how to add a case is told in `case.py`.
"""


@dataclass(kw_only=True)
class Row:
    """What is known of one case."""

    rayzero: str = ""
    rayzero_reason: str = ""
    fsdp2: str = ""
    fsdp2_reason: str = ""


@dataclass
class Table:
    """category -> case -> its row, in the order of the files."""

    rows: dict[str, dict[str, Row]] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Table:
        """What was recorded."""
        files = sorted(RESULTS.glob("*.json"))
        return cls(
            {file.stem: {name: Row(**row) for name, row in json.loads(file.read_text()).items()} for file in files}
        )

    def row(self, category: str, case: Case) -> Row:
        """A case's row; a new one where it has none."""
        return self.rows.setdefault(category, {}).setdefault(case.name, Row())

    def note(self, category: str, case: Case, engine: str, result: Result) -> None:
        """Take down what came of a case."""
        row = self.row(category, case)
        setattr(row, engine, result.kind)
        setattr(row, f"{engine}_reason", _short(result.reason))

    def write(self, category: str, names: list[str]) -> None:
        """Write one category's results and README.md. ``names``: the cases there are, in their order."""
        RESULTS.mkdir(exist_ok=True)
        kept = {name: self.rows[category][name] for name in names if name in self.rows[category]}
        self.rows[category] = kept
        text = json.dumps({name: asdict(row) for name, row in kept.items()}, indent=1, ensure_ascii=False)
        (RESULTS / f"{category}.json").write_text(text + "\n")
        README.write_text(Table.read().render())

    def render(self) -> str:
        """README.md."""
        parts = [HEAD]
        for category, cases in sorted(self.rows.items()):
            right = sum(row.rayzero == "same" for row in cases.values())
            theirs = sum(row.fsdp2 == "same" for row in cases.values())
            parts.append(
                f"\n## {category.replace('_', ' ').capitalize()}\n\nThe same as unsharded: RayZero {right} of "
                f"{len(cases)}, FSDP2 {theirs}. Test: `test_{category}.py::test_trains_as_unsharded[<case>-...]`\n\n"
                "| case | RayZero | FSDP2 | why not |\n|---|---|---|---|\n"
            )
            parts += [_line(name, row) for name, row in cases.items()]
        return "".join(parts)


def _line(name: str, row: Row) -> str:
    whys = [f"RayZero: {row.rayzero_reason}" if row.rayzero_reason else "", row.fsdp2_reason]
    why = "; ".join(filter(None, whys)).replace("|", "\\|").replace("][", "]\\[").replace("](", "]\\(")  # no links
    return f"| {name} | {row.rayzero} | {row.fsdp2 or 'not run yet'} | {why} |\n"


def _short(reason: str, length: int = 160) -> str:
    """The first sentence, without what differs from run to run."""
    line = " ".join(reason.split())
    line = re.sub(r"(?<!\w)(/[\w.-]+)+/", "", re.sub(r"0x[0-9a-f]+", "0x…", line))
    line = re.sub(r"differs by [0-9.e+-]+|\.py:\d+", lambda found: found[0].split(" by")[0].split(":")[0], line)
    return line if len(line) <= length else line[: length - 1] + "…"
