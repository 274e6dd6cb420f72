"""Where a step's time goes, and what a rank waited for."""

from __future__ import annotations

from dashboards.spec import LOW_IS_BAD, Page, Row, panel

PAGE = Page(
    uid="rayzero-step",
    title="RayZero / Where the step goes",
    description="Phases of a step, and the time in which ranks stood still, by cause.",
    variables=("rank",),
    rows=(
        Row(
            title="A step",
            panels=(
                panel(
                    "Phases",
                    "Mean seconds of a step by phase, stacked; waits are not in the pass they interrupt. The tallest "
                    "is what to work on: fetch_wait, see links; optimizer and norm, see the optimizer tier.",
                    "s",
                    (
                        "sum by (phase) (rate(rayzero_step_phase_seconds_sum{<rank>}[<i>])) / on () group_left () "
                        "(sum(rate(rayzero_step_seconds_count{<rank>}[<i>])) > 0)",
                        "{{phase}}",
                    ),
                    kind="stack",
                    width=12,
                ),
                panel(
                    "Seconds of a step",
                    "Quantiles over all ranks. A p95 far above the p50: some steps stall; compare with checkpoints.",
                    "s",
                    (
                        "histogram_quantile(0.5, sum by (le) (rate(rayzero_step_seconds_bucket{<rank>}[<i>])))",
                        "p50",
                    ),
                    (
                        "histogram_quantile(0.95, sum by (le) (rate(rayzero_step_seconds_bucket{<rank>}[<i>])))",
                        "p95",
                    ),
                    width=12,
                ),
            ),
        ),
        Row(
            title="Computing",
            panels=(
                panel(
                    "Model FLOP/s",
                    "Of each rank: the model's own operations over whole steps. One rank below the others: its device "
                    "is slower or shared.",
                    "short",
                    ("sum by (run, rank) (rayzero_model_flops_per_second{<rank>})", "{{run}} rank {{rank}}"),
                    width=12,
                ),
                panel(
                    "MFU",
                    "Share of what its GPU could do at most (data sheet, dense, 16-bit); empty where that is not "
                    "known. Low without waits: larger batches, longer sequences.",
                    "percentunit",
                    ("sum by (run, rank) (rayzero_mfu_ratio{<rank>})", "{{run}} rank {{rank}}"),
                    at_most=1,
                    width=12,
                ),
            ),
        ),
        Row(
            title="Waits",
            panels=(
                panel(
                    "Standing still, by cause",
                    "Seconds of each second. fetch: bytes on their way; optimizer: weights not published yet; push: "
                    "gradients not landed; norm: other ranks.",
                    "percentunit",
                    (
                        "avg by (cause) (rate(rayzero_exposed_wait_seconds_total{<rank>}[<i>]))",
                        "{{cause}}",
                    ),
                    kind="stack",
                    width=12,
                ),
                panel(
                    "Standing still, by rank",
                    "One rank above the others: its link or its host is slow. All alike: the optimizer tier is.",
                    "percentunit",
                    (
                        "sum by (run, rank) (rate(rayzero_exposed_wait_seconds_total{<rank>}[<i>]))",
                        "{{run}} rank {{rank}}",
                    ),
                    width=12,
                ),
                panel(
                    "Optimizer hidden",
                    "Of the time from a step's commit to its last published weights, the part a rank did not wait for.",
                    "percentunit",
                    ("avg by (run, rank) (rayzero_optimizer_overlap_ratio{<rank>})", "{{run}} rank {{rank}}"),
                    thresholds=LOW_IS_BAD,
                    at_most=1,
                    width=12,
                ),
                panel(
                    "Step and its update",
                    "Mean seconds of a step and of one step's update: the update hides while it is the shorter.",
                    "s",
                    (
                        "sum(rate(rayzero_step_seconds_sum{<run>}[<i>])) / "
                        "(sum(rate(rayzero_step_seconds_count{<run>}[<i>])) > 0)",
                        "step",
                    ),
                    (
                        "max(rate(rayzero_optimizer_update_seconds_sum{<run>}[<i>]) / "
                        "(rate(rayzero_optimizer_update_seconds_count{<run>}[<i>]) > 0))",
                        "update, slowest actor",
                    ),
                    width=12,
                ),
            ),
        ),
    ),
)
