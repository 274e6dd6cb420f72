"""Every byte by purpose, against what the operating system counts and where it ends."""

from __future__ import annotations

from dashboards.spec import FULL_IS_BAD, Page, Row, panel

_WHO = "{{run}} {{role}} {{rank}}{{actor}}"

PAGE = Page(
    uid="rayzero-memory",
    title="RayZero / Memory",
    description="The ledger of a run's memory, hosts' limits, shared memory and GPUs.",
    variables=("role",),
    rows=(
        Row(
            title="What it is for",
            panels=(
                panel(
                    "By purpose",
                    "What the run's processes have made, each byte counted once by its maker.",
                    "bytes",
                    ("sum by (kind, tier) (rayzero_memory_bytes{<role>})", "{{kind}} ({{tier}})"),
                    kind="stack",
                    width=12,
                ),
                panel(
                    "By process",
                    "The same by who made it.",
                    "bytes",
                    ("sum by (run, role, rank, actor) (rayzero_memory_bytes{<role>})", _WHO),
                    kind="stack",
                    width=12,
                ),
                panel(
                    "As the kernel counts",
                    "rss: all resident; pss: shared pages in equal parts; uss: its own; shm: resident shared memory.",
                    "bytes",
                    ("sum by (kind) (rayzero_process_memory_bytes{<role>})", "{{kind}}"),
                    width=12,
                ),
                panel(
                    "Heap, as malloc counts",
                    "used: given out now; peak: the most that CPU ranks had in their first three steps.",
                    "bytes",
                    ("sum by (run, role, rank, actor, kind) (rayzero_heap_bytes{<role>})", _WHO + " {{kind}}"),
                    width=12,
                ),
                panel(
                    "Resident, by process",
                    "It grows step by step: something keeps tensors alive; look at pinned units below.",
                    "bytes",
                    (
                        'sum by (run, role, rank, actor) (rayzero_process_memory_bytes{<role>,kind="pss"})',
                        _WHO,
                    ),
                    width=12,
                ),
            ),
        ),
        Row(
            title="Limits",
            panels=(
                panel(
                    "Headroom of each node",
                    "Until the first limit: RAM, cgroup, or where Ray kills. Below 10 %: more nodes, fewer ranks on "
                    "each, or bf16.",
                    "bytes",
                    ("min by (node) (rayzero_host_memory_headroom_bytes{<run>})", "{{node}}"),
                ),
                panel(
                    "Limits of each node",
                    "ram, cgroup, and the threshold at which Ray kills processes.",
                    "bytes",
                    ("max by (node, source) (rayzero_host_memory_limit_bytes{<run>})", "{{node}} {{source}}"),
                ),
                panel(
                    "Shared memory in use",
                    "Of slab_dir's file system, by anybody. Beyond its end processes die of SIGBUS: give it more.",
                    "percentunit",
                    (
                        "max by (node) (rayzero_shm_used_bytes{<run>}) / "
                        "(max by (node) (rayzero_shm_limit_bytes{<run>}) > 0)",
                        "{{node}}",
                    ),
                    thresholds=FULL_IS_BAD,
                    at_most=1,
                ),
                panel(
                    "Page-locked",
                    "Host memory that ranks have locked for copies to GPUs.",
                    "bytes",
                    ("sum by (run, rank) (rayzero_pinned_bytes{<run>})", "{{run}} rank {{rank}}"),
                ),
                panel(
                    "Plan against measured",
                    "Measured over planned, less 1, after 20 steps: outside of 10 % tell us.",
                    "percentunit",
                    ("max by (run, actor, what) (rayzero_plan_error_ratio{<run>})", "{{what}} {{run}} actor {{actor}}"),
                ),
                panel(
                    "Units that could not go down",
                    "Views or saved tensors held their bytes over a step: find who keeps them.",
                    "ops",
                    ("sum by (run, group) (rate(rayzero_pinned_units_total{<run>}[<i>]))", "{{run}} {{group}}"),
                ),
            ),
        ),
        Row(
            title="Pressure",
            panels=(
                panel(
                    "How full, by resource",
                    "Used over limit at the end of a forward, the fullest rank's. auto_memory_management acts on it; "
                    "near 100 % the kernel or Ray kills, except for max_*_memory_mb, which are limits of the config.",
                    "percentunit",
                    (
                        "max by (run, node, resource) (rayzero_memory_pressure_ratio{<run>})",
                        "{{resource}} {{run}} {{node}}",
                    ),
                    thresholds=FULL_IS_BAD,
                    at_most=1,
                ),
                panel(
                    "Waiting for memory",
                    "Share of the last ten seconds in which some or all processes waited for pages, by the kernel's "
                    "count. Not 0: it reclaims while the run computes; take work off this node.",
                    "percentunit",
                    ("max by (run, node, kind) (rayzero_memory_stall_ratio{<run>})", "{{kind}} {{run}} {{node}}"),
                ),
                panel(
                    "What was done",
                    "Actions of auto_memory_management and of the loop. Often and without bytes beside it: a stricter "
                    "strategy costs time and frees nothing; look at what memory is for.",
                    "ops",
                    ("sum by (run, action) (rate(rayzero_memory_actions_total{<run>}[<i>]))", "{{action}} {{run}}"),
                ),
                panel(
                    "What it freed",
                    "Bytes a second that the actions gave back.",
                    "Bps",
                    (
                        "sum by (run, action) (rate(rayzero_memory_freed_bytes_total{<run>}[<i>]))",
                        "{{action}} {{run}}",
                    ),
                ),
                panel(
                    "What it cost",
                    "Share of the ranks' time in each action. Above 1 %: choose a milder strategy or less memory use.",
                    "percentunit",
                    (
                        "max by (run, action) (rate(rayzero_memory_action_seconds_total{<run>}[<i>]))",
                        "{{action}} {{run}}",
                    ),
                ),
            ),
        ),
        Row(
            title="GPU",
            panels=(
                panel(
                    "Allocator",
                    "allocated: in use; reserved: held; peak_active: the most in use so far; total: what there is.",
                    "bytes",
                    ("sum by (run, rank, kind) (rayzero_gpu_memory_bytes{<run>})", "{{kind}} {{run}} rank {{rank}}"),
                ),
                panel(
                    "Retries and failures",
                    "Allocations that needed cached memory given back, and those that failed. Not 0: lower "
                    "gpu_param_memory_budget or the batch.",
                    "ops",
                    (
                        "sum by (run, rank) (rate(rayzero_gpu_alloc_retries_total{<run>}[<i>]))",
                        "retries, {{run}} rank {{rank}}",
                    ),
                    (
                        "sum by (run, rank) (rate(rayzero_gpu_ooms_total{<run>}[<i>]))",
                        "failures, {{run}} rank {{rank}}",
                    ),
                ),
                panel(
                    "Offloaded activations",
                    "Bytes a second that go out after forward and come back ahead of backward.",
                    "Bps",
                    (
                        "sum by (run, direction) (rate(rayzero_activation_bytes_total{<run>}[<i>]))",
                        "{{direction}} {{run}}",
                    ),
                ),
            ),
        ),
    ),
)
