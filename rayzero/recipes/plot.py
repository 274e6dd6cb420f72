"""loss.png: training and validation loss over steps, beside the unigram baseline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rayzero.recipes.run_log import StepRow

LOSS_PICTURE = "loss.png"


def draw_losses(rows: Sequence[StepRow], unigram: float, path: Path) -> None:
    """Draw the curves into ``path`` (PNG). ``unigram``: validation loss in nats of a model that only counts tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([row.step for row in rows], [row.loss for row in rows], color="tab:blue", lw=1, label="train")
    validated = [(row.step, row.validation_loss) for row in rows if row.validation_loss is not None]
    if validated:
        steps, losses = zip(*validated, strict=True)
        axes.plot(steps, losses, color="tab:orange", marker="o", label="validation")
    axes.axhline(unigram, color="gray", ls="--", lw=1, label=f"unigram baseline ({unigram:.2f})")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
