"""Reward by step of examples/grpo.py, on-policy and with generation one version ahead, and what a step's time is.

``python docs/pictures/grpo.py ON_POLICY AHEAD "MACHINE"`` keeps in grpo.json what the runs in these two folders have
logged: ``examples/grpo.py --storage A`` and ``examples/grpo.py --ahead --storage B`` make A/grpo and B/grpo.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.pictures.svg import Drawing

RECORD = Path(__file__).with_name("grpo.json")
COLOURS = {"on-policy": "a", "one version ahead": "b"}
PARTS = {"update_s": ("c", "weights to vLLM"), "generate_s": ("d", "generation"), "train_s": ("e", "training")}
MEAN = 5  # steps of a point
LEFT, TOP, WIDTH, HEIGHT, BAR = 60, 40, 560, 260, 22


def run_in(folder: Path, mode: str) -> dict[str, Any]:
    """A run's rewards, each the mean over some steps, and the medians of the seconds of a step and of its parts."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward" in row]
    for row in rows:
        row["train_s"] = row["step_s"] - row["wait_s"]
    usual = rows[2:]  # the first ones wait for the server's start
    return {
        "mode": mode,
        "first": rows[0]["step"] - 1,
        "rewards": [round(fmean(row["reward"] for row in rows[at : at + MEAN]), 4) for at in range(0, len(rows), MEAN)],
        "seconds": {key: round(median(row[key] for row in usual), 4) for key in ("step_s", "wait_s", *PARTS)},
        "log_ratio": float(f"{median(row['log_ratio'] for row in usual):.2g}"),
        "clipped": round(fmean(row["clipped"] for row in usual), 4),
    }


def draw() -> str:
    """Curves above, bars below."""
    record = json.loads(RECORD.read_text())
    runs = record["runs"]
    steps = MEAN * max(len(run["rewards"]) for run in runs)
    low = TOP + HEIGHT + 60
    made = Drawing(820, low + 5 * BAR + 36, "Reward by step of GRPO with RayZero and vLLM, and the seconds of a step")
    made.text(10, 20, "sums of two numbers below 10: share of right answers, by step of reinforcement", "strong")
    for number in range(6):
        y = TOP + HEIGHT * (1 - number / 5)
        made.line(LEFT, y, LEFT + WIDTH, y, "line dash")
        made.text(LEFT - 8, y + 4, f"{number / 5:.1f}", "small soft", "end")
    for number in range(7):
        made.text(LEFT + WIDTH * number / 6, TOP + HEIGHT + 18, f"{steps * number // 6}", "small soft", "middle")
    for at, run in enumerate(runs):
        colour = COLOURS[run["mode"]]
        points = [
            (LEFT + WIDTH * MEAN * (number + 0.5) / steps, TOP + HEIGHT * (1 - reward))
            for number, reward in enumerate(run["rewards"])
        ]
        made.curve(points, f"curve thick s{colour}")
        made.box(LEFT + WIDTH + 16, TOP + 44 * at, 12, 12, colour, 2)
        made.text(LEFT + WIDTH + 34, TOP + 10 + 44 * at, run["mode"], "strong")
        made.text(LEFT + WIDTH + 34, TOP + 26 + 44 * at, f"{run['rewards'][-1]:.2f} at the end", "small")
    made.text(10, low - 14, "seconds of a step", "strong")
    longest = max(run["seconds"]["step_s"] for run in runs)
    lanes = [(*PARTS,), ("train_s",), ("update_s", "generate_s")]  # on-policy; ahead: the ranks, and vLLM meanwhile
    whose = (runs[0], "on-policy"), (runs[1], "ahead: ranks"), (runs[1], "ahead: vLLM")
    for at, (parts, (run, who)) in enumerate(zip(lanes, whose, strict=True)):
        y, x = low + at * (BAR + 6), 110.0
        made.text(10, y + 15, who, "small")
        for part in parts:
            seconds = run["seconds"][part]
            wide = (LEFT + WIDTH - 110) * seconds / longest
            made.box(x, y, wide, BAR, PARTS[part][0])
            if wide > 34:
                made.text(x + wide / 2, y + 15, f"{seconds:.2f}", "small on", "middle")
            x += wide
        if parts[-1] != "generate_s":
            made.text(LEFT + WIDTH + 16, y + 15, f"{run['seconds']['step_s']:.2f} s in all", "small")
    y = low + 3 * (BAR + 6) + 16
    for at, (colour, name) in enumerate(PARTS.values()):
        made.box(110 + 150 * at, y - 10, 12, 12, colour, 2)
        made.text(128 + 150 * at, y, name, "small")
    made.text(10, y + 34, record["machine"], "small soft")
    return made.svg()


if __name__ == "__main__":
    taken = [run_in(Path(folder), mode) for folder, mode in zip(sys.argv[1:3], COLOURS, strict=True)]
    record = {"machine": sys.argv[3], "runs": taken}
    RECORD.write_text(json.dumps(record, separators=(",", ":")).replace("},{", "},\n{") + "\n")
