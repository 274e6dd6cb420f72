"""A rank's part of a checkpoint: writes the rank's own file, and restores it at resume.

A rank's file holds what only the rank knows: the loop state, random number generators, and the model's buffers. The
owners write parameters and moments.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from rayzero.checkpoint.manifest import MANIFEST, rank_file_name
from rayzero.checkpoint.reader import CheckpointReader, delete_older
from rayzero.checkpoint.state_values import pack, unpack
from rayzero.checkpoint.writer import check_target, staging_path, unwritten, withdraw, write_rank_state
from rayzero.convert.remote_checkpoints import RemoteFolder, is_url, local_checkpoint, newest_checkpoint
from rayzero.engine.context import OpenCheckpoint, RankContext, get_context
from rayzero.engine.engine import Engine
from rayzero.engine.loop.comeback import (
    generator_states,
    names_of,
    set_generator_states,
    tied_names,
)
from rayzero.engine.optimizer.param_groups import ResumedGroups, saved_groups
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.start.buffers import check_buffers, fill_buffers, persistent_buffers
from rayzero.engine.start.initial_values import require_same_form
from rayzero.errors import (
    CheckpointAbandonedError,
    CheckpointError,
    CheckpointWriteError,
    ConfigError,
    UnsupportedError,
)
from rayzero.layout.model_layout import ParamSlot
from rayzero.protocol.messages import COMPUTE, MASTER, CheckpointInfo, FileEntry

log = logging.getLogger(__name__)

_saved_by: dict[Path, ReferenceType[Engine]] = {}  # checkpoint -> the engine of this process that saved it
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_PART = 1 << 20  # elements that are compared at once
_FURTHER = "model-"  # + its number: the folder for the checkpoint of a later prepared model


def save_checkpoint(
    optimizer: ZeroOptimizer,
    directory: Path | str,
    loop_state: Mapping[str, Any] = _NOTHING,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    upload_to: str | None = None,
) -> CheckpointInfo | None:
    """Write the present version, the optimizer state and every rank's loop state as the checkpoint ``directory``.

    Every rank calls it between two steps, with the same ``directory``. It saves the objects that ``rayzero.track`` was
    given, parameter groups, buffers and the generators of Python, numpy and torch. ``loop_state`` is what else the
    rank's loop wants to keep: numbers, text, tensors, and lists, tuples or dicts of these (averaged weights, ...);
    after the ``prepare()`` of a run that resumes, ``get_context().loop_state`` has it. Returns when the checkpoint is
    complete; until then ``directory`` does not exist. Save a run's first prepared model before the others, all with the
    same ``directory``, in which each of the others gets a folder.

    keep_last: once the checkpoint is complete, delete the oldest of those beside it whose names differ from its own
    in nothing but the number (``step-000100``, ``step-000200``), until this many are left; None: delete none.
    keep_every: with ``keep_last``, never delete a checkpoint of a step that this number divides.
    upload_to: the URL of a folder, such as ``"s3://bucket/run"``, into which rank 0 copies the complete checkpoint
    beside the training, under its own name; its manifest comes last. A copy that fails is a warning. If a newer
    checkpoint is complete before the copy has begun, the older one is left out.

    Raises UnsupportedError for an optimizer that prepare() did not return and for parameters that the model was
    given since, ConfigError if ``loop_state`` is no mapping, and CheckpointError if ``directory`` exists and is not
    a checkpoint, if it cannot be written, or if ``loop_state`` or a tracked object's state holds other values. A
    failed save leaves no files, and may be tried again once every rank has its error. If the storage fails
    (CheckpointWriteError) and the run has ``on_checkpoint_error="warn"``, every rank gets None and a warning, and
    training goes on."""
    _check_arguments("save_checkpoint", optimizer, loop_state, keep_last, keep_every)
    _check_urls("save_checkpoint", directory, upload_to)
    begun = _begin(optimizer, Path(directory), loop_state, sync=True)
    if begun is None:
        return None
    context = get_context()
    try:
        saved = begun.engine.save(begun.directory, (begun.entry,))
    except BaseException as error:
        _give_up(context, begun, error)
        return None
    return _after_save(context, begun, keep_last, keep_every, upload_to, saved)


def begin_checkpoint(
    optimizer: ZeroOptimizer,
    directory: Path | str,
    loop_state: Mapping[str, Any] = _NOTHING,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    upload_to: str | None = None,
) -> OpenCheckpoint:
    """Begin what ``save_checkpoint`` does, and write it while training goes on. Takes the same arguments.

    Every rank calls it between two steps. It returns once every rank has, and this rank's own part is written: the
    checkpoint is this step's, bit for bit, whatever the loop does from here on. ``result()`` of what it returns waits
    until the checkpoint is complete; until then ``directory`` does not exist. Do that for the last one of a loop.

    One checkpoint is written at a time: the next ``begin_checkpoint`` or ``save_checkpoint`` waits for the one before,
    and raises its error if nobody has asked for its result. Before an owner updates a shard that is not
    written yet, it copies it. Its copies take at most ``ZeroConfig.checkpoint_copies`` bytes; then updates wait.

    If the process of an owner dies meanwhile, the checkpoint is abandoned, unless nothing has been decided since: a
    warning names it, ``result()`` is None, and no bit of the training changes. If optimizers join or leave the run,
    that waits for the checkpoint.

    Raises what ``save_checkpoint`` raises about its arguments; ``result()`` raises the rest."""
    _check_arguments("begin_checkpoint", optimizer, loop_state, keep_last, keep_every)
    _check_urls("begin_checkpoint", directory, upload_to)
    context = get_context()
    begun = _begin(optimizer, Path(directory), loop_state, sync=False)
    if begun is None:
        return OpenCheckpoint.skipped(Path(directory))

    def end(saved: Future[CheckpointInfo]) -> CheckpointInfo | None:
        error = saved.exception()
        if error is None:
            return _after_save(context, begun, keep_last, keep_every, upload_to, saved.result())
        if isinstance(error, CheckpointAbandonedError):
            begun.withdraw()
            if begun.engine.rank == 0:
                log.warning("CHECKPOINT ABANDONED: %s: %s. Training goes on", begun.directory, error)
            return None
        _give_up(context, begun, error)
        return None

    try:
        saved = begun.engine.begin_save(begun.directory, (begun.entry,))
    except BaseException:
        begun.withdraw()
        raise
    checkpoint = OpenCheckpoint(begun.directory, saved, end)
    context.open_checkpoint(checkpoint)
    return checkpoint


@dataclass(frozen=True, eq=False)
class _Begun:
    """A save whose rank has staged its own file."""

    engine: Engine
    directory: Path  # of the model
    entry: FileEntry

    def withdraw(self) -> None:
        """Remove the rank's file: it will be part of no checkpoint."""
        withdraw(staging_path(self.directory) / self.entry.name)


def _begin(optimizer: ZeroOptimizer, directory: Path, loop_state: Mapping[str, Any], *, sync: bool) -> _Begun | None:
    """Wait for the checkpoint before, and stage this rank's file; None: this model's is not saved."""
    engine, context = optimizer.engine, get_context()
    engine.registered.refuse_added()
    if context.saving is not None:
        context.saving.finish()
    directory = of_model(directory, engine.number)
    if engine.number and directory.parent == context.unsaved:
        log.warning("prepared model %d is not saved, because the first one was not", engine.number)
        return None
    if engine.version < context.decided:  # a rank that has come back repeats a step: it was saved then, or not
        return None
    _require_first(directory, engine.number)
    _refuse_others(directory, engine, context)
    tracked = context.tracked.checkpoint_states() if context.tracked is not None and not engine.number else {}
    return _Begun(engine, directory, _write_rank_file(optimizer, directory, loop_state, tracked, sync=sync))


def _give_up(context: RankContext, begun: _Begun, error: BaseException) -> None:
    """A save has failed: raise its error, or warn, as the run wants it."""
    begun.withdraw()  # other ranks' files may be from their next try
    if not isinstance(error, CheckpointWriteError) or context.on_checkpoint_error == "raise":
        raise error
    context.unsaved = begun.directory
    if begun.engine.rank == 0:
        log.warning("CHECKPOINT NOT SAVED: %s. Training goes on without it; make room, or end the run", error)


def _after_save(
    context: RankContext,
    begun: _Begun,
    keep_last: int | None,
    keep_every: int | None,
    upload_to: str | None,
    saved: CheckpointInfo,
) -> CheckpointInfo:
    """What follows once a model's checkpoint is complete; on rank 0, if it is the last model's, for all of them."""
    engine = begun.engine
    if not engine.number:
        context.unsaved = None
    _saved_by[begun.directory.absolute()] = ref(engine)
    complete = context.unsaved is None and (context.connect is None or engine.number == context.prepared - 1)
    if engine.rank == 0 and complete:
        directory = begun.directory.parent if engine.number else begun.directory
        if upload_to is not None:
            context.upload(directory, upload_to)
        if keep_last is not None:
            delete_older(directory, keep_last, keep_every, context.uploads.busy if context.uploads is not None else ())
    return saved


def _check_urls(called: str, directory: object, upload_to: object) -> None:
    if is_url(directory):
        raise ConfigError(
            f"{called} writes to a folder, not to {directory!r}; name a folder, and pass upload_to={directory!r}"
        )
    if upload_to is None:
        return
    if not isinstance(upload_to, str) or not is_url(upload_to):
        raise ConfigError(f"upload_to of {called} is {upload_to!r}; pass a URL such as s3://bucket/run, or None")
    RemoteFolder(upload_to)  # raises if a package is missing


def _write_rank_file(
    optimizer: ZeroOptimizer,
    directory: Path,
    loop_state: Mapping[str, Any],
    tracked: Mapping[str, Any],
    *,
    sync: bool,
) -> FileEntry:
    """Stage this rank's file. If the storage fails, the entry holds the reason: the other ranks wait for this one, so
    it still takes part in the save, and every rank gets the reason."""
    engine = optimizer.engine
    state, tensors = pack(
        {
            "loop_state": dict(loop_state),
            "tracked": dict(tracked),
            "rng": generator_states(engine.device),
            "groups": saved_groups(optimizer.param_groups, names_of(engine.model)),
        }
    )
    try:
        check_target(directory)
        return write_rank_state(
            staging_path(directory),
            engine.rank,
            state,
            tensors,
            buffers=persistent_buffers(engine.model),
            tied=tied_names(engine.model),
            sync=sync,
        )
    except CheckpointWriteError as error:
        return unwritten(engine.rank, f"rank {engine.rank}: {error}")


def _check_arguments(called: str, optimizer: object, loop_state: object, keep_last: object, keep_every: object) -> None:
    """``called``: the function that the user called."""
    if not isinstance(optimizer, ZeroOptimizer):
        raise UnsupportedError(
            f"{called} takes the optimizer that rayzero.prepare() returned, got {_type_name(optimizer)}"
        )
    for name, value, unit in (("keep_last", keep_last, "checkpoints"), ("keep_every", keep_every, "steps")):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} of {called} is {value!r}; pass a number of {unit} >= 1, or None")
    if keep_every is not None and keep_last is None:
        raise ConfigError(
            f"keep_every of {called} is {keep_every!r}, but without keep_last nothing is deleted; pass both"
        )
    if not isinstance(loop_state, Mapping):
        raise ConfigError(f"loop_state of {called} is {_type_name(loop_state)}; pass a dict, {{}} for none")


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def of_model(directory: Path, number: int) -> Path:
    """The folder of prepared model ``number`` in the checkpoint ``directory``."""
    return directory / f"{_FURTHER}{number}" if number else directory


def _require_first(directory: Path, number: int) -> None:
    """Raise CheckpointError unless the first model's checkpoint exists: later models' lie inside it."""
    if number and not (directory.parent / MANIFEST).is_file():
        raise CheckpointError(
            f"cannot save the run's prepared model {number} to {directory.parent}, which is not a checkpoint yet; "
            f"save the model that was prepared first there before the others"
        )


def chosen_resume(context: RankContext, resume: object) -> Path | None:
    """The checkpoint that ``prepare(resume=...)`` continues from; None: a fresh start.

    Raises ConfigError for anything but a path, True, False or None, and if the run resumes from another checkpoint."""
    told = context.resume
    if isinstance(told, str):  # the user's loop may have set it
        told = local_checkpoint(told)
    if resume is True and told is None:
        if context.run_dir is None:
            raise ConfigError(
                "rayzero.prepare: resume=True means the newest checkpoint of the run, but this run has no directory; "
                "pass resume=rayzero.newest_checkpoint(folder)"
            )
        return newest_checkpoint(Path(context.run_dir) / "checkpoints")
    if resume is None or isinstance(resume, bool):
        return told
    if not isinstance(resume, str | os.PathLike):
        raise ConfigError(
            f"rayzero.prepare: resume must be a checkpoint's path, True or None, got {_type_name(resume)}"
        )
    if not os.fspath(resume):
        raise ConfigError("rayzero.prepare: resume is an empty string; pass a checkpoint's path, True or None")
    given = local_checkpoint(os.fspath(resume))
    if context.life and told is not None:
        return told  # the run has saved since it began, and the loop may name what is newest now
    if told is not None and told.absolute() != given.absolute():
        if context.life:  # the loop passes the newest one, but its run goes on from what it began with
            return told
        raise ConfigError(
            f"rayzero.prepare: resume={str(given)!r}, but the run resumes from {told}; leave one of them out"
        )
    return given


def _refuse_others(directory: Path, engine: Engine, context: RankContext) -> None:
    """Raise CheckpointError if another model of this process wrote ``directory``. Without a run, models do not know of
    each other, and the second's checkpoint would replace the first's.

    A model that has not stepped since this one was prepared does not count: a notebook cell ran again."""
    saved = _saved_by.get(directory.absolute())
    other = None if saved is None else saved()
    if context.connect is None and other is not None and other is not engine and other.stepped_at > engine.made_at:
        raise CheckpointError(
            f"{directory} is the checkpoint of another model that this process trains; save each model under a name "
            f"of its own"
        )


def restore_rank(
    context: RankContext, resume: Path | None, model: nn.Module, device: torch.device
) -> dict[str, Any] | None:
    """Restore this rank's file: buffers, random number generators and ``context.loop_state``. Returns the states of
    tracked objects, by name; None: a fresh start.

    A rank without a file in the checkpoint (fewer ranks wrote it) takes rank 0's loop state, tracked states and
    buffers, and keeps its generators."""
    if resume is None:
        return None
    with CheckpointReader(resume) as reader:
        known = context.rank < reader.world_size
        rank = context.rank if known else 0
        with _damage_named(reader, rank):
            state = unpack(*reader.rank_state(rank))
            fill_buffers(model, reader.buffers(rank))
            context.loop_state = dict(state["loop_state"])
            if known and state["rng"] is not None:  # rayzero convert has none
                set_generator_states(state["rng"], device)
            return dict(state.get("tracked", {}))  # checkpoints of older versions have none


@contextmanager
def _damage_named(reader: CheckpointReader, rank: int) -> Iterator[None]:
    """Turn an error inside the block into a CheckpointError that names the rank's file: its values may be of any
    type."""
    path = reader.directory / rank_file_name(rank)
    try:
        yield
    except CheckpointError as exc:
        raise CheckpointError(str(exc) if str(path) in str(exc) else f"{path}: {exc}") from exc
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as exc:
        raise CheckpointError(f"{path} does not hold what a rank saves ({exc!r}); use another checkpoint") from exc


def resumed_groups(rank: int, resume: Path | None, model: nn.Module) -> ResumedGroups | None:
    """This rank's parameter groups from the checkpoint to resume from; None: a fresh start.

    A rank without a file in the checkpoint takes rank 0's."""
    if resume is None:
        return None
    with CheckpointReader(resume) as reader:
        known = rank if rank < reader.world_size else 0
        with _damage_named(reader, known):
            groups = unpack(*reader.rank_state(known))["groups"]
            saved = [{"params": list(group["params"]), "options": dict(group["options"])} for group in groups]
            return ResumedGroups(saved, names_of(model), str(resume))


def still_there(context: RankContext, resume: Path | None) -> Path | None:
    """``resume``, unless this rank has come back and the checkpoint was deleted meanwhile: its values are with the
    owners, and the rest is kept with the loop's state."""
    return None if context.life and resume is not None and not (resume / MANIFEST).is_file() else resume


def check_resume(resume: Path | None, model: nn.Module) -> None:
    """Raise CheckpointError if the checkpoint to resume from is missing, damaged or of another model.

    Owners check the parameters that they own; this finds those that only the checkpoint has."""
    if resume is None:
        return
    require_model(resume)
    known, tied = dict(model.named_parameters()), tied_names(model)
    with CheckpointReader(resume) as reader:
        for unit in reader.layout.units:
            for slot in unit.slots:
                if slot.name in tied:
                    _check_tied(reader, slot, tied[slot.name])
                elif slot.name not in known:
                    raise CheckpointError(
                        f"{reader.directory} has a parameter {slot.name!r} of shape {slot.shape}, but the model has "
                        f"none of that name; it is a checkpoint of another model"
                    )
                else:
                    require_same_form(reader, unit, slot, known[slot.name])
        check_buffers(resume, model, reader.buffers())


def _check_tied(reader: CheckpointReader, slot: ParamSlot, name: str) -> None:
    """Raise CheckpointError unless ``slot`` has the values of the parameter ``name``, which is the same in the model. A
    checkpoint that was converted from a format without ties has both."""
    for start in range(0, slot.numel, _PART):
        stop = min(start + _PART, slot.numel)
        ours, theirs = (reader.read_slice(each, widest_kind(reader, each), start, stop) for each in (slot.name, name))
        if not torch.equal(ours, theirs):
            raise CheckpointError(
                f"{reader.directory} has different values for {slot.name!r} and {name!r}, which are one tied parameter "
                "of the model; it is a checkpoint of another model"
            )


def widest_kind(reader: CheckpointReader, name: str) -> str:
    """The kind of a parameter's widest values in a checkpoint. Whether what is frozen has a master may have changed
    since."""
    return MASTER if MASTER in reader.kinds(name) else COMPUTE


def require_model(resume: Path) -> None:
    """Raise CheckpointError if a later model is missing: the first model's checkpoint is complete before the others are
    saved."""
    whole = resume.parent
    if not resume.is_dir() and resume.name.startswith(_FURTHER) and (whole / MANIFEST).is_file():
        raise CheckpointError(
            f"the checkpoint {whole} holds no prepared model {resume.name.removeprefix(_FURTHER)}: its run "
            "had fewer models or ended between two saves; resume from an earlier checkpoint (RunConfig(resume=DIR))"
        )
