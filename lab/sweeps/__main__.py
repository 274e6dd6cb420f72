"""`scripts/sweep FAMILY [--only TEXT]`: runs a family's cases and writes its page."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType

from .table import page, write
from .trial import WRONG, Outcome, outcome_of

_NO_FAMILY = {"__init__", "__main__", "beside", "table", "tiny_configs", "trial"}
FAMILIES = sorted(file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in _NO_FAMILY)


def main() -> int:
    """Run what the command line asks for. Returns 1 if a case is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="scripts/sweep", description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--only", metavar="TEXT", help="cases whose name has this; prints them, writes no page")
    asked = parser.parse_args()
    family = importlib.import_module(f"lab.sweeps.{asked.family}")
    outcomes = _run(family, asked.only)
    if asked.only is None:
        text = page(family.TITLE, family.INTRO, family.PACKAGES, outcomes, f"scripts/sweep {asked.family}")
        print(f"wrote {write(asked.family, text)}")
    return int(any(outcome.kind == WRONG for outcome in outcomes.values()))


def _run(family: ModuleType, only: str | None) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for case in family.cases():
        if only is not None and only not in case.name:
            continue
        began = time.perf_counter()
        outcomes[case.name] = outcome = outcome_of(case, seconds=getattr(family, "SECONDS", 180.0))
        print(f"{case.name}: {outcome.kind} {outcome.why} ({time.perf_counter() - began:.1f} s)", flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
