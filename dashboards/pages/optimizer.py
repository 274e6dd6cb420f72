"""The optimizer actors: how long updates take, how near to the memory's limit, who holds the others up."""

from __future__ import annotations

from dashboards.spec import FULL_IS_BAD, Page, Row, panel

PAGE = Page(
    uid="rayzero-optimizer",
    title="RayZero / Optimizer tier",
    description="CPU optimizer actors: updates, efficiency, queues, versions and shards.",
    variables=("actor",),
    rows=(
        Row(
            title="Updates",
            panels=(
                panel(
                    "One step's update",
                    "Seconds of all shards of an actor (mean), publication included.",
                    "s",
                    (
                        "rate(rayzero_optimizer_update_seconds_sum{<actor>}[<i>]) / "
                        "(rate(rayzero_optimizer_update_seconds_count{<actor>}[<i>]) > 0)",
                        "{{run}} actor {{actor}}",
                    ),
                ),
                panel(
                    "Update, p95",
                    "Far above the mean: others take the CPUs, or checkpoints are written.",
                    "s",
                    (
                        "histogram_quantile(0.95, sum by (le, run, actor) "
                        "(rate(rayzero_optimizer_update_seconds_bucket{<actor>}[<i>])))",
                        "{{run}} actor {{actor}}",
                    ),
                ),
                panel(
                    "Parameters a second",
                    "Elements updated.",
                    "short",
                    (
                        "sum by (run, actor) (rate(rayzero_optimizer_params_total{<actor>}[<i>]))",
                        "{{run}} actor {{actor}}",
                    ),
                ),
                panel(
                    "Memory traffic while updating",
                    "Against the limit that was measured at the start, where it was. Far below: too few threads "
                    "(OMP_NUM_THREADS), or the torch kernel for want of a compiler.",
                    "Bps",
                    (
                        "sum by (run, actor) (rate(rayzero_optimizer_memory_bytes_processed_total{<actor>}[<i>])) / "
                        "(sum by (run, actor) (rate(rayzero_optimizer_update_seconds_sum{<actor>}[<i>])) > 0)",
                        "{{run}} actor {{actor}}",
                    ),
                    (
                        "max by (run, actor) (rayzero_host_bandwidth_limit_bytes_per_second{<actor>})",
                        "limit, {{run}} actor {{actor}}",
                    ),
                ),
                panel(
                    "Imbalance",
                    "Largest over mean of the actors' update seconds. Above 1.2: a slow host, or a bad shard_map.",
                    "none",
                    ("max by (run) (rayzero_shard_imbalance_ratio{<run>})", "{{run}}"),
                    thresholds=((None, "green"), (1.2, "orange"), (1.5, "red")),
                ),
                panel(
                    "Kept of original bytes",
                    "1 unless moments, or cpu_compression, keep them encoded.",
                    "percentunit",
                    (
                        "sum by (run, kind) (rayzero_memory_bytes{<actor>}) / "
                        "sum by (run, kind) (rayzero_memory_original_bytes{<actor>})",
                        "{{run}} {{kind}}",
                    ),
                ),
                panel(
                    "Shards",
                    "Of each actor.",
                    "none",
                    ("max by (run, actor) (rayzero_shards{<actor>})", "{{run}} actor {{actor}}"),
                ),
            ),
        ),
        Row(
            title="Work and CPUs",
            panels=(
                panel(
                    "Queue",
                    "Tasks for the updater thread. It grows: the actor is slower than the ranks.",
                    "none",
                    ("max by (run, actor) (rayzero_optimizer_queue_depth{<actor>})", "{{run}} actor {{actor}}"),
                ),
                panel(
                    "Not yet published",
                    "Bytes of shards whose update is decided.",
                    "bytes",
                    ("max by (run, actor) (rayzero_optimizer_queue_bytes{<actor>})", "{{run}} actor {{actor}}"),
                ),
                panel(
                    "Threads and cores",
                    "Threads that update, and CPUs they may run on. One thread, many cores: set threads_per_optimizer.",
                    "none",
                    ("max by (run, actor) (rayzero_optimizer_threads{<actor>})", "threads, {{run}} actor {{actor}}"),
                    ("max by (run, actor) (rayzero_optimizer_cores{<actor>})", "cores, {{run}} actor {{actor}}"),
                ),
                panel(
                    "CPUs in use",
                    "Processor seconds a second of each actor.",
                    "none",
                    (
                        "sum by (run, actor) (rate(rayzero_optimizer_cpu_seconds_total{<actor>}[<i>]))",
                        "{{run}} actor {{actor}}",
                    ),
                ),
                panel(
                    "Version",
                    "Newest whole version of each actor; lines that part show who is behind.",
                    "none",
                    ("max by (run, actor) (rayzero_param_version{<actor>})", "{{run}} actor {{actor}}"),
                ),
                panel(
                    "Version lag",
                    "Steps a rank has committed beyond what is published: 0 or 1.",
                    "none",
                    ("max by (run, rank) (rayzero_version_lag{<run>})", "{{run}} rank {{rank}}"),
                    thresholds=((None, "green"), (2, "red")),
                ),
                panel(
                    "Stalled by checkpoints",
                    "Share of time in which updates could not run because a checkpoint file was written.",
                    "percentunit",
                    (
                        "sum by (run, actor) (rate(rayzero_checkpoint_stall_seconds_total{<actor>}[<i>]))",
                        "{{run}} actor {{actor}}",
                    ),
                    thresholds=FULL_IS_BAD,
                ),
            ),
        ),
    ),
)
