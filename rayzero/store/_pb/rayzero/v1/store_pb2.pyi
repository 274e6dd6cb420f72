from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EditKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EDIT_KIND_UNSPECIFIED: _ClassVar[EditKind]
    EDIT_KIND_UNSCALE: _ClassVar[EditKind]
    EDIT_KIND_CLIP_NORM: _ClassVar[EditKind]
    EDIT_KIND_CLIP_VALUE: _ClassVar[EditKind]

class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTION_UNSPECIFIED: _ClassVar[Action]
    ACTION_APPLY: _ClassVar[Action]
    ACTION_SKIP: _ClassVar[Action]

class WireFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIRE_FORMAT_UNSPECIFIED: _ClassVar[WireFormat]
    WIRE_FORMAT_BF16: _ClassVar[WireFormat]
    WIRE_FORMAT_INT8: _ClassVar[WireFormat]
EDIT_KIND_UNSPECIFIED: EditKind
EDIT_KIND_UNSCALE: EditKind
EDIT_KIND_CLIP_NORM: EditKind
EDIT_KIND_CLIP_VALUE: EditKind
ACTION_UNSPECIFIED: Action
ACTION_APPLY: Action
ACTION_SKIP: Action
WIRE_FORMAT_UNSPECIFIED: WireFormat
WIRE_FORMAT_BF16: WireFormat
WIRE_FORMAT_INT8: WireFormat

class Contribution(_message.Message):
    __slots__ = ("step", "attempt", "rank", "unit", "seq", "presence", "sum_of", "summands")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    SUM_OF_FIELD_NUMBER: _ClassVar[int]
    SUMMANDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: int
    rank: int
    unit: int
    seq: int
    presence: bytes
    sum_of: int
    summands: _containers.RepeatedCompositeFieldContainer[Summand]
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[int] = ..., rank: _Optional[int] = ..., unit: _Optional[int] = ..., seq: _Optional[int] = ..., presence: _Optional[bytes] = ..., sum_of: _Optional[int] = ..., summands: _Optional[_Iterable[_Union[Summand, _Mapping]]] = ...) -> None: ...

class Summand(_message.Message):
    __slots__ = ("rank", "attempt", "pushes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    attempt: int
    pushes: int
    def __init__(self, rank: _Optional[int] = ..., attempt: _Optional[int] = ..., pushes: _Optional[int] = ...) -> None: ...

class FinishReport(_message.Message):
    __slots__ = ("step", "attempt", "rank", "counts", "clamp")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    CLAMP_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: int
    rank: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    clamp: Clamp
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[int] = ..., rank: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ..., clamp: _Optional[_Union[Clamp, _Mapping]] = ...) -> None: ...

class Reports(_message.Message):
    __slots__ = ("alike", "runs")
    ALIKE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    alike: FinishReport
    runs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, alike: _Optional[_Union[FinishReport, _Mapping]] = ..., runs: _Optional[_Iterable[int]] = ...) -> None: ...

class Clamp(_message.Message):
    __slots__ = ("scale", "limit")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    scale: float
    limit: float
    def __init__(self, scale: _Optional[float] = ..., limit: _Optional[float] = ...) -> None: ...

class Edit(_message.Message):
    __slots__ = ("kind", "value")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    kind: EditKind
    value: float
    def __init__(self, kind: _Optional[_Union[EditKind, str]] = ..., value: _Optional[float] = ...) -> None: ...

class StepInputs(_message.Message):
    __slots__ = ("edits", "hyper")
    EDITS_FIELD_NUMBER: _ClassVar[int]
    HYPER_FIELD_NUMBER: _ClassVar[int]
    edits: _containers.RepeatedCompositeFieldContainer[Edit]
    hyper: bytes
    def __init__(self, edits: _Optional[_Iterable[_Union[Edit, _Mapping]]] = ..., hyper: _Optional[bytes] = ...) -> None: ...

class Norm(_message.Message):
    __slots__ = ("step", "total", "finite")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    step: int
    total: float
    finite: bool
    def __init__(self, step: _Optional[int] = ..., total: _Optional[float] = ..., finite: bool = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("step", "attempts", "action", "scale", "norm", "hyper", "limit")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    HYPER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempts: _containers.RepeatedScalarFieldContainer[int]
    action: Action
    scale: float
    norm: float
    hyper: bytes
    limit: float
    def __init__(self, step: _Optional[int] = ..., attempts: _Optional[_Iterable[int]] = ..., action: _Optional[_Union[Action, str]] = ..., scale: _Optional[float] = ..., norm: _Optional[float] = ..., hyper: _Optional[bytes] = ..., limit: _Optional[float] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("decision", "reports", "norm")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    reports: _containers.RepeatedCompositeFieldContainer[Reports]
    norm: Norm
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ..., reports: _Optional[_Iterable[_Union[Reports, _Mapping]]] = ..., norm: _Optional[_Union[Norm, _Mapping]] = ...) -> None: ...

class FileEntry(_message.Message):
    __slots__ = ("name", "size_bytes", "sha256", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    sha256: str
    content: bytes
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("error", "message")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("kernel", "pid", "started")
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    kernel: str
    pid: int
    started: int
    def __init__(self, kernel: _Optional[str] = ..., pid: _Optional[int] = ..., started: _Optional[int] = ...) -> None: ...

class GetHostRequest(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class GetHostResponse(_message.Message):
    __slots__ = ("host",)
    HOST_FIELD_NUMBER: _ClassVar[int]
    host: str
    def __init__(self, host: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("protocol_version", "rank", "spec", "layout_digest", "owner", "num_owners", "host", "process", "lease_s", "history", "lost_before", "spec_digest", "summed")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NUM_OWNERS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    LOST_BEFORE_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    rank: int
    spec: bytes
    layout_digest: str
    owner: int
    num_owners: int
    host: str
    process: Process
    lease_s: float
    history: LeadHistory
    lost_before: int
    spec_digest: str
    summed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol_version: _Optional[int] = ..., rank: _Optional[int] = ..., spec: _Optional[bytes] = ..., layout_digest: _Optional[str] = ..., owner: _Optional[int] = ..., num_owners: _Optional[int] = ..., host: _Optional[str] = ..., process: _Optional[_Union[Process, _Mapping]] = ..., lease_s: _Optional[float] = ..., history: _Optional[_Union[LeadHistory, _Mapping]] = ..., lost_before: _Optional[int] = ..., spec_digest: _Optional[str] = ..., summed: _Optional[_Iterable[int]] = ...) -> None: ...

class LeadHistory(_message.Message):
    __slots__ = ("steps", "means", "saved", "begun")
    class Attempt(_message.Message):
        __slots__ = ("reports", "norms", "inputs")
        REPORTS_FIELD_NUMBER: _ClassVar[int]
        NORMS_FIELD_NUMBER: _ClassVar[int]
        INPUTS_FIELD_NUMBER: _ClassVar[int]
        reports: _containers.RepeatedCompositeFieldContainer[FinishReport]
        norms: _containers.RepeatedCompositeFieldContainer[Norm]
        inputs: StepInputs
        def __init__(self, reports: _Optional[_Iterable[_Union[FinishReport, _Mapping]]] = ..., norms: _Optional[_Iterable[_Union[Norm, _Mapping]]] = ..., inputs: _Optional[_Union[StepInputs, _Mapping]] = ...) -> None: ...
    class Step(_message.Message):
        __slots__ = ("step", "discards", "discarded", "attempt", "written")
        STEP_FIELD_NUMBER: _ClassVar[int]
        DISCARDS_FIELD_NUMBER: _ClassVar[int]
        DISCARDED_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        WRITTEN_FIELD_NUMBER: _ClassVar[int]
        step: int
        discards: int
        discarded: LeadHistory.Attempt
        attempt: LeadHistory.Attempt
        written: _containers.RepeatedCompositeFieldContainer[Write]
        def __init__(self, step: _Optional[int] = ..., discards: _Optional[int] = ..., discarded: _Optional[_Union[LeadHistory.Attempt, _Mapping]] = ..., attempt: _Optional[_Union[LeadHistory.Attempt, _Mapping]] = ..., written: _Optional[_Iterable[_Union[Write, _Mapping]]] = ...) -> None: ...
    class Mean(_message.Message):
        __slots__ = ("number", "given")
        NUMBER_FIELD_NUMBER: _ClassVar[int]
        GIVEN_FIELD_NUMBER: _ClassVar[int]
        number: int
        given: MeanRequest
        def __init__(self, number: _Optional[int] = ..., given: _Optional[_Union[MeanRequest, _Mapping]] = ...) -> None: ...
    class Saved(_message.Message):
        __slots__ = ("number", "step", "directory", "checkpoint", "failure")
        NUMBER_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        DIRECTORY_FIELD_NUMBER: _ClassVar[int]
        CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
        FAILURE_FIELD_NUMBER: _ClassVar[int]
        number: int
        step: int
        directory: str
        checkpoint: SaveResponse.Checkpoint
        failure: Failure
        def __init__(self, number: _Optional[int] = ..., step: _Optional[int] = ..., directory: _Optional[str] = ..., checkpoint: _Optional[_Union[SaveResponse.Checkpoint, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...
    class Begun(_message.Message):
        __slots__ = ("number", "step", "directory")
        NUMBER_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        DIRECTORY_FIELD_NUMBER: _ClassVar[int]
        number: int
        step: int
        directory: str
        def __init__(self, number: _Optional[int] = ..., step: _Optional[int] = ..., directory: _Optional[str] = ...) -> None: ...
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[LeadHistory.Step]
    means: _containers.RepeatedCompositeFieldContainer[LeadHistory.Mean]
    saved: LeadHistory.Saved
    begun: LeadHistory.Begun
    def __init__(self, steps: _Optional[_Iterable[_Union[LeadHistory.Step, _Mapping]]] = ..., means: _Optional[_Iterable[_Union[LeadHistory.Mean, _Mapping]]] = ..., saved: _Optional[_Union[LeadHistory.Saved, _Mapping]] = ..., begun: _Optional[_Union[LeadHistory.Begun, _Mapping]] = ...) -> None: ...

class SharedFiles(_message.Message):
    __slots__ = ("control", "tensors", "places")
    class Place(_message.Message):
        __slots__ = ("shard", "file", "offset")
        SHARD_FIELD_NUMBER: _ClassVar[int]
        FILE_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        shard: int
        file: int
        offset: int
        def __init__(self, shard: _Optional[int] = ..., file: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    control: str
    tensors: _containers.RepeatedScalarFieldContainer[str]
    places: _containers.RepeatedCompositeFieldContainer[SharedFiles.Place]
    def __init__(self, control: _Optional[str] = ..., tensors: _Optional[_Iterable[str]] = ..., places: _Optional[_Iterable[_Union[SharedFiles.Place, _Mapping]]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("version", "needs_load", "kernel", "shared", "step", "needs_spec")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NEEDS_LOAD_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEEDS_SPEC_FIELD_NUMBER: _ClassVar[int]
    version: int
    needs_load: bool
    kernel: str
    shared: SharedFiles
    step: int
    needs_spec: bool
    def __init__(self, version: _Optional[int] = ..., needs_load: bool = ..., kernel: _Optional[str] = ..., shared: _Optional[_Union[SharedFiles, _Mapping]] = ..., step: _Optional[int] = ..., needs_spec: bool = ...) -> None: ...

class ShareRequest(_message.Message):
    __slots__ = ("rank", "files", "controls", "back_at", "away", "summed", "threads")
    class ControlsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CONTROLS_FIELD_NUMBER: _ClassVar[int]
    BACK_AT_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    files: SharedFiles
    controls: _containers.ScalarMap[int, str]
    back_at: int
    away: _containers.RepeatedScalarFieldContainer[int]
    summed: _containers.RepeatedScalarFieldContainer[int]
    threads: int
    def __init__(self, rank: _Optional[int] = ..., files: _Optional[_Union[SharedFiles, _Mapping]] = ..., controls: _Optional[_Mapping[int, str]] = ..., back_at: _Optional[int] = ..., away: _Optional[_Iterable[int]] = ..., summed: _Optional[_Iterable[int]] = ..., threads: _Optional[int] = ...) -> None: ...

class ShareResponse(_message.Message):
    __slots__ = ("mirror", "unmirrored")
    MIRROR_FIELD_NUMBER: _ClassVar[int]
    UNMIRRORED_FIELD_NUMBER: _ClassVar[int]
    mirror: SharedFiles
    unmirrored: Failure
    def __init__(self, mirror: _Optional[_Union[SharedFiles, _Mapping]] = ..., unmirrored: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class BringRequest(_message.Message):
    __slots__ = ("rank", "write")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    write: Write
    def __init__(self, rank: _Optional[int] = ..., write: _Optional[_Union[Write, _Mapping]] = ...) -> None: ...

class BringResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NoticesRequest(_message.Message):
    __slots__ = ("rank", "owner", "ranks")
    RANK_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    owner: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rank: _Optional[int] = ..., owner: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class NoticesResponse(_message.Message):
    __slots__ = ("published", "abort", "process", "followed")
    class Published(_message.Message):
        __slots__ = ("shard", "version", "content", "total")
        SHARD_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        CONTENT_FIELD_NUMBER: _ClassVar[int]
        TOTAL_FIELD_NUMBER: _ClassVar[int]
        shard: int
        version: int
        content: int
        total: int
        def __init__(self, shard: _Optional[int] = ..., version: _Optional[int] = ..., content: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    published: _containers.RepeatedCompositeFieldContainer[NoticesResponse.Published]
    abort: Failure
    process: Process
    followed: Followed
    def __init__(self, published: _Optional[_Iterable[_Union[NoticesResponse.Published, _Mapping]]] = ..., abort: _Optional[_Union[Failure, _Mapping]] = ..., process: _Optional[_Union[Process, _Mapping]] = ..., followed: _Optional[_Union[Followed, _Mapping]] = ...) -> None: ...

class Followed(_message.Message):
    __slots__ = ("layout", "lineage", "epoch", "shards", "instance")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    layout: bytes
    lineage: str
    epoch: int
    shards: _containers.RepeatedScalarFieldContainer[int]
    instance: int
    def __init__(self, layout: _Optional[bytes] = ..., lineage: _Optional[str] = ..., epoch: _Optional[int] = ..., shards: _Optional[_Iterable[int]] = ..., instance: _Optional[int] = ...) -> None: ...

class GetShardsRequest(_message.Message):
    __slots__ = ("instance", "wanted", "version")
    class Wanted(_message.Message):
        __slots__ = ("shard", "version", "checksum", "content", "writes")
        SHARD_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        CHECKSUM_FIELD_NUMBER: _ClassVar[int]
        CONTENT_FIELD_NUMBER: _ClassVar[int]
        WRITES_FIELD_NUMBER: _ClassVar[int]
        shard: int
        version: int
        checksum: int
        content: int
        writes: int
        def __init__(self, shard: _Optional[int] = ..., version: _Optional[int] = ..., checksum: _Optional[int] = ..., content: _Optional[int] = ..., writes: _Optional[int] = ...) -> None: ...
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    instance: int
    wanted: _containers.RepeatedCompositeFieldContainer[GetShardsRequest.Wanted]
    version: int
    def __init__(self, instance: _Optional[int] = ..., wanted: _Optional[_Iterable[_Union[GetShardsRequest.Wanted, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class GetShardsResponse(_message.Message):
    __slots__ = ("parts",)
    class Part(_message.Message):
        __slots__ = ("shard", "version", "content", "writes", "size_bytes", "positions", "checksum")
        SHARD_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        CONTENT_FIELD_NUMBER: _ClassVar[int]
        WRITES_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        POSITIONS_FIELD_NUMBER: _ClassVar[int]
        CHECKSUM_FIELD_NUMBER: _ClassVar[int]
        shard: int
        version: int
        content: int
        writes: int
        size_bytes: int
        positions: bool
        checksum: int
        def __init__(self, shard: _Optional[int] = ..., version: _Optional[int] = ..., content: _Optional[int] = ..., writes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., positions: bool = ..., checksum: _Optional[int] = ...) -> None: ...
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[GetShardsResponse.Part]
    def __init__(self, parts: _Optional[_Iterable[_Union[GetShardsResponse.Part, _Mapping]]] = ...) -> None: ...

class MuteRequest(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class MuteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("units",)
    class Unit(_message.Message):
        __slots__ = ("unit", "shards")
        UNIT_FIELD_NUMBER: _ClassVar[int]
        SHARDS_FIELD_NUMBER: _ClassVar[int]
        unit: int
        shards: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, unit: _Optional[int] = ..., shards: _Optional[_Iterable[int]] = ...) -> None: ...
    UNITS_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[LoadRequest.Unit]
    def __init__(self, units: _Optional[_Iterable[_Union[LoadRequest.Unit, _Mapping]]] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("rank", "owner", "shards", "version", "kind", "since")
    RANK_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    owner: int
    shards: _containers.RepeatedScalarFieldContainer[int]
    version: int
    kind: str
    since: int
    def __init__(self, rank: _Optional[int] = ..., owner: _Optional[int] = ..., shards: _Optional[_Iterable[int]] = ..., version: _Optional[int] = ..., kind: _Optional[str] = ..., since: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("units",)
    class Unit(_message.Message):
        __slots__ = ("contribution", "shards", "format")
        CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
        SHARDS_FIELD_NUMBER: _ClassVar[int]
        FORMAT_FIELD_NUMBER: _ClassVar[int]
        contribution: Contribution
        shards: _containers.RepeatedScalarFieldContainer[int]
        format: WireFormat
        def __init__(self, contribution: _Optional[_Union[Contribution, _Mapping]] = ..., shards: _Optional[_Iterable[int]] = ..., format: _Optional[_Union[WireFormat, str]] = ...) -> None: ...
    UNITS_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[PushRequest.Unit]
    def __init__(self, units: _Optional[_Iterable[_Union[PushRequest.Unit, _Mapping]]] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Write(_message.Message):
    __slots__ = ("version", "unit", "kind", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    unit: int
    kind: str
    digest: str
    def __init__(self, version: _Optional[int] = ..., unit: _Optional[int] = ..., kind: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("units",)
    class Unit(_message.Message):
        __slots__ = ("unit", "shards", "version", "kind")
        UNIT_FIELD_NUMBER: _ClassVar[int]
        SHARDS_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        unit: int
        shards: _containers.RepeatedScalarFieldContainer[int]
        version: int
        kind: str
        def __init__(self, unit: _Optional[int] = ..., shards: _Optional[_Iterable[int]] = ..., version: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...
    UNITS_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[StageRequest.Unit]
    def __init__(self, units: _Optional[_Iterable[_Union[StageRequest.Unit, _Mapping]]] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("rank", "write", "number", "made")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    write: Write
    number: int
    made: bool
    def __init__(self, rank: _Optional[int] = ..., write: _Optional[_Union[Write, _Mapping]] = ..., number: _Optional[int] = ..., made: bool = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OverwriteRequest(_message.Message):
    __slots__ = ("number", "write")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    number: int
    write: Write
    def __init__(self, number: _Optional[int] = ..., write: _Optional[_Union[Write, _Mapping]] = ...) -> None: ...

class OverwriteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoopState(_message.Message):
    __slots__ = ("step", "part", "content")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    step: int
    part: int
    content: bytes
    def __init__(self, step: _Optional[int] = ..., part: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("rank", "state")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    state: LoopState
    def __init__(self, rank: _Optional[int] = ..., state: _Optional[_Union[LoopState, _Mapping]] = ...) -> None: ...

class KeepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetKeptRequest(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class GetKeptResponse(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedCompositeFieldContainer[LoopState]
    def __init__(self, states: _Optional[_Iterable[_Union[LoopState, _Mapping]]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("shard", "step")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    shard: int
    step: bool
    def __init__(self, shard: _Optional[int] = ..., step: bool = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("report", "inputs")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    report: FinishReport
    inputs: StepInputs
    def __init__(self, report: _Optional[_Union[FinishReport, _Mapping]] = ..., inputs: _Optional[_Union[StepInputs, _Mapping]] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ("norm",)
    NORM_FIELD_NUMBER: _ClassVar[int]
    norm: Norm
    def __init__(self, norm: _Optional[_Union[Norm, _Mapping]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("rank", "step", "inputs")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    inputs: StepInputs
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ..., inputs: _Optional[_Union[StepInputs, _Mapping]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class GetDecisionRequest(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class GetDecisionResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class DiscardRequest(_message.Message):
    __slots__ = ("rank", "step", "attempt")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    attempt: int
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class DiscardResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("rank", "step", "directory", "files", "number", "begun")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    directory: str
    files: _containers.RepeatedCompositeFieldContainer[FileEntry]
    number: int
    begun: bool
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ..., directory: _Optional[str] = ..., files: _Optional[_Iterable[_Union[FileEntry, _Mapping]]] = ..., number: _Optional[int] = ..., begun: bool = ...) -> None: ...

class BeginSaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveResponse(_message.Message):
    __slots__ = ("checkpoint",)
    class Checkpoint(_message.Message):
        __slots__ = ("path", "step", "digest")
        PATH_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        path: str
        step: int
        digest: str
        def __init__(self, path: _Optional[str] = ..., step: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: SaveResponse.Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[SaveResponse.Checkpoint, _Mapping]] = ...) -> None: ...

class MeanRequest(_message.Message):
    __slots__ = ("rank", "number", "names", "shape", "values", "weight", "former")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    rank: int
    number: int
    names: _containers.RepeatedScalarFieldContainer[str]
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    weight: float
    former: bool
    def __init__(self, rank: _Optional[int] = ..., number: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., shape: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ..., weight: _Optional[float] = ..., former: bool = ...) -> None: ...

class MeanResponse(_message.Message):
    __slots__ = ("mean",)
    class Mean(_message.Message):
        __slots__ = ("values",)
        VALUES_FIELD_NUMBER: _ClassVar[int]
        values: _containers.RepeatedScalarFieldContainer[float]
        def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...
    MEAN_FIELD_NUMBER: _ClassVar[int]
    mean: MeanResponse.Mean
    def __init__(self, mean: _Optional[_Union[MeanResponse.Mean, _Mapping]] = ...) -> None: ...

class AskRequest(_message.Message):
    __slots__ = ("method", "questions")
    class Question(_message.Message):
        __slots__ = ("rank", "life", "request")
        RANK_FIELD_NUMBER: _ClassVar[int]
        LIFE_FIELD_NUMBER: _ClassVar[int]
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        rank: int
        life: int
        request: bytes
        def __init__(self, rank: _Optional[int] = ..., life: _Optional[int] = ..., request: _Optional[bytes] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    method: str
    questions: _containers.RepeatedCompositeFieldContainer[AskRequest.Question]
    def __init__(self, method: _Optional[str] = ..., questions: _Optional[_Iterable[_Union[AskRequest.Question, _Mapping]]] = ...) -> None: ...

class AskResponse(_message.Message):
    __slots__ = ("answers",)
    class Answer(_message.Message):
        __slots__ = ("questions", "response", "failure")
        QUESTIONS_FIELD_NUMBER: _ClassVar[int]
        RESPONSE_FIELD_NUMBER: _ClassVar[int]
        FAILURE_FIELD_NUMBER: _ClassVar[int]
        questions: _containers.RepeatedScalarFieldContainer[int]
        response: bytes
        failure: Failure
        def __init__(self, questions: _Optional[_Iterable[int]] = ..., response: _Optional[bytes] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[AskResponse.Answer]
    def __init__(self, answers: _Optional[_Iterable[_Union[AskResponse.Answer, _Mapping]]] = ...) -> None: ...

class OpenTensorStreamRequest(_message.Message):
    __slots__ = ("rank", "owner", "host")
    RANK_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    owner: int
    host: str
    def __init__(self, rank: _Optional[int] = ..., owner: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class OpenTensorStreamResponse(_message.Message):
    __slots__ = ("port", "ticket", "client_key", "owner_key")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CLIENT_KEY_FIELD_NUMBER: _ClassVar[int]
    OWNER_KEY_FIELD_NUMBER: _ClassVar[int]
    port: int
    ticket: bytes
    client_key: bytes
    owner_key: bytes
    def __init__(self, port: _Optional[int] = ..., ticket: _Optional[bytes] = ..., client_key: _Optional[bytes] = ..., owner_key: _Optional[bytes] = ...) -> None: ...

class TransferQuestion(_message.Message):
    __slots__ = ("method", "request", "timeout_s")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    method: str
    request: bytes
    timeout_s: float
    def __init__(self, method: _Optional[str] = ..., request: _Optional[bytes] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class TransferAnswer(_message.Message):
    __slots__ = ("response", "failure", "more")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    response: bytes
    failure: Failure
    more: bool
    def __init__(self, response: _Optional[bytes] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., more: bool = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("rank", "reason")
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rank: int
    reason: str
    def __init__(self, rank: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("step", "reports")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    reports: _containers.RepeatedCompositeFieldContainer[Reports]
    def __init__(self, step: _Optional[int] = ..., reports: _Optional[_Iterable[_Union[Reports, _Mapping]]] = ...) -> None: ...

class CollectResponse(_message.Message):
    __slots__ = ("shards", "slots", "sums")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    sums: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, shards: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ..., sums: _Optional[_Iterable[float]] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RedoRequest(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: Record
    def __init__(self, record: _Optional[_Union[Record, _Mapping]] = ...) -> None: ...

class RedoResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WriteShardsRequest(_message.Message):
    __slots__ = ("step", "directory", "number")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    step: int
    directory: str
    number: int
    def __init__(self, step: _Optional[int] = ..., directory: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class BeginShardsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WriteShardsResponse(_message.Message):
    __slots__ = ("file",)
    FILE_FIELD_NUMBER: _ClassVar[int]
    file: FileEntry
    def __init__(self, file: _Optional[_Union[FileEntry, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeEpochRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeEpochResponse(_message.Message):
    __slots__ = ("kernel", "began", "record")
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    kernel: str
    began: bytes
    record: bytes
    def __init__(self, kernel: _Optional[str] = ..., began: _Optional[bytes] = ..., record: _Optional[bytes] = ...) -> None: ...

class GiveShardsRequest(_message.Message):
    __slots__ = ("shards", "owner")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedScalarFieldContainer[int]
    owner: int
    def __init__(self, shards: _Optional[_Iterable[int]] = ..., owner: _Optional[int] = ...) -> None: ...

class GiveShardsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LineOpening(_message.Message):
    __slots__ = ("key", "service", "metadata", "process", "notices", "to", "peer", "met")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    service: str
    metadata: _containers.ScalarMap[str, str]
    process: Process
    notices: NoticesRequest
    to: str
    peer: str
    met: bool
    def __init__(self, key: _Optional[bytes] = ..., service: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., process: _Optional[_Union[Process, _Mapping]] = ..., notices: _Optional[_Union[NoticesRequest, _Mapping]] = ..., to: _Optional[str] = ..., peer: _Optional[str] = ..., met: bool = ...) -> None: ...

class LineQuestion(_message.Message):
    __slots__ = ("request", "timeout_s", "parcel", "spilled", "rest", "room")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PARCEL_FIELD_NUMBER: _ClassVar[int]
    SPILLED_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    timeout_s: float
    parcel: str
    spilled: str
    rest: int
    room: LineRoom
    def __init__(self, request: _Optional[bytes] = ..., timeout_s: _Optional[float] = ..., parcel: _Optional[str] = ..., spilled: _Optional[str] = ..., rest: _Optional[int] = ..., room: _Optional[_Union[LineRoom, _Mapping]] = ...) -> None: ...

class LineRoom(_message.Message):
    __slots__ = ("sizes", "records")
    SIZES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    records: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sizes: _Optional[_Iterable[int]] = ..., records: _Optional[_Iterable[int]] = ...) -> None: ...

class LineNotice(_message.Message):
    __slots__ = ("notice", "ended", "broken")
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    notice: NoticesResponse
    ended: Failure
    broken: str
    def __init__(self, notice: _Optional[_Union[NoticesResponse, _Mapping]] = ..., ended: _Optional[_Union[Failure, _Mapping]] = ..., broken: _Optional[str] = ...) -> None: ...

class LineAnswer(_message.Message):
    __slots__ = ("response", "rest_bytes", "rest", "failed")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    REST_BYTES_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    response: bytes
    rest_bytes: int
    rest: int
    failed: bool
    def __init__(self, response: _Optional[bytes] = ..., rest_bytes: _Optional[int] = ..., rest: _Optional[int] = ..., failed: bool = ...) -> None: ...
