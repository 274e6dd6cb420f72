"""Defines every metric once: its name, type, unit, labels, buckets and help text.

Names start with ``rayzero_`` and contain base units; counters end in ``_total``, values from 0 to 1 in ``_ratio``. No
label has many values, and none says which process a series is from: Prometheus adds TARGET_LABELS to all that it
scrapes, as discovery tells it (telemetry/scrape.py). Every metric here has code that feeds it.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from rayzero.telemetry.metric import COORDINATOR, EVERY, OPTIMIZER, RANK, Kind, Metric

TARGET_LABELS = ("run", "role", "rank", "actor", "node")
"""Only rank workers have ``rank``, only optimizer actors have ``actor`` (the owner's index), and all have the rest."""

MAX_GROUPS = 64
"""The most values of the label ``group``. Groups are units in forward order; if there are more units, neighbours share
a group."""

MAX_REPORTED = 64
"""The most values of the label ``name``: the first names that a training loop reports numbers under."""

_STEP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PART_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0)
_TRANSFER_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_FILE_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

# by how a name ends, "_total" left out: its unit, or the word that is its unit; other metrics say theirs
_UNITS = {"timestamp_seconds": "unix s", "bytes_per_second": "bytes/s", "flops_per_second": "flop/s", "seconds": "s"}
_WORD = re.compile(r"_(actions|bytes|cores|params|ratio|retries|rows|samples|shards|steps|threads|tokens|units)$")


def _metric(series: str, help: str, buckets: tuple[float, ...] = (), **rest: Any) -> Metric:
    """``series``: the name and its labels, such as ``name{one, another}``. ``rest``: other fields of a Metric."""
    name, _, labels = series.removesuffix("}").partition("{")
    base = name.removesuffix("_total")
    word = _WORD.search(base)
    rest.setdefault("unit", word[1] if word else next((unit for end, unit in _UNITS.items() if base.endswith(end)), ""))
    named = tuple(labels.split(", ")) if labels else ()
    return Metric(name=name, help=help, labels=named, buckets=buckets, **rest)


_counter = partial(_metric, kind=Kind.COUNTER)
_gauge = partial(_metric, kind=Kind.GAUGE)
_rank_counter, _rank_gauge = partial(_counter, roles=(RANK,)), partial(_gauge, roles=(RANK,))
_owner_counter, _owner_gauge = partial(_counter, roles=(OPTIMIZER,)), partial(_gauge, roles=(OPTIMIZER,))
_run_counter, _run_gauge = partial(_counter, roles=(COORDINATOR,)), partial(_gauge, roles=(COORDINATOR,))
_rank_histogram = partial(_metric, kind=Kind.HISTOGRAM, roles=(RANK,))
_owner_histogram = partial(_metric, kind=Kind.HISTOGRAM, roles=(OPTIMIZER,))

# ---- run --------------------------------------------------------------------------------------------------------

BUILD_INFO = _rank_gauge(
    "rayzero_build_info{version, torch, kernel, transport}",
    "Always 1. The labels say what runs: versions, the kernel that computes updates, and how bytes travel (shm, "
    "grpc, shm+grpc, inproc).",
)
STEP = _rank_gauge("rayzero_step", "Steps this rank has committed, resumed ones included.", unit="steps")
LAST_STEP_TIMESTAMP = _rank_gauge("rayzero_last_step_timestamp_seconds", "When this rank last committed a step.")
SAMPLES = _rank_counter("rayzero_samples_total", "Samples (sequences) this rank trained on.")
TOKENS = _rank_counter("rayzero_tokens_total", "Tokens this rank trained on.")
ETA_SECONDS = _rank_gauge(
    "rayzero_eta_seconds",
    "Estimated seconds to the end: steps left times the mean seconds of this process's steps so far.",
)
TRAIN_LOSS = _rank_gauge(
    "rayzero_train_loss", "This rank's loss in its last step. The run's loss is the average over ranks.", unit="nats"
)
REPORTED = _rank_gauge(
    "rayzero_reported{name}",
    "The number that this rank's training loop last reported under this name.",
    only="rayzero.report",
)
LEARNING_RATE = _rank_gauge(
    "rayzero_learning_rate{param_group}", "Learning rate of the last committed step, by the parameter group's index."
)
GRAD_NORM = _owner_gauge(
    "rayzero_grad_norm",
    "Global L2 norm of the last decided step's averaged gradients, before clipping. Lead owner only.",
)
CLIP_FACTOR = _owner_gauge(
    "rayzero_clip_factor",
    "The factor by which clipping by norm scaled the gradients of the last applied step; 1 if it did not clip. "
    "Lead owner only.",
    unit="ratio",
)
LOSS_SCALE = _owner_gauge(
    "rayzero_loss_scale",
    "The loss scale of the last decided step, as the ranks' scalers report it; 1 without a scaler. Lead owner only.",
)
DECIDED_STEPS = _owner_counter(
    "rayzero_decided_steps_total",
    "Steps decided since this process started, including those that changed nothing. Lead owner only.",
)
CLIPPED_STEPS = _owner_counter(
    "rayzero_clipped_steps_total",
    "Decided steps in which clipping by norm made the gradients smaller. Lead owner only.",
)
SKIPPED_STEPS = _owner_counter(
    "rayzero_skipped_steps_total{reason}",
    "Decided steps that changed no weights. reason: nonfinite (an inf or nan gradient). Lead owner only.",
)

# ---- where the step goes ----------------------------------------------------------------------------------------

STEP_SECONDS = _rank_histogram(
    "rayzero_step_seconds",
    "Seconds from the end of one optimizer.step() to the end of the next, on the host's clock.",
    _STEP_S,
)
STEP_PHASE_SECONDS = _rank_histogram(
    "rayzero_step_phase_seconds{phase}",
    "Seconds of each phase of a step, one value a step; phases add up to rayzero_step_seconds. phase: data (the "
    "loop's own work), forward, backward, grad_push, norm, optimizer, fetch_wait, checkpoint; a wait does not count in "
    "the pass it interrupts. Host clock: on CUDA, the time of kernels shows up where the host waits for them.",
    _PART_S,
)
EXPOSED_WAIT_SECONDS = _rank_counter(
    "rayzero_exposed_wait_seconds_total{cause}",
    "Seconds that this rank's loop waited, or on CUDA its computing stream for units. cause: fetch (bytes in "
    "flight), optimizer (update not published yet), "
    "push (gradients not landed yet), norm (other ranks), mean (other ranks, in mean_over_ranks).",
)
OVERLAP_RATIO = _rank_gauge(
    "rayzero_optimizer_overlap_ratio",
    "Share of the time from the last step's commit to its last published weights in which this rank did not wait.",
)

MODEL_FLOPS = _rank_gauge(
    "rayzero_model_flops_per_second",
    "Floating-point operations of this rank's step, as torch's flop counter counted them before the run, over the "
    "last step's seconds, waits included.",
    only="rayzero train",
)
MFU_RATIO = _rank_gauge(
    "rayzero_mfu_ratio",
    "rayzero_model_flops_per_second over the dense 16-bit peak in the data sheet of this rank's GPU; absent if "
    "that peak is not known.",
    only="rayzero train on a GPU of known peak",
)

# ---- prefetch and links -----------------------------------------------------------------------------------------

PREFETCH_REQUESTS = _rank_counter(
    "rayzero_prefetch_requests_total{result}",
    "Uses of a unit that was not up. result: hit (its bytes had arrived), late (they were in flight), miss (they "
    "had not been requested); on CUDA as the device came to the use.",
    unit="uses",
)
PREFETCH_DROPPED = _rank_counter(
    "rayzero_prefetch_dropped_total{result}",
    "Prefetched units that were dropped before a use. result: wasted (their bytes were there), cancelled (on "
    "their way).",
    unit="units",
    only="prefetches that nothing used",
)
PREFETCH_DEPTH = _rank_gauge("rayzero_prefetch_depth_units", "Units fetched ahead of the one in use.")
PREFETCH_LEAD_SECONDS = _rank_histogram(
    "rayzero_prefetch_lead_seconds", "Seconds between a unit's arrival and its use; hits only.", _TRANSFER_S
)
PREFETCH_LATE_SECONDS = _rank_histogram(
    "rayzero_prefetch_late_seconds", "Seconds that a rank waited for a unit in flight.", _TRANSFER_S
)
PREFETCH_GROUP_LATE_SECONDS = _rank_counter(
    "rayzero_prefetch_group_late_seconds_total{group}",
    "Seconds waited for units that had not arrived at their use, by layer group: shows where the stall is.",
)
PREFETCH_INFLIGHT_BYTES = _rank_gauge("rayzero_prefetch_inflight_bytes", "Bytes of units in flight.")
PREFETCH_WINDOW_BYTES = _rank_gauge(
    "rayzero_prefetch_window_bytes", "Bytes of gathered parameters, including those in flight."
)
PREFETCH_WINDOW_LIMIT_BYTES = _rank_gauge(
    "rayzero_prefetch_window_limit_bytes", "Limit of rayzero_prefetch_window_bytes: gpu_param_memory_budget."
)
FETCH_SECONDS = _rank_histogram(
    "rayzero_fetch_seconds{transport}",
    "Seconds of one unit's fetch, from the request until it is filled, including the wait for its version. CPU "
    "ranks on the owners' host compute in the owners' memory and fetch nothing.",
    _TRANSFER_S,
    only="gRPC between hosts, or CUDA",
)
PUSH_SECONDS = _rank_histogram(
    "rayzero_push_seconds{transport}", "Seconds of one unit's push, from the call until it has landed.", _TRANSFER_S
)
_moved = partial(_counter, roles=(RANK, OPTIMIZER))  # by a rank, or by the door of its host
TRANSFER_BYTES = _moved(
    "rayzero_transfer_bytes_total{direction, transport, dtype}",
    "Payload bytes as sent, without headers; what a host fetches or sends once, its first optimizer actor counts. "
    "direction: fetch, push, load; transport: shm, grpc, inproc, or host for what a rank copies out of the host's "
    "copy, or leaves in its memory to be part of one sum; dtype: that on the wire.",
)
TRANSFER_RAW_BYTES = _moved(
    "rayzero_transfer_raw_bytes_total{direction}",
    "Payload bytes before wire compression; over rayzero_transfer_bytes_total they give the ratio.",
)
TRANSFER_RETRIES = _moved(
    "rayzero_transfer_retries_total{direction, transport}",
    "Bulk streams that were sent again, whole, after a link failed or bytes were damaged.",
    unit="streams",
    only="a link that failed",
)
LINK_RECONNECTS = _counter(
    "rayzero_link_reconnects_total{peer}",
    "Links that broke and were open again before anybody gave them up. peer: what is at the other end, optimizer "
    "or rank; both ends count.",
    unit="links",
    roles=(RANK, OPTIMIZER),
    only="a link that failed",
)
LINK_DOWN_SECONDS = _counter(
    "rayzero_link_down_seconds_total{peer}",
    "Seconds that those links were down.",
    roles=(RANK, OPTIMIZER),
    only="a link that failed",
)
GRPC_REQUESTS = _owner_counter(
    "rayzero_grpc_requests_total{method, code}",
    "Calls over gRPC, and transfers, that this owner answered, from other hosts; a stream is one call, counted at its "
    "end.",
    unit="calls",
)
REFUSED = _counter(
    "rayzero_refused_total{door, reason}",
    "Clients that were refused or cut. door owner: calls without the run's token, with a certificate of another "
    "role, more calls or connections than it may have (limit), bodies that do not come (slow). door metrics: no TLS "
    "handshake, wrong password, a client that does not read (slow), too many clients (limit), no request (nonsense), "
    "another host's name on loopback (host). door tensors: no ticket in time (slow), a wrong one (ticket), none "
    "(nonsense), too many who owe one (limit).",
    unit="clients",
    roles=EVERY,
    only="a client that was refused",
)
GRPC_REQUEST_SECONDS = _owner_histogram(
    "rayzero_grpc_request_seconds{method}",
    "Seconds from a call's arrival to its end. Calls that wait for other ranks (finish, commit) include the wait.",
    _TRANSFER_S,
)

# ---- optimizer tier ---------------------------------------------------------------------------------------------

OPTIMIZER_UPDATE_SECONDS = _owner_histogram(
    "rayzero_optimizer_update_seconds",
    "Seconds in which this owner updates and publishes all its shards for one step.",
    _PART_S,
)
MATRIX_PRODUCTS = _counter(
    "rayzero_matrix_products_total",
    "Matrices that this process has multiplied by torch's Newton-Schulz for updates, as Muon's. The role says where: "
    "with zero.matrix_updates=rank, those of an optimizer actor are what ranks were too late for.",
    roles=(RANK, OPTIMIZER),
    unit="matrices",
    only="an optimizer that multiplies matrices",
)
MATRIX_PRODUCT_SECONDS = _counter(
    "rayzero_matrix_product_seconds_total",
    "Seconds of a thread of this process in which it computed those; on CUDA, copies to the device and back included.",
    roles=(RANK, OPTIMIZER),
    only="an optimizer that multiplies matrices",
)
OPTIMIZER_PARAMS = _owner_counter("rayzero_optimizer_params_total", "Parameter elements updated.")
OPTIMIZER_BYTES = _owner_counter(
    "rayzero_optimizer_memory_bytes_processed_total",
    "Bytes of gradients that updates read, and of states and weights that they read or write, each counted once. "
    "Per update second, over rayzero_host_bandwidth_limit_bytes_per_second, it is the efficiency.",
    unit="bytes",
)
HOST_BANDWIDTH_LIMIT = _owner_gauge(
    "rayzero_host_bandwidth_limit_bytes_per_second",
    "Memory bandwidth of this owner's threads when they update three arrays in place, measured at its start; "
    "other processes that ran then reduce it.",
    only="telemetry.measure_bandwidth and the native library",
)
OPTIMIZER_QUEUE_DEPTH = _owner_gauge(
    "rayzero_optimizer_queue_depth",
    "Tasks (norm sums, updates, reads, checkpoints) queued for the updater thread.",
    unit="tasks",
)
OPTIMIZER_QUEUE_BYTES = _owner_gauge(
    "rayzero_optimizer_queue_bytes",
    "Bytes of the published parameters of shards whose update is decided but not published yet.",
)
OPTIMIZER_THREADS = _owner_gauge("rayzero_optimizer_threads", "Threads that compute updates.")
OPTIMIZER_CORES = _owner_gauge("rayzero_optimizer_cores", "CPUs that this process may run on (its affinity).")
OPTIMIZER_CPU_SECONDS = _owner_counter(
    "rayzero_optimizer_cpu_seconds_total", "Processor time of this process, all threads, user and system."
)
PARAM_VERSION = _owner_gauge(
    "rayzero_param_version", "The newest version that this owner has published for all its shards.", unit="versions"
)
VERSION_LAG = _rank_gauge(
    "rayzero_version_lag",
    "Steps that this rank has committed beyond the newest version that it knows is published completely: 0 or 1.",
    unit="versions",
)
CHANGE_BYTES = _owner_counter(
    "rayzero_change_bytes_total{form}",
    "Bytes of what updates changed in published parameters, kept for followers on other hosts. form: positions (of "
    "16-bit words, and these), whole (a shard, where that is smaller).",
    only="followers on other hosts",
)
CHANGED_RATIO = _owner_gauge(
    "rayzero_changed_ratio",
    "Share of this owner's trained parameters that the last update changed, as published.",
    only="followers on other hosts",
)
SHARDS = _owner_gauge("rayzero_shards", "Shards of this owner.")
SHARD_IMBALANCE = _run_gauge(
    "rayzero_shard_imbalance_ratio",
    "Largest over mean of the owners' update seconds since the last heartbeat with new values; 1 is balanced.",
)
FOLLOWERS = _owner_gauge(
    "rayzero_followers",
    "Processes that follow this owner's weights over gRPC now. Nobody counts those that read its shared memory.",
    unit="processes",
    only="followers on other hosts",
)
FOLLOWER_LAG = _owner_gauge(
    "rayzero_follower_lag_versions",
    "Versions by which the follower that is farthest behind is behind this owner.",
    unit="versions",
    only="followers on other hosts",
)
FOLLOW_BYTES = _owner_counter(
    "rayzero_follow_bytes_total{form}",
    "Payload bytes that followers got. form: changes (of versions), whole (a shard as it is).",
    unit="bytes",
    only="followers on other hosts",
)
FOLLOW_SECONDS = _owner_histogram(
    "rayzero_follow_seconds",
    "Seconds from the publication of a shard's version until a follower had it.",
    _TRANSFER_S,
    only="followers on other hosts",
)

# ---- memory -----------------------------------------------------------------------------------------------------

MEMORY_BYTES = _gauge(
    "rayzero_memory_bytes{kind, tier}",
    "Bytes that this process has allocated, by purpose; only the process that made a byte counts it. kind: param, "
    "master, exp_avg, exp_avg_sq (or another optimizer state), grad, staging, changes (for followers on other hosts), "
    "process (its size before the run, for a rank before it passed its model: interpreter, torch, imports), other (the "
    "rest of the heap: activations and the user's objects), unused (freed, but kept by malloc and resident). tier: "
    "gpu, pinned, shm, ram. Over the processes of a node it adds up to rayzero_process_memory_bytes{kind=pss}.",
    roles=EVERY,
)
MEMORY_ORIGINAL_BYTES = _owner_gauge(
    "rayzero_memory_original_bytes{kind}",
    "Bytes that what this owner keeps would take unencoded: published parameters in their dtype, masters and "
    "states in fp32. kind: as in rayzero_memory_bytes, which is what is left of them.",
)
PROCESS_MEMORY_BYTES = _gauge(
    "rayzero_process_memory_bytes{kind}",
    "Bytes of this process as the kernel counts them. kind: rss (all resident pages), pss (shared pages divided "
    "among their processes), uss (its private pages), shm (resident shared memory).",
    roles=EVERY,
)
HEAP_BYTES = _gauge(
    "rayzero_heap_bytes{kind}",
    "Bytes as malloc counts them. kind: used (allocated now), peak (CPU ranks: the most allocated at the end of a "
    "forward or when a unit's gradients were complete, in the first three steps).",
    roles=EVERY,
)
PINNED_BYTES = _rank_gauge("rayzero_pinned_bytes", "Bytes of host memory that this rank has page-locked.", only="CUDA")
SHM_USED_BYTES = _gauge(
    "rayzero_shm_used_bytes",
    "Bytes in use, by any process, in the file system of slab_dir on this node. Take one process of a node.",
    roles=EVERY,
)
SHM_LIMIT_BYTES = _gauge(
    "rayzero_shm_limit_bytes",
    "Size of the file system of slab_dir; a process that needs more of it gets SIGBUS.",
    roles=EVERY,
)
HOST_MEMORY_LIMIT_BYTES = _gauge(
    "rayzero_host_memory_limit_bytes{source}",
    "Limits of this node's memory. source: ram, cgroup (the tightest one of this process, if it has any), ray "
    "(the use at which Ray kills processes).",
    roles=EVERY,
)
HOST_MEMORY_HEADROOM_BYTES = _gauge(
    "rayzero_host_memory_headroom_bytes",
    "Bytes left on this node up to the first of the rayzero_host_memory_limit_bytes. Take one process of a node.",
    roles=EVERY,
)
MEMORY_PRESSURE_RATIO = _gauge(
    "rayzero_memory_pressure_ratio{resource}",
    "Used over limit, measured at most once a second: by a rank at the end of a forward, by an owner when it is "
    "asked (host, cgroup and shm: its host may have no rank). resource: device (a "
    "CUDA device, used by anybody, without what torch keeps free), host (RAM), cgroup (the tightest one of this "
    "process; both without page cache that the kernel drops first), shm (the file system of slab_dir), "
    "max_cpu_memory_mb and max_gpu_memory_mb (this process, over the config's limits).",
    roles=(RANK, OPTIMIZER),
)
MEMORY_STALL_RATIO = _rank_gauge(
    "rayzero_memory_stall_ratio{kind}",
    "Share of the last ten seconds in which processes waited for memory, by the kernel's count for this process's "
    "cgroup or else for the host. kind: some (at least one waited), full (all waited).",
    only="a kernel that counts stalls (PSI)",
)
MEMORY_ACTIONS = _rank_counter(
    "rayzero_memory_actions_total{action}",
    "What was done about memory, by auto_memory_management or at the loop's wish. action: garbage (collected), "
    "units (idle ones resharded), buffers (free ones dropped), malloc, device (freed memory given back), prefetch "
    "(made shorter), activations (all leave the device, or again their fraction).",
)
MEMORY_FREED_BYTES = _rank_counter(
    "rayzero_memory_freed_bytes_total{action}",
    "Bytes that these actions gave back, each by the measure that it changes.",
)
MEMORY_ACTION_SECONDS = _rank_counter(
    "rayzero_memory_action_seconds_total{action}", "Seconds of this rank's loop that these actions took."
)
GPU_MEMORY_BYTES = _rank_gauge(
    "rayzero_gpu_memory_bytes{kind}",
    "Bytes of torch's allocator on this rank's device. kind: allocated, reserved, peak_active, total (the "
    "device's memory).",
    only="CUDA",
)
GPU_ALLOC_RETRIES = _rank_counter(
    "rayzero_gpu_alloc_retries_total",
    "Allocations that succeeded only after torch had freed its cached memory.",
    only="CUDA",
)
GPU_OOMS = _rank_counter("rayzero_gpu_ooms_total", "Allocations that failed.", unit="errors", only="CUDA")
PLAN_ERROR_RATIO = _owner_gauge(
    "rayzero_plan_error_ratio{what}",
    "Measured over planned bytes, less 1, after 20 steps. what: host (growth of heap and shared memory since "
    "before the plan; without the copies that are there only while a checkpoint is written).",
    only="20 steps",
)

# ---- reliability ------------------------------------------------------------------------------------------------

CHECKPOINT_SECONDS = _owner_histogram(
    "rayzero_checkpoint_seconds{phase}",
    "Seconds of each phase of a checkpoint. phase: write (this owner's file), publish (manifest and rename; lead "
    "owner only).",
    _FILE_S,
    only="checkpoints",
)
CHECKPOINT_STALL_SECONDS = _owner_counter(
    "rayzero_checkpoint_stall_seconds_total",
    "Seconds in which updates copied shards for a checkpoint that was being written, or waited for its file.",
    only="checkpoints",
)
CHECKPOINT_BYTES = _owner_gauge(
    "rayzero_checkpoint_bytes", "Size of this owner's file in the last checkpoint.", only="checkpoints"
)
CHECKPOINT_LAST_SUCCESS = _owner_gauge(
    "rayzero_checkpoint_last_success_timestamp_seconds",
    "When the last checkpoint was complete. Lead owner only.",
    only="checkpoints",
)
CHECKPOINT_FAILURES = _owner_counter(
    "rayzero_checkpoint_failures_total",
    "Checkpoint files that this owner could not write; at the lead owner, also checkpoints that it could not complete.",
    unit="checkpoints",
    only="a checkpoint that failed",
)
ACTORS = _run_gauge(
    "rayzero_actors{kind, state}",
    "Processes of the run. kind: rank, optimizer; state: desired, ready (its heartbeats arrive), late.",
    unit="processes",
)
HEARTBEAT_AGE_SECONDS = _run_gauge(
    "rayzero_heartbeat_age_seconds{process}",
    'Seconds since the last heartbeat of a process ("rank 0", "optimizer 1"); each sends one every 2 s.',
)
RECOVERIES = _run_counter(
    "rayzero_recoveries_total{what}",
    "Failures that the run has outlived. what: rank or optimizer, if another process took a dead one's place; "
    "run, if the whole run started again from a checkpoint.",
    unit="processes",
    only="a process that died",
)
RECOVERY_SECONDS = _run_counter(
    "rayzero_recovery_seconds_total{phase}",
    "Seconds of those recoveries. phase: detect, from the death until it is acted on (only processes on the "
    "driver's node); start, from then until the new process answers; re-form, from then until everybody knows it; "
    "restart, until every process of a run that started again is up.",
    only="a process that died",
)
RESCALES = _run_counter(
    "rayzero_rescales_total{outcome}",
    "Requests for other optimizer actors while the run goes on. outcome: done, or given_up, if they stayed as "
    "they were.",
    unit="changes",
    only="a change of the optimizers",
)
RESCALE_SECONDS = _run_counter(
    "rayzero_rescale_seconds_total{step}",
    "Seconds of those changes. step: start (new processes, while training goes on), then hold, settle, prepare, "
    "let_stand, enter and change, in which no step is decided.",
    only="a change of the optimizers",
)
RESCALE_PAUSE_SECONDS = _run_gauge(
    "rayzero_rescale_pause_seconds",
    "Seconds in which no step was decided during the last change of the optimizers.",
    only="a change of the optimizers",
)
RESCALE_MOVED_BYTES = _run_counter(
    "rayzero_rescale_moved_bytes_total",
    "Bytes of shards that got another owner in those changes. On one host they stay where they are.",
    only="a change of the optimizers",
)
LOGGER_ROWS = _run_counter(
    "rayzero_logger_rows_total{logger, result}",
    "Rows of metrics.jsonl for the loggers of run.report_to. logger: its name; result: sent, or lost, if it "
    "refused a row while it took others.",
    only="run.report_to",
)
PINNED_UNITS = _rank_counter(
    "rayzero_pinned_units_total{group}",
    "Units that step() could not reshard because views or saved tensors held them, by layer group.",
    only="views or graphs held over a step",
)

# ---- layers -----------------------------------------------------------------------------------------------------

GROUP_GRAD_NORM = _owner_gauge(
    "rayzero_group_grad_norm{group}",
    "L2 norm of this owner's part of a layer group's averaged gradient, before unscaling and clipping, every "
    "telemetry.norms_every steps. The group's norm is the root of the sum of the owners' squares.",
)
GROUP_UPDATE_NORM = _owner_gauge(
    "rayzero_group_update_norm{group}",
    "L2 norm of what that step added to this owner's part of a layer group's weights.",
)
GROUP_PARAM_NORM = _owner_gauge(
    "rayzero_group_param_norm{group}",
    "L2 norm of this owner's part of a layer group's fp32 weights after that step. Update over param is healthy "
    "near 1e-3.",
)

# ---- activations (rayzero.activations) --------------------------------------------------------------------------

ACTIVATION_BYTES = _rank_counter(
    "rayzero_activation_bytes_total{direction}",
    "Device bytes of saved activations that were copied. direction: out (to the host), in (back).",
    only="rayzero.activations",
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All metrics, in the order of this file."""
