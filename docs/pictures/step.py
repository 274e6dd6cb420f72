"""A step of a real run, from its trace.

``python docs/pictures/step.py TRACE.json STEP "MACHINE"`` keeps one in step.json: the spans from the step's forward to
the end of the next one's. The trace is what ``run.telemetry.trace_steps`` writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.pictures.svg import Drawing

RECORD = Path(__file__).with_name("step.json")
ROWS = (
    ("rank 0", "step", "phases"),
    ("rank 0", "forward", "units: forward"),
    ("rank 0", "backward", "units: backward"),
    ("rank 0", "push", "push gradients"),
    ("rank 0", "wait", "waits"),
    ("optimizer 0", "norm", "norm parts"),
    ("optimizer 0", "update", "Adam, by shard"),
    ("optimizer 0", "publish", "publish"),
    ("optimizer 1", "norm", "norm parts"),
    ("optimizer 1", "update", "Adam, by shard"),
    ("optimizer 1", "publish", "publish"),
)
COLOURS = {"forward": "a", "backward": "d", "push": "e", "wait": "b", "norm": "c", "update": "c", "publish": "b"}
PHASES = {"forward": "a", "backward": "d", "optimizer": "b", "grad_push": "e", "norm": "c", "data": "empty"}


def window(trace: dict[str, Any], step: int) -> list[list[Any]]:
    """[process, lane, name, start, end] in milliseconds, from the forward of ``step`` to the end of the next one."""
    names = {one["pid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"}
    spans = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    forwards = [s for s in spans if names[s["pid"]] == "rank 0" and s["cat"] == "step" and s["name"] == "forward"]
    first = min(one["ts"] for one in forwards if one["args"]["step"] == step)
    last = min(one["ts"] + one["dur"] for one in forwards if one["args"]["step"] == step + 1)
    kept = []
    for one in sorted(spans, key=lambda span: float(span["ts"])):
        begin, end = max(one["ts"], first), min(one["ts"] + one["dur"], last)
        if end > begin or (first <= one["ts"] <= last):
            kept.append([names[one["pid"]], one["cat"], one["name"], round((begin - first) / 1e3, 2)])
            kept[-1].append(round((end - first) / 1e3, 2))
    return kept


def draw() -> str:
    """Rows of processes and lanes over one clock."""
    record = json.loads(RECORD.read_text())
    spans = record["spans"]
    end = max(span[4] for span in spans)
    made = Drawing(
        820, 92 + 26 * len(ROWS), "What a rank and two optimizer actors do during one step and the next forward"
    )
    made.text(10, 20, "one step of rank 0 and the next forward; what the two optimizer actors do meanwhile", "strong")
    scale, y, before = 640 / end, 36.0, ""
    for number in range(5):
        made.line(172 + 160 * number, 34, 172 + 160 * number, 48 + 24 * len(ROWS), "line dash")
    for who, lane, words in ROWS:
        if who != before:
            y += 4 if before else 0
            made.text(10, y + 15, who, "strong small")
        made.text(164, y + 15, words, "small soft", "end")
        for process, cat, name, begin, stop in spans:
            if (process, cat) == (who, lane):
                kind = PHASES.get(name, "empty") if lane == "step" else COLOURS[lane]
                width = max((stop - begin) * scale, 1.5)
                made.box(172 + begin * scale, y + 2, width, 18, kind, 2)
                label = name.replace("blocks.", "").partition(" ")[0]
                if width > 8 * len(label) + 6 and lane in ("step", "forward", "backward") and kind != "empty":
                    made.text(172 + begin * scale + width / 2, y + 15, label, "small on", "middle")
        before, y = who, y + 24
    for number in range(5):
        made.text(
            172 + 160 * number, y + 18, f"{end * number / 4:.0f} ms", "small soft", "middle" if number < 4 else "end"
        )
    made.text(10, y + 40, record["machine"], "small soft")
    return made.svg()


if __name__ == "__main__":
    taken = {"machine": sys.argv[3], "spans": window(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))}
    RECORD.write_text(json.dumps(taken, indent=None, separators=(",", ":")).replace("],[", "],\n[") + "\n")
