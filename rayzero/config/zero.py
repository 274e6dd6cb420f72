"""``ZeroConfig``: how a model's states are split, moved and updated."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Unpack

from pydantic import Field, model_validator

from rayzero.config.arguments import ZeroArguments, ZeroSetters
from rayzero.config.base import GIB, MIB, Count, Flag, Mebibytes, Names, Positive, Seconds, Share, Size
from rayzero.config.choices import AutoMemoryStrategy, CpuCompressionMethod

Precision = Literal["fp32", "bf16", "fp16"]
Overlap = Literal["none", "forward"]
Nonfinite = Literal["skip", "raise"]
Spread = Literal["balanced", "round_robin", "contiguous"]
Transport = Literal["auto", "inproc", "grpc", "shm"]
Placement = Literal["beside_rank", "packed", "cpu_nodes"]
Kernel = Literal["auto", "native", "torch"]
Moments = Literal["fp32", "bf16", "int8"]
CheckpointMoments = Literal["fp32", "kept"]
MatrixUpdates = Literal["owner", "rank"]
WireCompression = Literal["none", "bf16", "int8"]
HostPush = Literal["auto", "always", "never"]


class ZeroConfig(ZeroSetters):
    """Says how a model's states are split, moved and updated."""

    offload_params: Flag = True
    """True: a unit's parameters leave the device when other units need room in gpu_param_memory_budget. False:
    every unit stays on the device between uses and is fetched again only when a new version is published."""

    offload_grads: Flag = True
    """True: a unit's gradients leave the device as soon as they are complete. False: they accumulate on the device in
    fp32 and are pushed once, in step()."""

    offload_optimizer_states: Flag = True
    """True: the part of masters and moments that offload_fraction says lives on the host. False: all of them live on
    the ranks' devices, as with offload_fraction=0."""

    offload_fraction: Share = 1.0
    """Share of the trained elements whose optimizer runs on the host, 0 to 1. Masters and moments of the others lie on
    the ranks' devices, an equal part on each, in whole shards: the shards that forward uses first, because ranks would
    wait for their updates first. In a run with optimizer actors, the value in the trainer's zero_config counts."""

    offload_activations: Names = ()
    """Patterns (fnmatch) of module names ("layers.*.mlp") whose saved activations wait in host memory between forward
    and backward; the matches of a pattern are one group in summaries. The values stay exact."""

    activation_fraction: Share = 1.0
    """Share of the bytes saved by offload_activations' modules that leaves the device, 0 to 1, the earliest first."""

    activation_min_bytes: Size = MIB
    """Bytes that a saved tensor must have to be offloaded; smaller ones stay on the device."""

    activation_device_budget: Size | None = None
    """Bytes of saved activations that offload_activations' modules may hold on the device; used instead of
    activation_fraction. Measured times decide which modules keep, offload or recompute theirs. None: no such choice is
    made."""

    activation_host_budget: Size | None = None
    """Bytes of host memory that offloaded activations may take; the rest stays on the device. None: no limit."""

    cpu_memory_budget: Size | None = None
    """Bytes of host memory each owner's plan may use (parameters, master, moments, gradient landing, staging). None:
    what its host, its cgroup and slab_dir have room for when it starts."""

    gpu_param_memory_budget: Size = 2 * GIB
    """Bytes of gathered parameters on a rank's device, prefetches included; a larger unit is admitted when alone."""

    prefetch_buffer_size: Count = 16
    """Prefetch depth: how many units ahead of the one in use are fetched, within gpu_param_memory_budget. This is the
    maximum and the depth of the first pass; then the depth follows measured fetch and compute times: the fewest units
    that still arrive in time."""

    max_gpu_memory_mb: Mebibytes | None = None
    """MiB of device memory that count as full, beside what the device has: pressure is what torch has allocated over
    this. None: only the device itself counts."""

    max_cpu_memory_mb: Mebibytes | None = None
    """MiB of host memory that count as full, beside RAM, cgroup and slab_dir: pressure is the process's RSS over this.
    None: only these count."""

    async_prefetch: Flag = True
    """True: units are fetched before they are used. False: a unit is fetched only at its use."""

    overlap_computation: Flag = True
    """False: transfers are synchronous: nothing is prefetched, a push waits until it has landed, and step() waits for
    the update."""

    pin_cpu_memory: Flag = True
    """True: staging buffers are page-locked when the rank's device is CUDA. On a CPU rank there is no staging copy."""

    cpu_compression: CpuCompressionMethod = CpuCompressionMethod.NONE
    """How owners keep the parameters of frozen units, and how these travel: ranks decode them. Parameters whose dtype
    the method does not make smaller (bf16 by "bf16") stay as they are. A lossy method replaces the values: also
    full_state_dict, checkpoints and exports have what it kept. Without one, owners also keep the
    fp32 values of frozen parameters that the compute dtype would round (4 bytes a parameter). Trained parameters stay
    exact; ``moments`` compresses their optimizer states, ``wire_compression`` gradients on the way,
    ``ActivationOffload`` activations."""

    auto_memory_management: AutoMemoryStrategy = AutoMemoryStrategy.AGGRESSIVE
    """What is done about measured memory pressure, and how early: garbage, prefetch depth, gathered units, activations
    (engine/engine_memory.py). It never changes a value of the training. "off": pressure is only measured."""

    precision: Precision = "fp32"
    """Dtype of unsharded parameters and pushed gradients; masters are always fp32. "fp16" needs a loss scale: use
    torch.amp.GradScaler as in any loop."""

    overlap: Overlap = "forward"
    """"forward": step() returns at once and the update runs under the next forward. "none": step() waits for the
    update, as it always does in a script alone on a CPU, where both need the same cores. A CPU rank that computes on
    all cores of the owners' host waits before its next forward in any case."""

    max_grad_norm: Positive | None = None
    """Every step() clips the global gradient norm to this, in the same message as the finish; None: no clipping."""

    nonfinite: Nonfinite = "skip"
    """What a step with an inf or nan gradient does: "skip" leaves the weights unchanged, "raise" raises an error."""

    gradient_accumulation_steps: Annotated[Count, Field(le=32_766)] = 1
    """Backwards planned per step. Owners add up what all ranks have pushed, backward by backward, in fp32; a single
    rank adds up its own."""

    shard_bytes: Annotated[Size, Field(multiple_of=256)] = 8 * MIB
    """Bytes of fp32 master in one shard, a multiple of 256 bytes (64 elements)."""

    shard_map: Spread = "balanced"
    """How shards are distributed over owners (layout/shard_map.py)."""

    units: Annotated[Literal["auto"] | Names, Field(min_length=1)] = "auto"
    """"auto": the blocks of every ModuleList and Sequential are units; or a list of names of classes
    whose modules are units, such as "LlamaDecoderLayer"."""

    min_unit_bytes: Size = MIB
    """Bytes: with units="auto", a module outside the blocks is a unit of its own if its own parameters take more than
    this; the smaller modules form the root unit."""

    keep_fp32: Names = ()
    """Patterns (fnmatch) of module names whose parameters stay fp32 under a lower precision."""

    transport: Transport = "auto"
    """How ranks reach owners in other processes. "auto": shared memory with owners on the same host, gRPC with the
    others. "shm": shared memory, or an error. "grpc": gRPC with all owners. "inproc": owners are plain objects in the
    rank's process (for one rank alone)."""

    slab_dir: str = "/dev/shm"
    """Directory of the files that owners and ranks of a host share as memory. Choose another tmpfs or a file system
    with room if /dev/shm is small."""

    placement: Placement = "beside_rank"
    """Where owners are placed. "beside_rank": on each rank's node. "packed": together, on as few nodes as can hold
    them. "cpu_nodes": spread over the nodes with the labels of ``scaling_config.optimizer_labels``."""

    stall_timeout: Seconds = 600.0
    """Seconds to wait for a peer's progress before a StallError says who waits for what."""

    kernel: Kernel = "auto"
    """What computes the update: C with vector instructions, tiled torch, or plain Python floats for tests; "auto"
    takes the fastest that works here."""

    moments: Moments = "fp32"
    """How owners keep Adam's moments. "fp32": as plain PyTorch does; what RayZero calls exact needs this. "bf16" and
    "int8": in codes of 2 bytes or 1, with a scale for each 64 (kernels/moments.py): with its master the optimizer takes
    8.1 or 6.1 bytes a parameter instead of 12 (of 10 with precision="bf16", which publishes one half of a master), and
    updates move fewer bytes. For Adam and AdamW, without amsgrad."""

    checkpoint_moments: CheckpointMoments = "fp32"
    """How checkpoints hold Adam's moments. "fp32": decoded, for any reader of safetensors. "kept": as owners keep them,
    so that with moments="int8" a checkpoint has 6.1 bytes a parameter instead of 12. Either resumes with any
    ``moments``, bit for bit with the same ones."""

    checkpoint_copies: Size = GIB
    """Bytes that each owner may hold, at most, in copies of shards that are updated while begin_checkpoint's checkpoint
    is written beside the training. Its plan has them as "checkpoint copies", and no more than its masters and moments
    take. Once they are used up, the update of the next shard waits until the file has it: with slow storage, more
    copies mean shorter waits."""

    matrix_updates: MatrixUpdates = "owner"
    """Where Newton-Schulz of torch.optim.Muon is computed, in bf16 as torch does. "owner": by the owners' CPUs. "rank":
    on the ranks' devices, each shard on one rank; owners send what goes in (2 bytes an element) and get back what comes
    out, and keep masters and momentum. An owner computes itself what a rank does not answer in time. On CPU ranks both
    give the same bits. Not run on a GPU yet."""

    wire_compression: WireCompression = "none"
    """How gradients travel between hosts. "none": unchanged, which exact results need. "bf16": fp32 in half
    the bytes, rounded to nearest even, and widened by the owner before they are added. The relative error of an element
    is at most 2**-8 (below a magnitude of 2**-126 the absolute error is at most 2**-134); inf and nan stay, and finite
    magnitudes above 3.396e38 become inf. "int8": a quarter of the bytes of fp32 and half of those of 16 bits, also for
    bf16 and fp16 gradients. Of each block of 256 neighbours, the absolute error is at most the largest magnitude / 254,
    and a block with inf or nan arrives as nan."""

    host_push: HostPush = "auto"
    """Whether gradients for owners on other hosts leave a host as one sum of its ranks a backward, in fp32: of the
    first ranks of each group of 8 consecutive ones, which can be added there without changing a bit; others push their
    own. Ranks then keep their gradients in slab_dir, and an owner has memory for one sum in place of one push a rank.
    "auto": where that sum takes fewer bytes than what the ranks push (two ranks in fp32, else three), slab_dir is large
    enough, and wire_compression is "none". "always": also where it takes as many. "never": each rank pushes its
    own."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ZeroArguments]) -> None: ...

    @model_validator(mode="after")
    def _budgets_fit(self) -> Self:
        for budget, limit in (
            ("gpu_param_memory_budget", "max_gpu_memory_mb"),
            ("cpu_memory_budget", "max_cpu_memory_mb"),
        ):
            wanted, allowed = getattr(self, budget), getattr(self, limit)
            if wanted is not None and allowed is not None and (wanted := wanted // MIB) > allowed:
                raise ValueError(
                    f"{budget} is {wanted} MiB but {limit} allows {allowed} MiB; raise {limit} or lower {budget}"
                )
        return self

    @model_validator(mode="after")
    def _host_can_push(self) -> Self:
        if self.host_push == "always" and self.shared_directory is None:
            raise ValueError(
                f"host_push='always' needs memory that a host's ranks share, but transport is {self.transport!r}; "
                "set transport='auto' or host_push='never'"
            )
        if self.host_push == "always" and self.wire_compression != "none":
            raise ValueError(
                f"host_push='always' cannot be used with wire_compression={self.wire_compression!r}, which rounds each "
                "push before ranks are added; set wire_compression='none' or host_push='never'"
            )
        return self

    @model_validator(mode="after")
    def _products_have_a_place(self) -> Self:
        if self.matrix_updates == "rank" and self.host_fraction < 1:
            raise ValueError(
                "matrix_updates='rank' is for owners on the host, but with offload_fraction below 1 some have their "
                "states on the ranks' devices, where they multiply too; set matrix_updates='owner' or "
                "offload_fraction=1"
            )
        return self

    @property
    def pushes_for_host(self) -> HostPush:
        """``host_push``: "never" where "auto" comes to that by the other settings."""
        plain = self.wire_compression == "none" and self.shared_directory is not None
        return self.host_push if plain else "never"

    @property
    def host_fraction(self) -> float:
        """``offload_fraction``; 0 without ``offload_optimizer_states``."""
        return self.offload_fraction if self.offload_optimizer_states else 0.0

    @property
    def shared_directory(self) -> Path | None:
        """The directory of the memory shared with processes of the same host; None if ``transport`` forbids it."""
        return Path(self.slab_dir) if self.transport in ("auto", "shm") else None

    @property
    def compression_ratio(self) -> float:
        """Stored bytes per original byte of fp32 weights under ``cpu_compression``, as its codec measures."""
        return self.cpu_compression.ratio()

    @property
    def effective_cpu_memory_budget(self) -> int | None:
        """Bytes of fp32 weights that fit in ``cpu_memory_budget`` under ``cpu_compression``, rounded down; None if it
        is None."""
        if self.cpu_memory_budget is None:
            return None
        return math.floor(self.cpu_memory_budget / Fraction(str(self.compression_ratio)))


SHORT_NAMES = {"compression": "cpu_compression", "memory_strategy": "auto_memory_management"}
"""Settings whose setters have a short name, too."""


def _setter(method: str, setting: str) -> Callable[[ZeroConfig, Any], ZeroConfig]:
    def with_value(self: ZeroConfig, value: Any) -> ZeroConfig:
        return self.replace(**{setting: value})

    with_value.__name__, with_value.__qualname__ = method, f"ZeroConfig.{method}"
    with_value.__doc__ = f"A new config with ``{setting}`` set."
    return with_value


for _short, _setting in ({name: name for name in ZeroConfig.model_fields} | SHORT_NAMES).items():
    setattr(ZeroConfig, f"with_{_short}", _setter(f"with_{_short}", _setting))
