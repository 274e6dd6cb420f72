"""Losses of the main recipe with Muon for the matrices of blocks, and with AdamW alone, some rates each.

``python docs/pictures/muon.py RUNS "MACHINE"`` keeps in muon.json what the runs in the folders of RUNS have logged.
Each is named after its optimizer and its rate: ``rayzero train optimizer=muon lr=3e-3 steps=300 scaling.num_workers=1
scaling.num_optimizers=1 --run-dir RUNS/muon-3e-3``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.pictures.svg import Drawing

RECORD = Path(__file__).with_name("muon.json")
COLOURS = {"muon": "b", "adamw": "a"}
NAMES = {"muon": "Muon and AdamW", "adamw": "AdamW"}
MEAN = 10  # steps of a point
LEFT, TOP, WIDTH, HEIGHT = 60, 40, 560, 300


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Of each run its optimizer, its rate, its losses in training, each the mean over some steps, and its last one in
    validation."""
    from rayzero.recipes.run_log import read_rows

    found = []
    for path in sorted(each for each in folder.iterdir() if (each / "metrics.jsonl").exists()):
        optimizer, _, rate = path.name.partition("-")
        rows = read_rows(path)
        losses = [fmean(row.loss for row in rows[at : at + MEAN]) for at in range(0, len(rows), MEAN)]
        validated = [row.validation_loss for row in rows if row.validation_loss is not None]
        found.append(
            {
                "optimizer": optimizer,
                "rate": rate,
                "losses": [round(loss, 4) for loss in losses],
                "validated": round(validated[-1], 4),
            }
        )
    return found


def draw() -> str:
    """A curve for each run; the best of each optimizer is thick."""
    record = json.loads(RECORD.read_text())
    runs = record["runs"]
    steps = MEAN * len(runs[0]["losses"])
    low = 0.2 * int(min(min(run["losses"]) for run in runs) / 0.2)
    high = 3.6
    made = Drawing(820, TOP + HEIGHT + 62, "Loss by step of the main recipe with Muon and AdamW, and with AdamW alone")
    made.text(10, 20, f"the main recipe, {steps} steps of the same batches: loss in training, nats a byte", "strong")
    for number in range(int((high - low) / 0.4 + 0.01) + 1):
        y = TOP + HEIGHT - HEIGHT * (0.4 * number) / (high - low)
        made.line(LEFT, y, LEFT + WIDTH, y, "line dash")
        made.text(LEFT - 8, y + 4, f"{low + 0.4 * number:.1f}", "small soft", "end")
    for number in range(7):
        x = LEFT + WIDTH * number / 6
        made.text(x, TOP + HEIGHT + 18, f"{steps * number // 6}", "small soft", "middle")
    made.text(LEFT + WIDTH / 2, TOP + HEIGHT + 36, "step", "small soft", "middle")
    best = {of: min((r for r in runs if r["optimizer"] == of), key=lambda run: run["validated"]) for of in COLOURS}
    for run in sorted(runs, key=lambda run: run is best[run["optimizer"]]):  # the best on top
        points = [
            (LEFT + WIDTH * (MEAN * (at + 0.5)) / steps, TOP + HEIGHT * (high - min(loss, high)) / (high - low))
            for at, loss in enumerate(run["losses"])
        ]
        weight = "thick" if run is best[run["optimizer"]] else "thin"
        made.curve(points, f"curve {weight} s{COLOURS[run['optimizer']]}")
    y = TOP + 12
    for of, colour in COLOURS.items():
        made.box(LEFT + WIDTH + 16, y - 10, 12, 12, colour, 2)
        made.text(LEFT + WIDTH + 34, y, NAMES[of], "strong")
        for run in sorted((r for r in runs if r["optimizer"] == of), key=lambda run: float(run["rate"])):
            y += 20
            mark = " (thick)" if run is best[of] else ""
            made.text(LEFT + WIDTH + 34, y, f"lr {run['rate']}: {run['validated']:.3f} nats{mark}", "small")
        y += 34
    made.text(LEFT + WIDTH + 16, y, "figures: loss in validation", "small soft")
    made.text(LEFT + WIDTH + 16, y + 16, "after the last step", "small soft")
    made.text(10, TOP + HEIGHT + 56, record["machine"], "small soft")
    return made.svg()


if __name__ == "__main__":
    taken = {"machine": sys.argv[2], "runs": runs_in(Path(sys.argv[1]))}
    RECORD.write_text(json.dumps(taken, separators=(",", ":")).replace("},{", "},\n{") + "\n")
