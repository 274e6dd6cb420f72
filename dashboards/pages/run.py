"""Is it learning, how fast, and is anything wrong: the page to begin with."""

from __future__ import annotations

from dashboards.spec import ANY_IS_BAD, HIGH_IS_BAD, LOW_IS_BAD, Page, Row, panel

_P50 = "histogram_quantile(0.5, sum by (le) (rate(rayzero_step_seconds_bucket{<run>}[<i>])))"
_EXPOSED = (
    "sum(rate(rayzero_exposed_wait_seconds_total{<run>}[<i>])) / (sum(rate(rayzero_step_seconds_sum{<run>}[<i>])) > 0)"
)

PAGE = Page(
    uid="rayzero-run",
    title="RayZero / Run",
    description="Progress, loss and health of a training run.",
    variables=("rank",),
    rows=(
        Row(
            title="At a glance",
            panels=(
                panel(
                    "Step",
                    "Steps committed by the slowest rank.",
                    "none",
                    "min(rayzero_step{<run>})",
                    kind="stat",
                    width=3,
                ),
                panel(
                    "Time left",
                    "Steps left times the mean seconds of a step so far.",
                    "s",
                    "max(rayzero_eta_seconds{<run>})",
                    kind="stat",
                    width=3,
                ),
                panel(
                    "Tokens/s",
                    "All ranks. It falls: see where the step goes.",
                    "short",
                    "sum(rate(rayzero_tokens_total{<run>}[<i>]))",
                    kind="stat",
                    width=3,
                    opens="rayzero-step",
                ),
                panel(
                    "Step p50", "Half of all steps are faster.", "s", _P50, kind="stat", width=3, opens="rayzero-step"
                ),
                panel(
                    "Standing still",
                    "Share of the ranks' time in which their loops waited for fetches, pushes, the norm or the update. "
                    "Above 10 %: see where the step goes.",
                    "percentunit",
                    _EXPOSED,
                    kind="stat",
                    width=3,
                    thresholds=HIGH_IS_BAD,
                    opens="rayzero-step",
                ),
                panel(
                    "Optimizer hidden",
                    "Share of the update's time that ranks did not wait for: near 1 when Adam hides under the next "
                    "forward. Low: more optimizer actors or threads, larger batches.",
                    "percentunit",
                    "min(rayzero_optimizer_overlap_ratio{<run>})",
                    kind="stat",
                    width=3,
                    thresholds=LOW_IS_BAD,
                    opens="rayzero-optimizer",
                ),
                panel(
                    "Processes missing",
                    "Wanted processes that were not heard of lately. Not 0: see reliability, and the run's log.",
                    "none",
                    'sum(rayzero_actors{<run>,state="desired"}) - sum(rayzero_actors{<run>,state="ready"})',
                    kind="stat",
                    width=3,
                    thresholds=ANY_IS_BAD,
                    opens="rayzero-reliability",
                ),
                panel(
                    "Since the last step",
                    "Much longer than a step: the run stands. See reliability for who is late.",
                    "s",
                    "time() - max(rayzero_last_step_timestamp_seconds{<run>})",
                    kind="stat",
                    width=3,
                    opens="rayzero-reliability",
                ),
            ),
        ),
        Row(
            title="Learning",
            panels=(
                panel("Loss", "Mean over the ranks.", "none", ("avg by (run) (rayzero_train_loss{<run>})", "{{run}}")),
                panel(
                    "Reported by the loop",
                    "What the training loop hands to rayzero.report, by name; mean over the ranks that report it.",
                    "none",
                    ("avg by (run, name) (rayzero_reported{<run>})", "{{name}} {{run}}"),
                ),
                panel(
                    "Gradient norm",
                    "Of the averaged gradients, before clipping. Bursts: lower the learning rate or clip.",
                    "none",
                    ("max by (run) (rayzero_grad_norm{<run>})", "norm {{run}}"),
                    ("max by (run) (rayzero_clip_factor{<run>})", "clip factor {{run}}"),
                ),
                panel(
                    "Clipped and skipped steps",
                    "Share of steps that clipping by norm shortened, and of those with an inf or nan gradient, which "
                    "change nothing. Skipped ones go on: look at the data, lower the learning rate.",
                    "percentunit",
                    (
                        "sum by (run) (rate(rayzero_clipped_steps_total{<run>}[<i>])) / "
                        "(sum by (run) (rate(rayzero_decided_steps_total{<run>}[<i>])) > 0)",
                        "clipped {{run}}",
                    ),
                    (
                        "sum by (run, reason) (rate(rayzero_skipped_steps_total{<run>}[<i>])) / on (run) group_left () "
                        "(sum by (run) (rate(rayzero_decided_steps_total{<run>}[<i>])) > 0)",
                        "{{reason}} {{run}}",
                    ),
                ),
                panel(
                    "Loss scale",
                    "Of a GradScaler (fp16); 1 without. It keeps falling: gradients overflow, see skipped steps.",
                    "none",
                    ("max by (run) (rayzero_loss_scale{<run>})", "{{run}}"),
                ),
                panel(
                    "Learning rate",
                    "By parameter group.",
                    "none",
                    ("max by (run, param_group) (rayzero_learning_rate{<run>})", "{{run}} group {{param_group}}"),
                ),
                panel(
                    "Throughput",
                    "Tokens a second of each rank; even lines are good.",
                    "short",
                    ("sum by (run, rank) (rate(rayzero_tokens_total{<rank>}[<i>]))", "{{run}} rank {{rank}}"),
                ),
                panel(
                    "Samples/s",
                    "Sequences a second, all ranks.",
                    "short",
                    ("sum by (run) (rate(rayzero_samples_total{<run>}[<i>]))", "{{run}}"),
                ),
            ),
        ),
        Row(
            title="What runs",
            panels=(
                panel(
                    "Build",
                    "Versions, the kernel that computes updates, and how bytes travel.",
                    "none",
                    "max by (run, version, torch, kernel, transport) (rayzero_build_info{<run>})",
                    kind="table",
                    width=24,
                ),
            ),
        ),
    ),
)
