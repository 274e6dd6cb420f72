"""How long it takes to replace an optimizer actor that was killed: medians of lab/RESULTS.md."""

from __future__ import annotations

from docs.hooks.results import tables
from docs.pictures.svg import Drawing

SECTION = "spares: an optimizer actor that is replaced on Ray"
PHASES = (("detect", "b"), ("start", "a"), ("re-form", "c"))


def measured() -> dict[str, list[float]]:
    """Seconds of each phase, by the number of warm spares."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables(f"1 {SECTION}").splitlines()]
    return {row[0]: [float(value) for value in row[2:]] for row in rows[2:]}


def draw() -> str:
    """A bar for each number of spares."""
    found = measured()
    made = Drawing(760, 210, "Seconds from the death of an optimizer actor until every process knows its successor")
    made.text(10, 22, "from the death of an optimizer actor to its successor's place in the run, seconds", "strong")
    scale = 560 / max(sum(seconds) for seconds in found.values())
    for row, (spares, seconds) in enumerate(found.items()):
        y, x = 46 + 52 * row, 130.0
        made.text(10, y + 19, f"warm_spares={spares}")
        for (_, kind), value in zip(PHASES, seconds, strict=True):
            made.box(x, y, max(value * scale - 1, 2), 28, kind, 2)
            x += value * scale
        made.text(x + 8, y + 19, f"{sum(seconds):.2f} s", "strong")
    words = ("detect: the kernel or Ray reports it", "start: a new process", "re-form: the others connect")
    for x, (_, kind), text in zip((130, 370, 530), PHASES, words, strict=True):
        made.box(x, 160, 12, 12, kind, 2)
        made.text(x + 18, 171, text, "small")
    made.text(
        10,
        198,
        "medians of five kills each, 2 ranks and 2 optimizer actors on one host (RESULTS.md, spares)",
        "small soft",
    )
    return made.svg()
