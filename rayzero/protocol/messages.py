"""The messages between ranks, owners and the lead: frozen values without behaviour. How written values are compared,
bit by bit. And a rank's *lives*: what an earlier one did counts only where it was decided.

Ranks (``protocol/store.py``), owners (``owner/``), the lead (``lead/``) and every transport (``store/``) use them.
Steps count from 0; *version* ``v`` is the content after ``v`` decided steps, so step ``n`` reads version ``n`` and
publishes version ``n + 1``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import xxhash
from pydantic import ConfigDict, Field
from torch import Tensor

from rayzero.config.base import Share
from rayzero.config.zero import CheckpointMoments, MatrixUpdates, Moments, Nonfinite, Spread
from rayzero.errors import ConfigError, RayZeroError, StoreClosedError, UnsupportedError
from rayzero.layout.model_layout import ModelLayout
from rayzero.records import Sha256, Whole

PROTOCOL_VERSION = 21

# Tensor kinds to fetch or write; the name of an optimizer state, such as "exp_avg", is one too.
COMPUTE = "compute"  # the published parameters, in the unit's dtype
STORED = "stored"  # the records (codecs/record.py) of published parameters that owners keep encoded; only to fetch
MASTER = "master"  # the fp32 masters
STEP = "step"  # how many updates each parameter has had: fp32, one number repeated over its range
PRODUCT = "product"  # bf16: what ranks multiply for owners, and what comes of it (protocol/products.py)
GROUP = "group"  # only to write: each parameter's group number, fp32, repeated over its range. [Note: group numbers]

CLASS = "optimizer"  # the entry of a parameter group that says which of several optimizer classes updates it: its path

_NAMES_SHOWN = 8  # how many of a mapping's names a message shows
MOST_BACKWARDS = (1 << 15) - 2  # that a step can be planned with: rounds of a total have 15 bits
MEAN_BYTES = 4000  # the most that one mean over ranks may hold: it fits a mailbox of shared memory
MEANS_KEPT = 64  # of the last calls of mean_over_ranks, for ranks that come back and make some of them again

Hyper = dict[str, Any]  # one parameter group's options, JSON-able: lr, betas, eps, weight_decay, ...
ATTEMPTS = 1 << 16  # of each life within a step: a later life's pushes replace those of earlier ones


def digest_of(values: Tensor) -> str:
    """A digest that is equal for equal bytes. ``values``: any shape and dtype, contiguous, host memory."""
    content: Any = values.detach().reshape(-1).view(torch.uint8).numpy()
    return str(xxhash.xxh3_128_hexdigest(content))


_BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # of an element -> a dtype that compares bits


def same_bits(ours: Tensor, theirs: Tensor) -> Tensor:
    """Whether each element has the same bits, as a bool tensor of their shape: NaNs may be equal, 0.0 is not -0.0. Both
    tensors have one shape and one dtype of 1, 2, 4 or 8 bytes."""
    bits = _BITS[ours.itemsize]
    return ours.view(bits) == theirs.view(bits)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no blanks, so that equal values give equal text (floats print exactly)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


_NO_GROUP, _LIKES = (1 << 14) - 1, 1 << 10  # so that fp32 has every number


def group_number(group: int, like: int) -> int:
    """What owners know a parameter group by that came after prepare(). Raises UnsupportedError if it is one of too
    many.

    [Note: group numbers] The number of a group at prepare() is its index; -1 is none. What a later one keeps of a
    parameter, owners must know before a decision brings its options, also a successor whose parameters are being read
    or loaded. So its number, which outlives processes, also says which group at prepare() keeps the same (``like``).
    ``group`` is -1 for a parameter in no group yet of which a checkpoint has states."""
    if group >= _NO_GROUP or like >= _LIKES:
        raise UnsupportedError(
            f"parameter group {group}, like group {like}, was added after rayzero.prepare(), where later groups have "
            f"numbers below {_NO_GROUP:,} and are like one of the first {_LIKES:,}; give prepare() this group"
        )
    return -2 - ((group if group >= 0 else _NO_GROUP) + (_NO_GROUP + 1) * like)


def group_and_like(number: int) -> tuple[int, int]:
    """The index of a group, and that of the group at prepare() that keeps the same: itself, if it was there. -1 is
    none."""
    if number >= -1:
        return number, number
    like, group = divmod(-2 - number, _NO_GROUP + 1)
    return (-1 if group == _NO_GROUP else group), like


def classes_of(groups: Sequence[Hyper], optimizer: str) -> str:
    """See ``ModelSpec.classes``. ``optimizer``: the class of groups that name none."""
    return ", ".join(sorted({group.get(CLASS, optimizer) for group in groups}))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that an owner must know about a training. Every rank of a run sends the same one at attach."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # no entry of a later RayZero is overlooked

    run: str
    layout: ModelLayout
    world_size: Annotated[int, Field(gt=0, le=1 << 62)]
    optimizer: str  # import path of the torch optimizer class, "torch.optim.adamw:AdamW"
    hyper: tuple[Hyper, ...]  # per parameter group, as of prepare()
    group_of: tuple[tuple[Annotated[int, Field(ge=-1, le=1 << 62)], ...], ...]  # [unit][slot] -> parameter group
    accumulation_steps: Annotated[int, Field(gt=0, le=MOST_BACKWARDS)] = 1  # planned per step
    nonfinite: Nonfinite = "skip"
    shard_map: Spread = "balanced"  # layout/shard_map.py: which owner has which shard
    kernel: str = "auto"  # kernels/: what computes the update, and refuses another name
    moments: Moments = "fp32"  # kernels/moments.py: how Adam's moments are kept
    checkpoint_moments: CheckpointMoments = "fp32"  # how checkpoints hold them
    checkpoint_copies: Whole = 0  # bytes that an owner may copy while a checkpoint is written (owner/checkpoint.py)
    matrix_updates: MatrixUpdates = "owner"  # where the products of Newton-Schulz are computed (protocol/products.py)
    offload_fraction: Share = 1.0  # below 1 each rank has an owner beside it, with states on its device (shard_map.py)
    restore_from: str | None = None  # the checkpoint directory that the owners start from
    lineage: str = ""  # of the states in shared memory: a later run that continues them has the same
    attributes: Hyper = field(default_factory=dict)  # of the user's optimizer: OptimizerMaker.attributes

    @property
    def classes(self) -> str:
        """The import path of the class that updates parameters, or the paths of several, sorted."""
        return classes_of(self.hyper, self.optimizer)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able description, which ``parse_record`` reads."""
        described = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "layout"}
        return described | {"layout": self.layout.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """An owner's answer to attach."""

    version: int  # the version that the run began with: 0, or that of the checkpoint it was restored from
    needs_load: bool  # True: rank 0 must load the initial weights
    step: int = 0  # of a rank that has come back: the open step, with which it goes on


class Summand(NamedTuple):
    """One rank's part of a sum over ranks: its first pushes of a unit in an attempt at a step."""

    rank: int
    attempt: int
    pushes: int  # how many of them are in this sum and the sums before it; 0: the rank has none of the unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One push of one rank for one unit, without the gradient's bytes, which travel beside it.

    With ``summands``, the bytes are the fp32 sum of push ``seq`` over these ranks, ``rank`` is the first of them,
    ``presence`` has the parameters of which any of them has a gradient, and ``attempt`` is 0."""

    step: int
    attempt: int  # how often this rank has discarded within the step
    rank: int
    unit: int
    seq: int  # how many pushes of this unit this rank has made before, in this attempt
    presence: bytes  # bit i (least significant first) set: slot i of the unit has a gradient
    sum_of: int = 0  # n > 0: not push ``seq`` alone but the sum of the first n = seq + 1, in the dtype it is kept in
    summands: tuple[Summand, ...] = ()  # ascending ranks of one group of kernels/rank_sum.py

    @property
    def first(self) -> int:
        """The number of the first push in it."""
        return 0 if self.sum_of else self.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """One rank's gradients of one unit in an attempt. The bytes lie in that rank's memory, where owners read them: of
    the last of ``count`` contributions, where owners keep totals, else the sum of all of them."""

    step: int
    attempt: int
    count: int  # contributions so far
    presence: bytes  # bit i set: slot i has a gradient
    place: int = -2  # bytes from the start of the rank's pool; see IN_TOTAL and AT_HOME


IN_TOTAL = -1  # in place of a ``Pushed.place``: the rank has them no more: they are in the owners' totals
AT_HOME = -2  # in the first of the unit's own places; in the nth after it at AT_HOME - n


LOOP_PARTS = 2  # of a loop's state at a step: AT_COMMIT, then AT_FORWARD
AT_COMMIT, AT_FORWARD = range(LOOP_PARTS)
LOOP_STEPS = 3  # of a rank that are kept: the open one, which it may have committed, and the two before, of which all
# ranks repeat the older one's end if the whole run has died there
MOST_LOOP_STATE = 16 << 20  # bytes of a part that is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """What a rank's loop needs to go on with ``step``, as bytes, in two parts: AT_COMMIT was taken as the step before
    was committed, AT_FORWARD as the first forward of ``step`` began."""

    step: int
    part: int
    content: bytes


class Published(NamedTuple):
    """A version of one shard that its owner has published; every reader gets this value."""

    shard: int
    version: int
    content: int  # the version its content is from: older where the last decisions changed nothing
    total: int = 0  # in notices to other hosts: what is in the shard's total (``total_word``)


def pack_presence(present: list[bool]) -> bytes:
    """Bits, least significant first, as ``Contribution.presence`` holds them."""
    bits = sum(1 << i for i, p in enumerate(present) if p)
    return bits.to_bytes((len(present) + 7) // 8, "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    """What clipping does to a rank-summed gradient: multiply by ``scale``, then clamp every element to +-``limit``."""

    scale: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReport:
    """What one rank pushed in a step. An owner is ready when it has every counted push."""

    step: int
    attempt: int
    rank: int
    counts: tuple[int, ...]  # pushes per unit, in unit order
    clamp: Clamp | None = None  # for the norm of clamped gradients; None: of the averaged gradients, which comes first


class EditKind(StrEnum):
    """What a rank does to the step's averaged gradients before the update."""

    UNSCALE = "unscale"  # multiply by the value: one over a loss scale
    CLIP_NORM = "clip_norm"  # scale down until the global norm is at most the value
    CLIP_VALUE = "clip_value"  # clamp every element to within +- the value


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of the gradients."""

    kind: EditKind
    value: float

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """A rank's inputs to the decision of a step. Every rank must send the same (compared by ``digest``)."""

    edits: tuple[Edit, ...]  # in the order of the calls
    hyper: tuple[Hyper, ...]  # per parameter group, read at step()

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly when their inputs are equal."""
        return hashlib.sha256(canonical_json([list(map(str, self.edits)), self.hyper]).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A rank's request to write into a unit. Every rank must send the same."""

    version: int  # the version that is changed
    unit: int
    kind: str  # COMPUTE, MASTER, STEP, GROUP or the name of an optimizer state
    digest: str  # ``digest_of`` the values


def quoted(names: Sequence[str]) -> str:
    """The first names and the number of the others, for messages."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanInput:
    """What one rank adds to a mean over ranks."""

    names: tuple[str, ...] = ()  # a mapping's keys, sorted; empty: a number or a tensor
    shape: tuple[int, ...] = ()  # a tensor's shape
    values: tuple[float, ...]  # fp64: one for each name, or the tensor's elements
    weight: float  # >= 0; a rank of weight 0 has no part in the mean

    @property
    def size_bytes(self) -> int:
        """An upper bound on its bytes in a message, apart from a few bytes that every mean needs."""
        return 8 * len(self.values) + sum(len(name.encode()) + 4 for name in self.names)

    def __str__(self) -> str:
        if self.names:
            return quoted(self.names)
        return f"a tensor of shape {self.shape}" if self.shape else "a number"

    def no_weight(self) -> ConfigError:
        """The error of a mean whose weights are all 0."""
        return ConfigError(f"mean_over_ranks() of {self}: the weights of all ranks add up to 0, so there is no mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """The exact global L2 norm of a step's averaged gradients, before clipping or of what a ``Clamp`` leaves."""

    step: int
    total: float
    finite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NormParts:
    """One owner's sums of squares of the rank-summed gradients (fp64), per shard and slot."""

    step: int
    parts: tuple[tuple[int, int, float], ...]  # (shard index, slot, sum of squares), in shard and slot order


class Action(StrEnum):
    """What a decision does."""

    APPLY = "apply"
    SKIP = "skip"  # publish the next version with unchanged content


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one step does, the same for all shards. Its record in the lead owner is the commit point."""

    step: int
    attempts: tuple[int, ...]  # per rank: the attempt whose contributions count
    action: Action
    scale: float  # multiplies the rank-summed gradient: 1 / world_size x clip factors / loss scale
    norm: float  # of the averaged and unscaled gradients, before clipping
    hyper: tuple[Hyper, ...]
    limit: float = math.inf  # every element of the scaled gradient is clamped to within +- this


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the lead records of a step: enough to act on it again where a process has died."""

    decision: Decision
    reports: tuple[FinishReport, ...]  # by rank: the pushes that the decision counts
    norm: Norm  # the last one that ranks asked for

    def counts(self, report: FinishReport) -> bool:
        """Whether ``report`` is of the attempt that was decided."""
        attempts = self.decision.attempts
        return report.rank < len(attempts) and report.attempt == attempts[report.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerShard:
    """What a former life of its owner has left of a shard."""

    published: int
    content: int
    applied: int  # the newest version of which every byte is there; -1: none was applied
    slices: tuple[tuple[int, int], ...]  # (count of updates, parameter group) of each; of a frozen shard empty


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint: written and fsynced, but not yet in a manifest."""

    name: str
    size_bytes: Whole
    sha256: Sha256
    content: dict[str, dict[str, Any]] = field(default_factory=dict)  # tensor name -> what it holds (manifest.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A complete checkpoint: its directory, the step count it holds, and the digest of its content."""

    path: str
    step: int
    digest: str


class SharedPlace(NamedTuple):
    """Where a shard of an owner lies."""

    shard: int
    file: int  # index in ``SharedPaths.tensors``
    offset: int  # bytes


@dataclass(frozen=True, slots=True)
class SharedPaths:
    """The slab files of a process, for processes that map them."""

    control: str
    tensors: tuple[str, ...]  # params of an owner, grads of a rank, in order
    places: tuple[SharedPlace, ...] = ()  # of an owner's params


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptHistory:
    """What a rank has asked the lead in one attempt at a step, and the norms that it has got."""

    reports: tuple[FinishReport, ...] = ()  # one for each norm that it has asked for
    norms: tuple[Norm, ...] = ()  # those that it has got
    inputs: StepInputs | None = None  # after its commit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHistory:
    """What a rank has asked the lead in one step, and been answered."""

    step: int
    discards: int = 0  # attempts that it has finished and discarded
    discarded: AttemptHistory = AttemptHistory()  # the last one of these
    attempt: AttemptHistory = AttemptHistory()  # the present one
    written: tuple[Write, ...] = ()  # writes to this version that are made


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenMean:
    """What a rank gave to a mean."""

    number: int  # the rank's counter of means
    given: MeanInput


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSave:
    """A checkpoint that a rank asked for, and what came of it: a complete one, or a failure."""

    number: int  # the rank's counter of saves
    step: int
    directory: str
    checkpoint: CheckpointInfo | None = None  # it is complete
    failure: RayZeroError | None = None  # it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunSave:
    """A checkpoint that a rank knows to be begun, while its training goes on."""

    number: int  # the rank's counter of saves
    step: int
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadHistory:
    """What a rank has asked a lead that has died, and been answered: the lead's successor goes on from there."""

    steps: tuple[StepHistory, ...] = ()  # those that may not be decided, ascending
    means: tuple[GivenMean, ...] = ()  # the last MEANS_KEPT that it asked for
    saved: EndedSave | None = None  # the last one that has ended
    begun: BegunSave | None = None  # the last one that was begun beside the training, and perhaps has ended


def require_life(rank: int, life: int, lives: Mapping[int, int]) -> None:
    """Raise StoreClosedError if ``rank`` has a later life than ``life``. ``lives``: the present ones of ranks that have
    died."""
    if lives.get(rank, 0) > life:
        raise life_is_over(rank, life, lives[rank])


def life_is_over(rank: int, life: int, present: int) -> StoreClosedError:
    """The error of what a rank asked in a ``life`` before its ``present`` one."""
    return StoreClosedError(f"rank {rank} was replaced: its life {life} is over, {present} is its present one")
