"""Defines every metric once: its name, type, unit, labels, buckets and help text.

Names start with ``rayzero_`` and contain base units; counters end in ``_total``, values from 0 to 1 in ``_ratio``. No
label has many values, and none says which process a series is from: Prometheus adds TARGET_LABELS to all that it
scrapes, as discovery tells it (telemetry/discovery.py). Every metric here has code that feeds it.
"""

from __future__ import annotations

from functools import partial

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

_counter = partial(Metric, kind=Kind.COUNTER)
_gauge = partial(Metric, kind=Kind.GAUGE)
_histogram = partial(Metric, kind=Kind.HISTOGRAM, unit="s")

# ---- run --------------------------------------------------------------------------------------------------------

BUILD_INFO = _gauge(
    name="rayzero_build_info",
    unit="",
    labels=("version", "torch", "kernel", "transport"),
    roles=(RANK,),
    help="Always 1. The labels say what runs: versions, the kernel that computes updates, and how bytes travel (shm, "
    "grpc, shm+grpc, inproc).",
)
STEP = _gauge(
    name="rayzero_step", unit="steps", roles=(RANK,), help="Steps this rank has committed, resumed ones included."
)
LAST_STEP_TIMESTAMP = _gauge(
    name="rayzero_last_step_timestamp_seconds",
    unit="unix s",
    roles=(RANK,),
    help="When this rank last committed a step.",
)
SAMPLES = _counter(
    name="rayzero_samples_total", unit="samples", roles=(RANK,), help="Samples (sequences) this rank trained on."
)
TOKENS = _counter(name="rayzero_tokens_total", unit="tokens", roles=(RANK,), help="Tokens this rank trained on.")
ETA_SECONDS = _gauge(
    name="rayzero_eta_seconds",
    unit="s",
    roles=(RANK,),
    help="Estimated seconds to the end: steps left times the mean seconds of this process's steps so far.",
)
TRAIN_LOSS = _gauge(
    name="rayzero_train_loss",
    unit="nats",
    roles=(RANK,),
    help="This rank's loss in its last step. The run's loss is the average over ranks.",
)
REPORTED = _gauge(
    name="rayzero_reported",
    unit="",
    labels=("name",),
    roles=(RANK,),
    only="rayzero.report",
    help="The number that this rank's training loop last reported under this name.",
)
LEARNING_RATE = _gauge(
    name="rayzero_learning_rate",
    unit="",
    labels=("param_group",),
    roles=(RANK,),
    help="Learning rate of the last committed step, by the parameter group's index.",
)
GRAD_NORM = _gauge(
    name="rayzero_grad_norm",
    unit="",
    roles=(OPTIMIZER,),
    help="Global L2 norm of the last decided step's averaged gradients, before clipping. Lead owner only.",
)
CLIP_FACTOR = _gauge(
    name="rayzero_clip_factor",
    unit="ratio",
    roles=(OPTIMIZER,),
    help="The factor by which clipping by norm scaled the gradients of the last applied step; 1 if it did not clip. "
    "Lead owner only.",
)
LOSS_SCALE = _gauge(
    name="rayzero_loss_scale",
    unit="",
    roles=(OPTIMIZER,),
    help="The loss scale of the last decided step, as the ranks' scalers report it; 1 without a scaler. Lead owner "
    "only.",
)
DECIDED_STEPS = _counter(
    name="rayzero_decided_steps_total",
    unit="steps",
    roles=(OPTIMIZER,),
    help="Steps decided since this process started, including those that changed nothing. Lead owner only.",
)
CLIPPED_STEPS = _counter(
    name="rayzero_clipped_steps_total",
    unit="steps",
    roles=(OPTIMIZER,),
    help="Decided steps in which clipping by norm made the gradients smaller. Lead owner only.",
)
SKIPPED_STEPS = _counter(
    name="rayzero_skipped_steps_total",
    unit="steps",
    labels=("reason",),
    roles=(OPTIMIZER,),
    help="Decided steps that changed no weights. reason: nonfinite (an inf or nan gradient). Lead owner only.",
)

# ---- where the step goes ----------------------------------------------------------------------------------------

STEP_SECONDS = _histogram(
    name="rayzero_step_seconds",
    roles=(RANK,),
    buckets=_STEP_S,
    help="Seconds from the end of one optimizer.step() to the end of the next, on the host's clock.",
)
STEP_PHASE_SECONDS = _histogram(
    name="rayzero_step_phase_seconds",
    labels=("phase",),
    roles=(RANK,),
    buckets=_PART_S,
    help="Seconds of each phase of a step, one value a step; phases add up to rayzero_step_seconds. phase: data (the "
    "loop's own work), forward, backward, grad_push, norm, optimizer, fetch_wait, checkpoint; a wait does not count in "
    "the pass it interrupts. Host clock: on CUDA, the time of kernels shows up where the host waits for them.",
)
EXPOSED_WAIT_SECONDS = _counter(
    name="rayzero_exposed_wait_seconds_total",
    unit="s",
    labels=("cause",),
    roles=(RANK,),
    help="Seconds that this rank's loop waited, or on CUDA its computing stream for units. cause: fetch (bytes in "
    "flight), optimizer (update not published yet), "
    "push (gradients not landed yet), norm (other ranks), mean (other ranks, in mean_over_ranks).",
)
OVERLAP_RATIO = _gauge(
    name="rayzero_optimizer_overlap_ratio",
    unit="ratio",
    roles=(RANK,),
    help="Share of the time from the last step's commit to its last published weights in which this rank did not wait.",
)

MODEL_FLOPS = _gauge(
    name="rayzero_model_flops_per_second",
    unit="flop/s",
    roles=(RANK,),
    only="rayzero train",
    help="Floating-point operations of this rank's step, as torch's flop counter counted them before the run, over the "
    "last step's seconds, waits included.",
)
MFU_RATIO = _gauge(
    name="rayzero_mfu_ratio",
    unit="ratio",
    roles=(RANK,),
    only="rayzero train on a GPU of known peak",
    help="rayzero_model_flops_per_second over the dense 16-bit peak in the data sheet of this rank's GPU; absent if "
    "that peak is not known.",
)

# ---- prefetch and links -----------------------------------------------------------------------------------------

PREFETCH_REQUESTS = _counter(
    name="rayzero_prefetch_requests_total",
    unit="uses",
    labels=("result",),
    roles=(RANK,),
    help="Uses of a unit that was not up. result: hit (its bytes had arrived), late (they were in flight), miss (they "
    "had not been requested); on CUDA as the device came to the use.",
)
PREFETCH_DROPPED = _counter(
    name="rayzero_prefetch_dropped_total",
    unit="units",
    labels=("result",),
    roles=(RANK,),
    only="prefetches that nothing used",
    help="Prefetched units that were dropped before a use. result: wasted (their bytes were there), cancelled (on "
    "their way).",
)
PREFETCH_DEPTH = _gauge(
    name="rayzero_prefetch_depth_units", unit="units", roles=(RANK,), help="Units fetched ahead of the one in use."
)
PREFETCH_LEAD_SECONDS = _histogram(
    name="rayzero_prefetch_lead_seconds",
    roles=(RANK,),
    buckets=_TRANSFER_S,
    help="Seconds between a unit's arrival and its use; hits only.",
)
PREFETCH_LATE_SECONDS = _histogram(
    name="rayzero_prefetch_late_seconds",
    roles=(RANK,),
    buckets=_TRANSFER_S,
    help="Seconds that a rank waited for a unit in flight.",
)
PREFETCH_GROUP_LATE_SECONDS = _counter(
    name="rayzero_prefetch_group_late_seconds_total",
    unit="s",
    labels=("group",),
    roles=(RANK,),
    help="Seconds waited for units that had not arrived at their use, by layer group: shows where the stall is.",
)
PREFETCH_INFLIGHT_BYTES = _gauge(
    name="rayzero_prefetch_inflight_bytes", unit="bytes", roles=(RANK,), help="Bytes of units in flight."
)
PREFETCH_WINDOW_BYTES = _gauge(
    name="rayzero_prefetch_window_bytes",
    unit="bytes",
    roles=(RANK,),
    help="Bytes of gathered parameters, including those in flight.",
)
PREFETCH_WINDOW_LIMIT_BYTES = _gauge(
    name="rayzero_prefetch_window_limit_bytes",
    unit="bytes",
    roles=(RANK,),
    help="Limit of rayzero_prefetch_window_bytes: gpu_param_memory_budget.",
)
FETCH_SECONDS = _histogram(
    name="rayzero_fetch_seconds",
    labels=("transport",),
    roles=(RANK,),
    buckets=_TRANSFER_S,
    only="gRPC between hosts, or CUDA",
    help="Seconds of one unit's fetch, from the request until it is filled, including the wait for its version. CPU "
    "ranks on the owners' host compute in the owners' memory and fetch nothing.",
)
PUSH_SECONDS = _histogram(
    name="rayzero_push_seconds",
    labels=("transport",),
    roles=(RANK,),
    buckets=_TRANSFER_S,
    help="Seconds of one unit's push, from the call until it has landed.",
)
TRANSFER_BYTES = _counter(
    name="rayzero_transfer_bytes_total",
    unit="bytes",
    labels=("direction", "transport", "dtype"),
    roles=(RANK,),
    help="Payload bytes as sent, without headers. direction: fetch, push, load; transport: shm, grpc, inproc, or "
    "host for what is copied out of the host's memory, where it came by grpc once, or into it, to leave as one sum; "
    "dtype: that on the wire.",
)
TRANSFER_RAW_BYTES = _counter(
    name="rayzero_transfer_raw_bytes_total",
    unit="bytes",
    labels=("direction",),
    roles=(RANK,),
    help="Payload bytes before wire compression; over rayzero_transfer_bytes_total they give the ratio.",
)
TRANSFER_RETRIES = _counter(
    name="rayzero_transfer_retries_total",
    unit="streams",
    labels=("direction", "transport"),
    roles=(RANK,),
    only="a link that failed",
    help="Bulk streams that were sent again, whole, after a link failed or bytes were damaged.",
)
LINK_RECONNECTS = _counter(
    name="rayzero_link_reconnects_total",
    unit="links",
    labels=("peer",),
    roles=(RANK, OPTIMIZER),
    only="a link that failed",
    help="Links that broke and were open again before anybody gave them up. peer: what is at the other end, optimizer "
    "or rank; both ends count.",
)
LINK_DOWN_SECONDS = _counter(
    name="rayzero_link_down_seconds_total",
    unit="s",
    labels=("peer",),
    roles=(RANK, OPTIMIZER),
    only="a link that failed",
    help="Seconds that those links were down.",
)
GRPC_REQUESTS = _counter(
    name="rayzero_grpc_requests_total",
    unit="calls",
    labels=("method", "code"),
    roles=(OPTIMIZER,),
    help="gRPC calls that this owner answered; a stream is one call, counted at its end.",
)
REFUSED = _counter(
    name="rayzero_refused_total",
    unit="clients",
    labels=("door", "reason"),
    roles=EVERY,
    only="a client that was refused",
    help="Clients that were refused or cut. door owner: calls without the run's token, with a certificate of another "
    "role, more uploads than a caller may have (limit), bodies that do not come (slow). door metrics: no TLS "
    "handshake, wrong password, a client that does not read (slow), too many clients (limit), no request (nonsense), "
    "another host's name on loopback (host). door tensors: no ticket in time (slow), a wrong one (ticket), none "
    "(nonsense), too many who owe one (limit).",
)
GRPC_REQUEST_SECONDS = _histogram(
    name="rayzero_grpc_request_seconds",
    labels=("method",),
    roles=(OPTIMIZER,),
    buckets=_TRANSFER_S,
    help="Seconds from a call's arrival to its end. Calls that wait for other ranks (finish, commit) include the wait.",
)

# ---- optimizer tier ---------------------------------------------------------------------------------------------

OPTIMIZER_UPDATE_SECONDS = _histogram(
    name="rayzero_optimizer_update_seconds",
    roles=(OPTIMIZER,),
    buckets=_PART_S,
    help="Seconds in which this owner updates and publishes all its shards for one step.",
)
OPTIMIZER_PARAMS = _counter(
    name="rayzero_optimizer_params_total", unit="params", roles=(OPTIMIZER,), help="Parameter elements updated."
)
OPTIMIZER_BYTES = _counter(
    name="rayzero_optimizer_memory_bytes_processed_total",
    unit="bytes",
    roles=(OPTIMIZER,),
    help="Bytes of gradients that updates read, and of states and weights that they read or write, each counted once. "
    "Per update second, over rayzero_host_bandwidth_limit_bytes_per_second, it is the efficiency.",
)
HOST_BANDWIDTH_LIMIT = _gauge(
    name="rayzero_host_bandwidth_limit_bytes_per_second",
    unit="bytes/s",
    roles=(OPTIMIZER,),
    only="telemetry.measure_bandwidth and the native library",
    help="Memory bandwidth of this owner's threads when they update three arrays in place, measured at its start; "
    "other processes that ran then reduce it.",
)
OPTIMIZER_QUEUE_DEPTH = _gauge(
    name="rayzero_optimizer_queue_depth",
    unit="tasks",
    roles=(OPTIMIZER,),
    help="Tasks (norm sums, updates, reads, checkpoints) queued for the updater thread.",
)
OPTIMIZER_QUEUE_BYTES = _gauge(
    name="rayzero_optimizer_queue_bytes",
    unit="bytes",
    roles=(OPTIMIZER,),
    help="Bytes of the published parameters of shards whose update is decided but not published yet.",
)
OPTIMIZER_THREADS = _gauge(
    name="rayzero_optimizer_threads", unit="threads", roles=(OPTIMIZER,), help="Threads that compute updates."
)
OPTIMIZER_CORES = _gauge(
    name="rayzero_optimizer_cores",
    unit="cores",
    roles=(OPTIMIZER,),
    help="CPUs that this process may run on (its affinity).",
)
OPTIMIZER_CPU_SECONDS = _counter(
    name="rayzero_optimizer_cpu_seconds_total",
    unit="s",
    roles=(OPTIMIZER,),
    help="Processor time of this process, all threads, user and system.",
)
PARAM_VERSION = _gauge(
    name="rayzero_param_version",
    unit="versions",
    roles=(OPTIMIZER,),
    help="The newest version that this owner has published for all its shards.",
)
VERSION_LAG = _gauge(
    name="rayzero_version_lag",
    unit="versions",
    roles=(RANK,),
    help="Steps that this rank has committed beyond the newest version that it knows is published completely: 0 or 1.",
)
SHARDS = _gauge(name="rayzero_shards", unit="shards", roles=(OPTIMIZER,), help="Shards of this owner.")
SHARD_IMBALANCE = _gauge(
    name="rayzero_shard_imbalance_ratio",
    unit="ratio",
    roles=(COORDINATOR,),
    help="Largest over mean of the owners' update seconds since the last heartbeat with new values; 1 is balanced.",
)

# ---- memory -----------------------------------------------------------------------------------------------------

MEMORY_BYTES = _gauge(
    name="rayzero_memory_bytes",
    unit="bytes",
    labels=("kind", "tier"),
    roles=EVERY,
    help="Bytes that this process has allocated, by purpose; only the process that made a byte counts it. kind: param, "
    "master, exp_avg, exp_avg_sq (or another optimizer state), grad, staging, process (its size before the run, for a "
    "rank before it passed its model: interpreter, torch, imports), other (the rest of the heap: activations and the "
    "user's objects), unused (freed, but kept by malloc and resident). tier: gpu, pinned, shm, ram. Over the processes "
    "of a node it adds up to rayzero_process_memory_bytes{kind=pss}.",
)
MEMORY_ORIGINAL_BYTES = _gauge(
    name="rayzero_memory_original_bytes",
    unit="bytes",
    labels=("kind",),
    roles=(OPTIMIZER,),
    help="Bytes that what this owner keeps would take unencoded: published parameters in their dtype, masters and "
    "states in fp32. kind: as in rayzero_memory_bytes, which is what is left of them.",
)
PROCESS_MEMORY_BYTES = _gauge(
    name="rayzero_process_memory_bytes",
    unit="bytes",
    labels=("kind",),
    roles=EVERY,
    help="Bytes of this process as the kernel counts them. kind: rss (all resident pages), pss (shared pages divided "
    "among their processes), uss (its private pages), shm (resident shared memory).",
)
HEAP_BYTES = _gauge(
    name="rayzero_heap_bytes",
    unit="bytes",
    labels=("kind",),
    roles=EVERY,
    help="Bytes as malloc counts them. kind: used (allocated now), peak (CPU ranks: the most allocated at the end of a "
    "forward or when a unit's gradients were complete, in the first three steps).",
)
PINNED_BYTES = _gauge(
    name="rayzero_pinned_bytes",
    unit="bytes",
    roles=(RANK,),
    only="CUDA",
    help="Bytes of host memory that this rank has page-locked.",
)
SHM_USED_BYTES = _gauge(
    name="rayzero_shm_used_bytes",
    unit="bytes",
    roles=EVERY,
    help="Bytes in use, by any process, in the file system of slab_dir on this node. Take one process of a node.",
)
SHM_LIMIT_BYTES = _gauge(
    name="rayzero_shm_limit_bytes",
    unit="bytes",
    roles=EVERY,
    help="Size of the file system of slab_dir; a process that needs more of it gets SIGBUS.",
)
HOST_MEMORY_LIMIT_BYTES = _gauge(
    name="rayzero_host_memory_limit_bytes",
    unit="bytes",
    labels=("source",),
    roles=EVERY,
    help="Limits of this node's memory. source: ram, cgroup (the tightest one of this process, if it has any), ray "
    "(the use at which Ray kills processes).",
)
HOST_MEMORY_HEADROOM_BYTES = _gauge(
    name="rayzero_host_memory_headroom_bytes",
    unit="bytes",
    roles=EVERY,
    help="Bytes left on this node up to the first of the rayzero_host_memory_limit_bytes. Take one process of a node.",
)
MEMORY_PRESSURE_RATIO = _gauge(
    name="rayzero_memory_pressure_ratio",
    unit="ratio",
    labels=("resource",),
    roles=(RANK, OPTIMIZER),
    help="Used over limit, measured at most once a second: by a rank at the end of a forward, by an owner when it is "
    "asked (host, cgroup and shm: its host may have no rank). resource: device (a "
    "CUDA device, used by anybody, without what torch keeps free), host (RAM), cgroup (the tightest one of this "
    "process; both without page cache that the kernel drops first), shm (the file system of slab_dir), "
    "max_cpu_memory_mb and max_gpu_memory_mb (this process, over the config's limits).",
)
MEMORY_STALL_RATIO = _gauge(
    name="rayzero_memory_stall_ratio",
    unit="ratio",
    labels=("kind",),
    roles=(RANK,),
    only="a kernel that counts stalls (PSI)",
    help="Share of the last ten seconds in which processes waited for memory, by the kernel's count for this process's "
    "cgroup or else for the host. kind: some (at least one waited), full (all waited).",
)
MEMORY_ACTIONS = _counter(
    name="rayzero_memory_actions_total",
    unit="actions",
    labels=("action",),
    roles=(RANK,),
    help="What was done about memory, by auto_memory_management or at the loop's wish. action: garbage (collected), "
    "units (idle ones resharded), buffers (free ones dropped), malloc, device (freed memory given back), prefetch "
    "(made shorter), activations (all leave the device, or again their fraction).",
)
MEMORY_FREED_BYTES = _counter(
    name="rayzero_memory_freed_bytes_total",
    unit="bytes",
    labels=("action",),
    roles=(RANK,),
    help="Bytes that these actions gave back, each by the measure that it changes.",
)
MEMORY_ACTION_SECONDS = _counter(
    name="rayzero_memory_action_seconds_total",
    unit="s",
    labels=("action",),
    roles=(RANK,),
    help="Seconds of this rank's loop that these actions took.",
)
GPU_MEMORY_BYTES = _gauge(
    name="rayzero_gpu_memory_bytes",
    unit="bytes",
    labels=("kind",),
    roles=(RANK,),
    only="CUDA",
    help="Bytes of torch's allocator on this rank's device. kind: allocated, reserved, peak_active, total (the "
    "device's memory).",
)
GPU_ALLOC_RETRIES = _counter(
    name="rayzero_gpu_alloc_retries_total",
    unit="retries",
    roles=(RANK,),
    only="CUDA",
    help="Allocations that succeeded only after torch had freed its cached memory.",
)
GPU_OOMS = _counter(
    name="rayzero_gpu_ooms_total", unit="errors", roles=(RANK,), only="CUDA", help="Allocations that failed."
)
PLAN_ERROR_RATIO = _gauge(
    name="rayzero_plan_error_ratio",
    unit="ratio",
    labels=("what",),
    roles=(OPTIMIZER,),
    only="20 steps",
    help="Measured over planned bytes, less 1, after 20 steps. what: host (growth of heap and shared memory since "
    "before the plan; without the copies that are there only while a checkpoint is written).",
)

# ---- reliability ------------------------------------------------------------------------------------------------

CHECKPOINT_SECONDS = _histogram(
    name="rayzero_checkpoint_seconds",
    labels=("phase",),
    roles=(OPTIMIZER,),
    buckets=_FILE_S,
    only="checkpoints",
    help="Seconds of each phase of a checkpoint. phase: write (this owner's file), publish (manifest and rename; lead "
    "owner only).",
)
CHECKPOINT_STALL_SECONDS = _counter(
    name="rayzero_checkpoint_stall_seconds_total",
    unit="s",
    roles=(OPTIMIZER,),
    only="checkpoints",
    help="Seconds in which updates copied shards for a checkpoint that was being written, or waited for its file.",
)
CHECKPOINT_BYTES = _gauge(
    name="rayzero_checkpoint_bytes",
    unit="bytes",
    roles=(OPTIMIZER,),
    only="checkpoints",
    help="Size of this owner's file in the last checkpoint.",
)
CHECKPOINT_LAST_SUCCESS = _gauge(
    name="rayzero_checkpoint_last_success_timestamp_seconds",
    unit="unix s",
    roles=(OPTIMIZER,),
    only="checkpoints",
    help="When the last checkpoint was complete. Lead owner only.",
)
CHECKPOINT_FAILURES = _counter(
    name="rayzero_checkpoint_failures_total",
    unit="checkpoints",
    roles=(OPTIMIZER,),
    only="a checkpoint that failed",
    help="Checkpoint files that this owner could not write; at the lead owner, also checkpoints that it could not "
    "complete.",
)
ACTORS = _gauge(
    name="rayzero_actors",
    unit="processes",
    labels=("kind", "state"),
    roles=(COORDINATOR,),
    help="Processes of the run. kind: rank, optimizer; state: desired, ready (its heartbeats arrive), late.",
)
HEARTBEAT_AGE_SECONDS = _gauge(
    name="rayzero_heartbeat_age_seconds",
    unit="s",
    labels=("process",),
    roles=(COORDINATOR,),
    help='Seconds since the last heartbeat of a process ("rank 0", "optimizer 1"); each sends one every 2 s.',
)
RECOVERIES = _counter(
    name="rayzero_recoveries_total",
    unit="processes",
    labels=("what",),
    roles=(COORDINATOR,),
    only="a process that died",
    help="Failures that the run has outlived. what: rank or optimizer, if another process took a dead one's place; "
    "run, if the whole run started again from a checkpoint.",
)
RECOVERY_SECONDS = _counter(
    name="rayzero_recovery_seconds_total",
    unit="s",
    labels=("phase",),
    roles=(COORDINATOR,),
    only="a process that died",
    help="Seconds of those recoveries. phase: detect, from the death until it is acted on (only processes on the "
    "driver's node); start, from then until the new process answers; re-form, from then until everybody knows it; "
    "restart, until every process of a run that started again is up.",
)
RESCALES = _counter(
    name="rayzero_rescales_total",
    unit="changes",
    labels=("outcome",),
    roles=(COORDINATOR,),
    only="a change of the optimizers",
    help="Requests for other optimizer actors while the run goes on. outcome: done, or given_up, if they stayed as "
    "they were.",
)
RESCALE_SECONDS = _counter(
    name="rayzero_rescale_seconds_total",
    unit="s",
    labels=("step",),
    roles=(COORDINATOR,),
    only="a change of the optimizers",
    help="Seconds of those changes. step: start (new processes, while training goes on), then hold, settle, prepare, "
    "let_stand, enter and change, in which no step is decided.",
)
RESCALE_PAUSE_SECONDS = _gauge(
    name="rayzero_rescale_pause_seconds",
    unit="s",
    roles=(COORDINATOR,),
    only="a change of the optimizers",
    help="Seconds in which no step was decided during the last change of the optimizers.",
)
RESCALE_MOVED_BYTES = _counter(
    name="rayzero_rescale_moved_bytes_total",
    unit="bytes",
    roles=(COORDINATOR,),
    only="a change of the optimizers",
    help="Bytes of shards that got another owner in those changes. On one host they stay where they are.",
)
LOGGER_ROWS = _counter(
    name="rayzero_logger_rows_total",
    unit="rows",
    labels=("logger", "result"),
    roles=(COORDINATOR,),
    only="run.report_to",
    help="Rows of metrics.jsonl for the loggers of run.report_to. logger: its name; result: sent, or lost, if it "
    "refused a row while it took others.",
)
PINNED_UNITS = _counter(
    name="rayzero_pinned_units_total",
    unit="units",
    labels=("group",),
    roles=(RANK,),
    only="views or graphs held over a step",
    help="Units that step() could not reshard because views or saved tensors held them, by layer group.",
)

# ---- layers -----------------------------------------------------------------------------------------------------

GROUP_GRAD_NORM = _gauge(
    name="rayzero_group_grad_norm",
    unit="",
    labels=("group",),
    roles=(OPTIMIZER,),
    help="L2 norm of this owner's part of a layer group's averaged gradient, before unscaling and clipping, every "
    "telemetry.norms_every steps. The group's norm is the root of the sum of the owners' squares.",
)
GROUP_UPDATE_NORM = _gauge(
    name="rayzero_group_update_norm",
    unit="",
    labels=("group",),
    roles=(OPTIMIZER,),
    help="L2 norm of what that step added to this owner's part of a layer group's weights.",
)
GROUP_PARAM_NORM = _gauge(
    name="rayzero_group_param_norm",
    unit="",
    labels=("group",),
    roles=(OPTIMIZER,),
    help="L2 norm of this owner's part of a layer group's fp32 weights after that step. Update over param is healthy "
    "near 1e-3.",
)

# ---- activations (rayzero.activations) --------------------------------------------------------------------------

ACTIVATION_BYTES = _counter(
    name="rayzero_activation_bytes_total",
    unit="bytes",
    labels=("direction",),
    roles=(RANK,),
    only="rayzero.activations",
    help="Device bytes of saved activations that were copied. direction: out (to the host), in (back).",
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All metrics, in the order of this file."""
