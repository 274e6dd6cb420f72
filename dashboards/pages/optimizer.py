"""The optimizer actors: how long updates take, how near to the memory's limit, who holds the others up."""

from __future__ import annotations

from dashboards.spec import FULL_IS_BAD, HIGH_IS_BAD, Page, Row, grown, panel

PAGE = Page(
    uid="rayzero-optimizer",
    title="RayZero / Optimizer tier",
    description="CPU optimizer actors: updates, efficiency, queues, versions and shards, and how many there are.",
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
                    "Matrices multiplied",
                    "Newton-Schulz, by who computes it. With zero.matrix_updates=rank, any at actors: ranks were late.",
                    "short",
                    ("sum by (run, role) (rate(rayzero_matrix_products_total{<run>}[<i>]))", "{{run}} {{role}}"),
                ),
                panel(
                    "Seconds a matrix",
                    "Of one thread, mean.",
                    "s",
                    (
                        "sum by (run, role) (rate(rayzero_matrix_product_seconds_total{<run>}[<i>])) / "
                        "(sum by (run, role) (rate(rayzero_matrix_products_total{<run>}[<i>])) > 0)",
                        "{{run}} {{role}}",
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
            title="Scale",
            panels=(
                panel(
                    "Optimizer actors",
                    "Wanted and ready. rayzero scale changes their number while the run trains, as does autoscaling "
                    "(scaling.max_optimizers).",
                    "none",
                    (
                        'sum by (run, state) (rayzero_actors{<run>,kind="optimizer",state=~"desired|ready"})',
                        "{{run}} {{state}}",
                    ),
                ),
                panel(
                    "Waiting for updates",
                    "Share of a step, of the rank that waits most. Autoscaling adds actors while it is above "
                    "scaling.target_exposed. Where more actors do not help, they share what limits them, such as the "
                    "memory of one host.",
                    "percentunit",
                    (
                        "max by (run) ("
                        'sum by (run, rank) (rate(rayzero_exposed_wait_seconds_total{<run>,cause="optimizer"}[<i>])) / '
                        "(sum by (run, rank) (rate(rayzero_step_seconds_sum{<run>}[<i>])) > 0))",
                        "{{run}}",
                    ),
                    thresholds=HIGH_IS_BAD,
                ),
                panel(
                    "Changes",
                    "Of the optimizer actors, in the last hour. given_up: they stayed as they were, and rayzero status "
                    "says why.",
                    "none",
                    (f"sum by (run, outcome) {grown('rayzero_rescales_total{<run>}')}", "{{run}} {{outcome}}"),
                ),
                panel(
                    "Pause of the last change",
                    "Seconds in which no step was decided; ranks go on computing until the end of their step. Where "
                    "they are many, see which part of the change takes them.",
                    "s",
                    ("max by (run) (rayzero_rescale_pause_seconds{<run>})", "{{run}}"),
                ),
                panel(
                    "Seconds of changes",
                    "In the last hour, by step of the change. start: new processes come up while training goes on. The "
                    "others are the pause: hold, settle, prepare, let_stand, enter, change.",
                    "s",
                    (f"sum by (run, step) {grown('rayzero_rescale_seconds_total{<run>}')}", "{{step}} {{run}}"),
                    kind="stack",
                ),
                panel(
                    "Moved to other owners",
                    "Bytes of shards, in the last hour. On one host they stay in shared memory and cost no copy.",
                    "bytes",
                    (f"sum by (run) {grown('rayzero_rescale_moved_bytes_total{<run>}')}", "{{run}}"),
                ),
            ),
        ),
        Row(
            title="Changes for followers on other hosts",
            panels=(
                panel(
                    "Changed parameters",
                    "Share of an actor's trained parameters that the last update changed as published. Where it is "
                    "small (a low learning rate in 16 bits), a version takes few bytes.",
                    "percentunit",
                    ("max by (run, actor) (rayzero_changed_ratio{<actor>})", "{{run}} actor {{actor}}"),
                ),
                panel(
                    "Bytes of changes",
                    "What updates add, by form: whole, where nearly all of a shard changed.",
                    "Bps",
                    ("sum by (run, form) (rate(rayzero_change_bytes_total{<actor>}[<i>]))", "{{run}} {{form}}"),
                ),
                panel(
                    "Kept",
                    "At most the published parameters' own bytes; a follower who needs older ones takes shards whole.",
                    "bytes",
                    (
                        'sum by (run, actor) (rayzero_memory_bytes{<actor>,kind="changes"})',
                        "{{run}} actor {{actor}}",
                    ),
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
