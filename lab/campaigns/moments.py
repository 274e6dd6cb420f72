"""What do Adam's moments in 8 or 16 bits cost in loss? Trains the main job once with each and draws the curves.

Same text, same first weights, same batches: ``rayzero train`` on a Ray of its own, 2 ranks and 2 optimizer actors. The
figure for each is its loss against that of fp32, as the mean over the last 20 steps and over the validation text."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from rayzero.recipes.run_log import StepRow, read_rows

KEPT = ("fp32", "bf16", "int8")
LAST = 20  # steps


def main() -> None:
    """Train, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=Path, default=Path("runs/moments"), help="where the runs are, or will be")
    parser.add_argument("--picture", type=Path, default=Path(__file__).with_suffix(".png"))
    options = parser.parse_args()
    for kept in KEPT:
        train(kept, options.runs / kept, options.steps)
    curves = {kept: read_rows(options.runs / kept) for kept in KEPT}
    draw(curves, options.picture)
    tell(curves)


def train(kept: str, run_dir: Path, steps: int) -> None:
    """Run the main job, unless ``run_dir`` has it already."""
    if len(read_rows(run_dir)) < steps:
        command = [sys.executable, "-m", "rayzero", "train", "--steps", str(steps), "--run-dir", str(run_dir)]
        subprocess.run([*command, f"zero.moments={kept}"], check=True, stdout=sys.stderr)


def tell(curves: dict[str, list[StepRow]]) -> None:
    """Print a table."""
    exact = curves[KEPT[0]]
    for kept, rows in curves.items():
        late, validated = _late(rows), _validated(rows)
        print(
            f"moments {kept}  loss of steps {rows[-LAST].step}-{rows[-1].step} {late:.4f} "
            f"({late / _late(exact) - 1:+.2%})  validation {validated:.4f} ({validated / _validated(exact) - 1:+.2%})"
        )


def _late(rows: list[StepRow]) -> float:
    return fmean(row.loss for row in rows[-LAST:])


def _validated(rows: list[StepRow]) -> float:
    return [row.validation_loss for row in rows if row.validation_loss is not None][-1]


def draw(curves: dict[str, list[StepRow]], path: Path) -> None:
    """Draw training losses above and their ratios to fp32's, over 20 steps each, below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    exact = curves[KEPT[0]]
    for kept, rows in curves.items():
        above.plot([row.step for row in rows], [row.loss for row in rows], lw=1, label=f"moments {kept}")
        means = [
            (row.step, _late(rows[: i + 1]) / _late(exact[: i + 1]) - 1) for i, row in enumerate(rows) if i + 1 >= LAST
        ]
        below.plot([step for step, _ in means], [100 * ratio for _, ratio in means], lw=1)
    above.set(ylabel="loss (nats per token)", title="The main job with Adam's moments in 32, 16 and 8 bits")
    above.legend()
    below.set(xlabel="step", ylabel=f"over fp32's, {LAST} steps (%)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
