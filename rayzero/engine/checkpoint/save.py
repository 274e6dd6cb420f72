"""Checkpoints from a rank's side: its own file, and what of it comes back at resume.

A rank's file holds what only the rank knows: its loop's own state, random number generators, and the model's
buffers. Parameters and moments are written by the owners.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import numpy
import torch
from torch import Tensor, nn

from rayzero.checkpoint.catalog import newest_checkpoint
from rayzero.checkpoint.manifest import MANIFEST, rank_file_name
from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.retention import delete_older
from rayzero.checkpoint.state_values import pack, unpack
from rayzero.checkpoint.writer import check_target, staging_path, unwritten, withdraw, write_rank_state
from rayzero.engine.checkpoint.param_groups import ResumedGroups, saved_groups
from rayzero.engine.context import RankContext, get_context
from rayzero.engine.engine import Engine
from rayzero.engine.optimizer import ZeroOptimizer
from rayzero.engine.start.meta import fill_buffers
from rayzero.errors import CheckpointError, CheckpointWriteError, ConfigError, UnsupportedError
from rayzero.protocol.messages import CheckpointInfo, FileEntry

log = logging.getLogger(__name__)

_saved_by: dict[Path, ReferenceType[Engine]] = {}  # whose model a checkpoint of this process is
_FURTHER = "model-"  # and its number: the folder of a further prepared model's checkpoint


def save_checkpoint(
    optimizer: ZeroOptimizer, directory: Path | str, loop_state: Mapping[str, Any], *, keep_last: int | None = None
) -> CheckpointInfo | None:
    """Write the present version, optimizer state and every rank's loop state as the checkpoint ``directory``.

    Every rank calls it between two steps, with the same ``directory``; ``loop_state`` is each rank's own: numbers,
    text, tensors, and lists, tuples or dicts of these (a scheduler's ``state_dict()``, averaged weights, ...), which
    ``get_context().loop_state`` is after the ``prepare()`` of a run that resumes. Parameter groups and the generators
    of Python, numpy and torch are saved with it. Returns when the checkpoint is complete: nothing exists under
    ``directory`` before that. The further models of a run are saved after its first, with the same ``directory``, in
    which each has a folder of its own.

    keep_last: once the checkpoint is complete, delete the oldest of those beside it whose names differ from its own
    in nothing but the number (``step-000100``, ``step-000200``), until this many are left; None: delete none.

    Raises UnsupportedError for another optimizer than prepare()'s, ConfigError for a ``loop_state`` that is no
    mapping, and CheckpointError where something that is not a checkpoint is at ``directory``, where it cannot be
    written, or where ``loop_state`` holds other values. A save that failed leaves no files, and may be tried again once
    every rank has its error. Where the storage does not take it (CheckpointWriteError) and the run has
    ``on_checkpoint_error="warn"``, every rank gets None instead, with a warning, and goes on."""
    _check_arguments(optimizer, loop_state, keep_last)
    engine = optimizer.engine
    context = get_context()
    directory = of_model(Path(directory), engine.number)
    if engine.number and directory.parent == context.unsaved:
        log.warning("the prepared model %d is not saved, for the first one was not", engine.number)
        return None
    _require_first(directory, engine.number)
    _refuse_others(directory, engine, context)
    entry = _write_rank_file(optimizer, directory, loop_state)
    try:
        saved = engine.save(directory, (entry,))
    except BaseException as error:
        withdraw(staging_path(directory) / entry.name)  # the others' files may be of their next try
        if not isinstance(error, CheckpointWriteError) or context.on_checkpoint_error == "raise":
            raise
        context.unsaved = directory
        if engine.rank == 0:
            log.warning("CHECKPOINT NOT SAVED: %s. Training goes on without it; make room, or end the run", error)
        return None
    if not engine.number:
        context.unsaved = None
    _saved_by[directory.absolute()] = ref(engine)
    complete = context.unsaved is None and (context.connect is None or engine.number == context.prepared - 1)
    if keep_last is not None and engine.rank == 0 and complete:
        delete_older(directory.parent if engine.number else directory, keep_last)  # all models' are complete
    return saved


def _write_rank_file(optimizer: ZeroOptimizer, directory: Path, loop_state: Mapping[str, Any]) -> FileEntry:
    """Stage this rank's file. Where the storage does not take it, the entry says why: the others wait for this rank, so
    it takes part in the save, and all of them hear of it."""
    engine = optimizer.engine
    state, tensors = pack(
        {
            "loop_state": dict(loop_state),
            "rng": _rng_state(engine.device),
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
            buffers=_buffers(engine.model),
            tied=_tied(engine.model),
        )
    except CheckpointWriteError as error:
        return unwritten(engine.rank, f"rank {engine.rank}: {error}")


def _check_arguments(optimizer: object, loop_state: object, keep_last: object) -> None:
    if not isinstance(optimizer, ZeroOptimizer):
        raise UnsupportedError(
            f"save_checkpoint takes the optimizer that rayzero.prepare() returned, got {_type_name(optimizer)}"
        )
    if keep_last is not None and (not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last < 1):
        raise ConfigError(f"keep_last of save_checkpoint is {keep_last!r}; pass a number of checkpoints >= 1, or None")
    if not isinstance(loop_state, Mapping):
        raise ConfigError(f"loop_state of save_checkpoint is {_type_name(loop_state)}; pass a dict, {{}} for none")


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def of_model(directory: Path, number: int) -> Path:
    """Where the checkpoint ``directory`` of a run has its prepared model ``number``."""
    return directory / f"{_FURTHER}{number}" if number else directory


def _require_first(directory: Path, number: int) -> None:
    """A further model's checkpoint lies in the first one's, which replaces what was there."""
    if number and not (directory.parent / MANIFEST).is_file():
        raise CheckpointError(
            f"cannot save the run's prepared model {number} to {directory.parent}, which is no checkpoint: "
            "save the model that was prepared first there before"
        )


def chosen_resume(context: RankContext, resume: object) -> Path | None:
    """The checkpoint that ``prepare(resume=...)`` continues from; None: a fresh start.

    Raises ConfigError for what is neither path, True, False nor None, and where the run resumes from another one."""
    told = context.resume
    if isinstance(told, str):  # the user's loop may have set it
        told = Path(told)
    if resume is True and told is None:
        if context.run_dir is None:
            raise ConfigError(
                "rayzero.prepare: resume=True means the newest checkpoint of the run, and this run has no directory; "
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
        raise ConfigError("rayzero.prepare: resume is an empty text; pass a checkpoint's path, True or None")
    given = Path(resume)
    if told is not None and told.absolute() != given.absolute():
        raise ConfigError(
            f"rayzero.prepare: resume={str(given)!r}, but the run resumes from {told}; leave one of them out"
        )
    return given


def _refuse_others(directory: Path, engine: Engine, context: RankContext) -> None:
    """Alone, models know nothing of each other, and the second's checkpoint would replace the first's.

    A model that has not stepped since this one was prepared is one that the loop has left: a cell that runs again."""
    saved = _saved_by.get(directory.absolute())
    other = None if saved is None else saved()
    if context.connect is None and other is not None and other is not engine and other.stepped_at > engine.made_at:
        raise CheckpointError(
            f"{directory} is the checkpoint of another model that this process trains; save each model's under a name "
            "of its own"
        )


def restore_rank(context: RankContext, resume: Path | None, model: nn.Module, device: torch.device) -> None:
    """Bring back what this rank's file holds: buffers, random number generators, ``context.loop_state``.

    A rank that the checkpoint has no file of (it was written by fewer ranks) takes rank 0's loop state and buffers,
    and keeps its generators."""
    if resume is None:
        return
    with CheckpointReader(resume) as reader:
        known = context.rank < reader.world_size
        rank = context.rank if known else 0
        with _damage_named(reader, rank):
            state = unpack(*reader.rank_state(rank))
            fill_buffers(model, reader.buffers(rank))
            context.loop_state = dict(state["loop_state"])
            if known:
                _set_rng_state(state["rng"], device)


@contextmanager
def _damage_named(reader: CheckpointReader, rank: int) -> Iterator[None]:
    """Values of any type may be in the file: what goes wrong with them is a CheckpointError that names it."""
    path = reader.directory / rank_file_name(rank)
    try:
        yield
    except CheckpointError as exc:
        raise CheckpointError(str(exc) if str(path) in str(exc) else f"{path}: {exc}") from exc
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as exc:
        raise CheckpointError(f"{path} does not hold what a rank saves ({exc!r}); use another checkpoint") from exc


def resumed_groups(rank: int, resume: Path | None, model: nn.Module) -> ResumedGroups | None:
    """The parameter groups of the checkpoint to resume from, as this rank had them; None: a fresh start.

    A rank that the checkpoint has no file of takes rank 0's."""
    if resume is None:
        return None
    with CheckpointReader(resume) as reader:
        known = rank if rank < reader.world_size else 0
        with _damage_named(reader, known):
            groups = unpack(*reader.rank_state(known))["groups"]
            saved = [{"params": list(group["params"]), "options": dict(group["options"])} for group in groups]
            return ResumedGroups(saved, names_of(model), str(resume))


def names_of(model: nn.Module) -> dict[int, str]:
    """id of each Parameter -> its name, the first one where it has several."""
    return {id(param): name for name, param in model.named_parameters()}


def check_resume(resume: Path | None, model: nn.Module) -> None:
    """Raise CheckpointError where the checkpoint to resume from is missing, damaged or of another model.

    Owners compare what they own; what only the checkpoint has, no owner sees."""
    if resume is None:
        return
    _require_model(resume)
    known = {name for name, _ in model.named_parameters()}
    with CheckpointReader(resume) as reader:
        for unit in reader.layout.units:
            for slot in unit.slots:
                if slot.name not in known:
                    raise CheckpointError(
                        f"{reader.directory} has a parameter {slot.name!r} of shape {slot.shape}, but the model has "
                        "none of that name: it is a checkpoint of another model"
                    )


def _require_model(resume: Path) -> None:
    """The first model's checkpoint is whole without the others', whose saves come after it."""
    whole = resume.parent
    if not resume.is_dir() and resume.name.startswith(_FURTHER) and (whole / MANIFEST).is_file():
        raise CheckpointError(
            f"the checkpoint {whole} holds no prepared model {resume.name.removeprefix(_FURTHER)}: its run "
            "had fewer models or ended between two saves; resume from an earlier checkpoint (RunConfig(resume=DIR))"
        )


# ---- buffers and names ------------------------------------------------------------------------------------------


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers, under each of their state_dict names."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer.detach().cpu()
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    }


def _tied(model: nn.Module) -> dict[str, str]:
    """Other names of parameters -> the name the layout has."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if name != first[id(p)]}


# ---- random number generators -----------------------------------------------------------------------------------


def _rng_state(device: torch.device) -> dict[str, Any]:
    """The states of the rank's generators."""
    kind, keys, *rest = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (kind, torch.from_numpy(numpy.asarray(keys).view(numpy.uint8).copy()), *rest),
        "python": random.getstate(),
    }


def _set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().view(numpy.uint32), *rest))
    random.setstate(state["python"])
