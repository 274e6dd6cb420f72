"""Every measurement that is taken: name, type, unit, labels, buckets and help, once.

Rules: prefix ``rayzero_``, base units in the name, ``_total`` for counters, ``_ratio`` for 0 to 1, few label values.
Which process a series is from is not among its labels: Prometheus adds TARGET_LABELS to all that it scrapes, from
what discovery says of the process (telemetry/discovery.py). Nothing is here that nothing feeds.
"""

from __future__ import annotations

from functools import partial

from rayzero.telemetry.metric import COORDINATOR, EVERY, OPTIMIZER, RANK, Kind, Metric

TARGET_LABELS = ("run", "role", "rank", "actor", "node")
"""``rank`` is on rank workers only, ``actor`` (the owner's index) on optimizer actors only, the others on all."""

MAX_GROUPS = 64
"""Values of the label ``group``: units in forward order, neighbours together where there are more."""

MAX_REPORTED = 64
"""Values of the label ``name``: names that a training loop reports numbers under, in the order of their first use."""

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
    help="1; what runs: versions, who computes updates, how bytes travel (shm, grpc, shm+grpc, inproc).",
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
    help="Steps left times the mean seconds of this process's steps so far.",
)
TRAIN_LOSS = _gauge(
    name="rayzero_train_loss",
    unit="nats",
    roles=(RANK,),
    help="This rank's loss in its last step; average over ranks for the run's.",
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
    help="Learning rate of the last committed step, by index of the parameter group.",
)
GRAD_NORM = _gauge(
    name="rayzero_grad_norm",
    unit="",
    roles=(OPTIMIZER,),
    help="Global L2 norm of the averaged gradients before clipping, last decided step; from the lead owner only.",
)
CLIP_FACTOR = _gauge(
    name="rayzero_clip_factor",
    unit="ratio",
    roles=(OPTIMIZER,),
    help="What clipping by norm multiplied the gradients by in the last applied step: 1 where it did not; lead owner "
    "only.",
)
LOSS_SCALE = _gauge(
    name="rayzero_loss_scale",
    unit="",
    roles=(OPTIMIZER,),
    help="What the loss of the last decided step was multiplied by, as the ranks' scalers say: 1 without one; lead "
    "owner only.",
)
DECIDED_STEPS = _counter(
    name="rayzero_decided_steps_total",
    unit="steps",
    roles=(OPTIMIZER,),
    help="Steps decided in this process's life, those that changed nothing among them; lead owner only.",
)
CLIPPED_STEPS = _counter(
    name="rayzero_clipped_steps_total",
    unit="steps",
    roles=(OPTIMIZER,),
    help="Of the decided steps, those whose gradients clipping by norm made smaller; lead owner only.",
)
SKIPPED_STEPS = _counter(
    name="rayzero_skipped_steps_total",
    unit="steps",
    labels=("reason",),
    roles=(OPTIMIZER,),
    help="Of the decided steps, those that changed no weights. reason: nonfinite (an inf or nan gradient); lead owner "
    "only.",
)

# ---- where the step goes ----------------------------------------------------------------------------------------

STEP_SECONDS = _histogram(
    name="rayzero_step_seconds",
    roles=(RANK,),
    buckets=_STEP_S,
    help="From the end of one optimizer.step() to the end of the next, on the host's clock.",
)
STEP_PHASE_SECONDS = _histogram(
    name="rayzero_step_phase_seconds",
    labels=("phase",),
    roles=(RANK,),
    buckets=_PART_S,
    help="What a step is made of, once a step; phases add up to rayzero_step_seconds. phase: data (the loop's own "
    "work), forward, backward, grad_push, norm, optimizer, fetch_wait, checkpoint; waits are not in the pass they "
    "interrupt. Host clock: on CUDA the time kernels take shows where the host waits for them.",
)
EXPOSED_WAIT_SECONDS = _counter(
    name="rayzero_exposed_wait_seconds_total",
    unit="s",
    labels=("cause",),
    roles=(RANK,),
    help="Seconds this rank's loop stood still. cause: fetch (bytes on their way), optimizer (update not published), "
    "push (gradients not landed), norm (other ranks), mean (other ranks, in mean_over_ranks).",
)
OVERLAP_RATIO = _gauge(
    name="rayzero_optimizer_overlap_ratio",
    unit="ratio",
    roles=(RANK,),
    help="Of the time from the last step's commit to its last published weights, the part this rank did not wait for.",
)

MODEL_FLOPS = _gauge(
    name="rayzero_model_flops_per_second",
    unit="flop/s",
    roles=(RANK,),
    only="rayzero train",
    help="Operations of the model in one step of this rank, as torch's flop counter found before the run, over the "
    "last step's seconds, waits included.",
)
MFU_RATIO = _gauge(
    name="rayzero_mfu_ratio",
    unit="ratio",
    roles=(RANK,),
    only="rayzero train on a GPU of known peak",
    help="rayzero_model_flops_per_second over the peak of this rank's GPU by its data sheet, dense and 16-bit; not "
    "told where that is not known.",
)

# ---- prefetch and links -----------------------------------------------------------------------------------------

PREFETCH_REQUESTS = _counter(
    name="rayzero_prefetch_requests_total",
    unit="uses",
    labels=("result",),
    roles=(RANK,),
    help="Uses of a unit that was not up. result: hit (its bytes were there), late (on their way), miss (not asked "
    "for yet).",
)
PREFETCH_DEPTH = _gauge(
    name="rayzero_prefetch_depth_units", unit="units", roles=(RANK,), help="Units asked for ahead of the one in use."
)
PREFETCH_LEAD_SECONDS = _histogram(
    name="rayzero_prefetch_lead_seconds",
    roles=(RANK,),
    buckets=_TRANSFER_S,
    help="How long before its use a unit was there (hits only).",
)
PREFETCH_LATE_SECONDS = _histogram(
    name="rayzero_prefetch_late_seconds",
    roles=(RANK,),
    buckets=_TRANSFER_S,
    help="Waits for a unit that was on its way.",
)
PREFETCH_GROUP_LATE_SECONDS = _counter(
    name="rayzero_prefetch_group_late_seconds_total",
    unit="s",
    labels=("group",),
    roles=(RANK,),
    help="Seconds waited for units that were not there at their use, by layer group: where the stall is.",
)
PREFETCH_INFLIGHT_BYTES = _gauge(
    name="rayzero_prefetch_inflight_bytes", unit="bytes", roles=(RANK,), help="Bytes of units on their way."
)
PREFETCH_WINDOW_BYTES = _gauge(
    name="rayzero_prefetch_window_bytes",
    unit="bytes",
    roles=(RANK,),
    help="Bytes of gathered parameters, those on their way included.",
)
PREFETCH_WINDOW_LIMIT_BYTES = _gauge(
    name="rayzero_prefetch_window_limit_bytes",
    unit="bytes",
    roles=(RANK,),
    help="The most there may be: gpu_param_memory_budget.",
)
FETCH_SECONDS = _histogram(
    name="rayzero_fetch_seconds",
    labels=("transport",),
    roles=(RANK,),
    buckets=_TRANSFER_S,
    only="gRPC between hosts, or CUDA",
    help="One unit's fetch from request to filled, waiting for its version included. CPU ranks of the owners' host "
    "compute in the owners' memory and fetch nothing.",
)
PUSH_SECONDS = _histogram(
    name="rayzero_push_seconds",
    labels=("transport",),
    roles=(RANK,),
    buckets=_TRANSFER_S,
    help="One unit's push from call to landed.",
)
TRANSFER_BYTES = _counter(
    name="rayzero_transfer_bytes_total",
    unit="bytes",
    labels=("direction", "transport", "dtype"),
    roles=(RANK,),
    help="Payload as it travelled (headers excluded). direction: fetch, push, load; transport: shm, grpc, inproc; "
    "dtype: as on the wire.",
)
TRANSFER_RAW_BYTES = _counter(
    name="rayzero_transfer_raw_bytes_total",
    unit="bytes",
    labels=("direction",),
    roles=(RANK,),
    help="The same payload before wire compression: divide by rayzero_transfer_bytes_total for the ratio.",
)
TRANSFER_RETRIES = _counter(
    name="rayzero_transfer_retries_total",
    unit="streams",
    labels=("direction", "transport"),
    roles=(RANK,),
    only="a link that failed",
    help="Bulk streams sent again whole after a failed link or damaged bytes.",
)
GRPC_REQUESTS = _counter(
    name="rayzero_grpc_requests_total",
    unit="calls",
    labels=("method", "code"),
    roles=(OPTIMIZER,),
    help="gRPC calls answered by this owner; a stream is one call, counted at its end.",
)
GRPC_REQUEST_SECONDS = _histogram(
    name="rayzero_grpc_request_seconds",
    labels=("method",),
    roles=(OPTIMIZER,),
    buckets=_TRANSFER_S,
    help="From a call's arrival to its end. Calls that wait for other ranks (finish, commit) include the wait.",
)

# ---- optimizer tier ---------------------------------------------------------------------------------------------

OPTIMIZER_UPDATE_SECONDS = _histogram(
    name="rayzero_optimizer_update_seconds",
    roles=(OPTIMIZER,),
    buckets=_PART_S,
    help="One step's update and publication of all shards of this owner.",
)
OPTIMIZER_PARAMS = _counter(
    name="rayzero_optimizer_params_total", unit="params", roles=(OPTIMIZER,), help="Parameter elements updated."
)
OPTIMIZER_BYTES = _counter(
    name="rayzero_optimizer_memory_bytes_processed_total",
    unit="bytes",
    roles=(OPTIMIZER,),
    help="Bytes of gradients read and states and weights read or written by updates, each once; its rate in update "
    "seconds over rayzero_host_bandwidth_limit_bytes_per_second is the efficiency.",
)
HOST_BANDWIDTH_LIMIT = _gauge(
    name="rayzero_host_bandwidth_limit_bytes_per_second",
    unit="bytes/s",
    roles=(OPTIMIZER,),
    only="telemetry.measure_bandwidth and the native library",
    help="Memory traffic of this owner's threads updating three arrays in place, measured at its start, in what "
    "other processes left of the host then.",
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
    help="Published parameters of shards whose update is decided and not yet published.",
)
OPTIMIZER_THREADS = _gauge(
    name="rayzero_optimizer_threads", unit="threads", roles=(OPTIMIZER,), help="Threads that compute updates."
)
OPTIMIZER_CORES = _gauge(
    name="rayzero_optimizer_cores",
    unit="cores",
    roles=(OPTIMIZER,),
    help="CPUs this process may run on (its affinity).",
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
    help="The newest version of which this owner has published all its shards.",
)
VERSION_LAG = _gauge(
    name="rayzero_version_lag",
    unit="versions",
    roles=(RANK,),
    help="Steps this rank has committed beyond the newest version it knows to be published as a whole: 0 or 1.",
)
SHARDS = _gauge(name="rayzero_shards", unit="shards", roles=(OPTIMIZER,), help="Shards of this owner.")
SHARD_IMBALANCE = _gauge(
    name="rayzero_shard_imbalance_ratio",
    unit="ratio",
    roles=(COORDINATOR,),
    help="Largest over mean of the owners' update seconds since the last heartbeat that brought news: 1 is even.",
)

# ---- memory -----------------------------------------------------------------------------------------------------

MEMORY_BYTES = _gauge(
    name="rayzero_memory_bytes",
    unit="bytes",
    labels=("kind", "tier"),
    roles=EVERY,
    help="What this process has made, by purpose, each byte counted by its maker alone. kind: param, master, exp_avg, "
    "exp_avg_sq (or another optimizer state), grad, staging, process (what it was before the run, a rank when its "
    "loop handed its model over: interpreter, torch, what was imported), "
    "other (the heap's rest: activations, the user's), unused (given back, kept by malloc, resident); "
    "tier: gpu, pinned, shm, ram. Over the processes of a node it adds up to rayzero_process_memory_bytes{kind=pss}.",
)
PROCESS_MEMORY_BYTES = _gauge(
    name="rayzero_process_memory_bytes",
    unit="bytes",
    labels=("kind",),
    roles=EVERY,
    help="As the kernel counts. kind: rss (all resident), pss (shared pages in equal parts), uss (its own), shm "
    "(resident shared memory).",
)
HEAP_BYTES = _gauge(
    name="rayzero_heap_bytes",
    unit="bytes",
    labels=("kind",),
    roles=EVERY,
    help="As malloc counts. kind: used (given out now), peak (CPU ranks: the most given out that was seen at the end "
    "of a forward or when a unit's gradients had come, in the first three steps).",
)
PINNED_BYTES = _gauge(
    name="rayzero_pinned_bytes",
    unit="bytes",
    roles=(RANK,),
    only="CUDA",
    help="Host memory this rank has page-locked.",
)
SHM_USED_BYTES = _gauge(
    name="rayzero_shm_used_bytes",
    unit="bytes",
    roles=EVERY,
    help="In use, by anybody, where slabs are made on this node (slab_dir); take one process of a node.",
)
SHM_LIMIT_BYTES = _gauge(
    name="rayzero_shm_limit_bytes", unit="bytes", roles=EVERY, help="Size of that file system; SIGBUS beyond it."
)
HOST_MEMORY_LIMIT_BYTES = _gauge(
    name="rayzero_host_memory_limit_bytes",
    unit="bytes",
    labels=("source",),
    roles=EVERY,
    help="source: ram, cgroup (the tightest of this process's, where there is one), ray (where Ray kills processes).",
)
HOST_MEMORY_HEADROOM_BYTES = _gauge(
    name="rayzero_host_memory_headroom_bytes",
    unit="bytes",
    roles=EVERY,
    help="What may still be taken on this node before the first of those limits; take one process of a node.",
)
GPU_MEMORY_BYTES = _gauge(
    name="rayzero_gpu_memory_bytes",
    unit="bytes",
    labels=("kind",),
    roles=(RANK,),
    only="CUDA",
    help="Torch's allocator on this rank's device. kind: allocated, reserved, peak_active; total: the device has.",
)
GPU_ALLOC_RETRIES = _counter(
    name="rayzero_gpu_alloc_retries_total",
    unit="retries",
    roles=(RANK,),
    only="CUDA",
    help="Allocations that succeeded only after cached memory was given back.",
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
    help="Measured over planned, less 1, after 20 steps. what: host (heap and shared memory since before the plan).",
)

# ---- reliability ------------------------------------------------------------------------------------------------

CHECKPOINT_SECONDS = _histogram(
    name="rayzero_checkpoint_seconds",
    labels=("phase",),
    roles=(OPTIMIZER,),
    buckets=_FILE_S,
    only="checkpoints",
    help="phase: write (this owner's file), publish (manifest and rename; lead owner only).",
)
CHECKPOINT_STALL_SECONDS = _counter(
    name="rayzero_checkpoint_stall_seconds_total",
    unit="s",
    roles=(OPTIMIZER,),
    only="checkpoints",
    help="Seconds this owner's updates could not run because it wrote its checkpoint file.",
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
    help="When the last checkpoint was complete; lead owner only.",
)
CHECKPOINT_FAILURES = _counter(
    name="rayzero_checkpoint_failures_total",
    unit="checkpoints",
    roles=(OPTIMIZER,),
    only="a checkpoint that failed",
    help="Files this owner could not write; at the lead owner also checkpoints it could not complete.",
)
ACTORS = _gauge(
    name="rayzero_actors",
    unit="processes",
    labels=("kind", "state"),
    roles=(COORDINATOR,),
    help="kind: rank, optimizer; state: desired, ready (heard of lately), late.",
)
HEARTBEAT_AGE_SECONDS = _gauge(
    name="rayzero_heartbeat_age_seconds",
    unit="s",
    labels=("process",),
    roles=(COORDINATOR,),
    help='Since the coordinator last heard of a process ("rank 0", "optimizer 1"); they tell every 2 s.',
)
PINNED_UNITS = _counter(
    name="rayzero_pinned_units_total",
    unit="units",
    labels=("group",),
    roles=(RANK,),
    only="views or graphs held over a step",
    help="Units that could not be resharded at step() because views or saved tensors held them, by layer group.",
)

# ---- layers -----------------------------------------------------------------------------------------------------

GROUP_GRAD_NORM = _gauge(
    name="rayzero_group_grad_norm",
    unit="",
    labels=("group",),
    roles=(OPTIMIZER,),
    help="L2 norm of this owner's part of a layer group's averaged gradient, before unscaling and clipping, every "
    "telemetry.norms_every steps; the group's is the root of the owners' sum of squares.",
)
GROUP_UPDATE_NORM = _gauge(
    name="rayzero_group_update_norm",
    unit="",
    labels=("group",),
    roles=(OPTIMIZER,),
    help="The same of what that step added to the weights.",
)
GROUP_PARAM_NORM = _gauge(
    name="rayzero_group_param_norm",
    unit="",
    labels=("group",),
    roles=(OPTIMIZER,),
    help="The same of the fp32 weights after that step; update over param is healthy near 1e-3.",
)

# ---- activations (rayzero.activations) --------------------------------------------------------------------------

ACTIVATION_BYTES = _counter(
    name="rayzero_activation_bytes_total",
    unit="bytes",
    labels=("direction",),
    roles=(RANK,),
    only="rayzero.activations",
    help="Device bytes of saved activations that were copied. direction: out, in.",
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in this order."""
