"""Health of the layers: gradients, updates and weights by layer group."""

from __future__ import annotations

from dashboards.spec import Page, Row, panel


def _norm(metric: str) -> str:
    """Owners have parts of a group: the group's norm is the root of the sum of their squares."""
    return f"sqrt(sum by (run, group) ({metric}{{<run>}}^2))"


_GRADIENT, _UPDATE, _PARAM = (_norm(f"rayzero_group_{what}_norm") for what in ("grad", "update", "param"))

PAGE = Page(
    uid="rayzero-layers",
    title="RayZero / Layers",
    description="Norms by layer group, every telemetry.norms_every steps.",
    variables=(),
    rows=(
        Row(
            title="Norms",
            panels=(
                panel(
                    "Update over weights",
                    "Healthy near 0.001. Group far above: its learning rate is too high; far below: it learns nothing.",
                    "none",
                    (f"{_UPDATE} / ({_PARAM} > 0)", "{{run}} {{group}}"),
                    width=24,
                ),
                panel(
                    "Gradient",
                    "Before clipping. One group dominates: it decides how the others are clipped.",
                    "none",
                    (_GRADIENT, "{{run}} {{group}}"),
                    width=12,
                ),
                panel(
                    "Update", "What the step added to the weights.", "none", (_UPDATE, "{{run}} {{group}}"), width=12
                ),
                panel(
                    "Weights",
                    "fp32 masters. They grow without end: more weight decay.",
                    "none",
                    (_PARAM, "{{run}} {{group}}"),
                    width=12,
                ),
                panel(
                    "Late units",
                    "Seconds waited a second for units of the group: where prefetch loses.",
                    "s",
                    (
                        "sum by (run, group) (rate(rayzero_prefetch_group_late_seconds_total{<run>}[<i>]))",
                        "{{run}} {{group}}",
                    ),
                    width=12,
                ),
            ),
        ),
    ),
)
