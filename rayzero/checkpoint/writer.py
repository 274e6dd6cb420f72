"""Writes a checkpoint: files into a staging directory, then the manifest, then one rename.

Owners and ranks write their own files, in any order and from any process that sees the directory. The process that
commits only needs their ``FileEntry``. A crash before the rename leaves the old checkpoints as they were.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from rayzero.checkpoint.manifest import MANIFEST, Manifest, rank_file_name
from rayzero.checkpoint.tensor_file import TensorFileWriter, Writable, declare
from rayzero.errors import CheckpointError, CheckpointWriteError
from rayzero.files import fsync
from rayzero.layout.model_layout import dtype_name
from rayzero.protocol.messages import CheckpointInfo, FileEntry, Hyper, ModelSpec

STATE = "state/"  # prefixes of tensor names in a rank's file
BUFFER = "buffer/"

_UNWRITTEN = "unwritten"  # key of the reason, in an entry whose file could not be written

_STALE = re.compile(r"\.(.+)\.(tmp|taken|replaced)", re.DOTALL)
_PART = ".part"  # of the name of a file that is being written
_OF_A_SAVE = re.compile(r"(owner|rank)-\d+\.safetensors(\.part)?|model-\d+|" + re.escape(MANIFEST))

log = logging.getLogger(__name__)

_TRIES = 100  # attempts at putting a file into a folder that other processes remove whenever it is empty


def checkpoint_name(step: int) -> str:
    """The directory name of the checkpoint of ``step``."""
    return f"step-{step:06d}"


def staging_path(directory: Path) -> Path:
    """The folder that the checkpoint ``directory`` is staged in: beside it, so that a rename can be atomic."""
    return directory.with_name(f".{directory.name}.tmp")


def taken_path(directory: Path) -> Path:
    """The name of a checkpoint's folder while one process alone completes or deletes it."""
    return directory.with_name(f".{directory.name}.taken")


def _replaced_path(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.replaced")


def check_target(directory: Path) -> None:
    """Raise CheckpointError if no checkpoint can be put at ``directory``. Writes nothing.

    Only a complete checkpoint may be there already, which saving replaces: anything else belongs to somebody else.
    Raises CheckpointWriteError if the file system refuses."""
    try:
        nameable = b"\0" not in os.fsencode(directory)
    except UnicodeEncodeError:
        nameable = False
    if not nameable:
        raise CheckpointError(
            f"cannot save to {str(directory)!r}: no file can have this name; name a new directory without null "
            "characters and unpaired surrogates"
        )
    try:
        if directory.is_symlink() or not directory.name:
            raise CheckpointError(f"cannot save to {directory}: it is a link or has no name; name a new directory")
        if _STALE.fullmatch(directory.name):
            raise CheckpointError(
                f"cannot save to {directory}: names of this form are kept for the staging folders of checkpoints; name "
                "a new directory"
            )
        if directory.exists() and not (directory / MANIFEST).is_file():
            what = "a folder" if directory.is_dir() else "a file"
            raise CheckpointError(
                f"cannot save to {directory}: it is {what} that is not a checkpoint (no {MANIFEST}); name a new "
                "directory"
            )
        parent = next(path for path in directory.absolute().parents if path.exists())
        if not parent.is_dir():
            raise CheckpointError(f"cannot save to {directory}: {parent} is not a folder")
    except OSError as exc:  # for example no permission to look
        raise CheckpointWriteError(f"cannot save to {directory}: {exc.strerror}") from exc
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointWriteError(f"cannot save to {directory}: {parent} is not writable")


def discard_staging(directory: Path) -> None:
    """Remove everything that a failed save to ``directory`` has staged. Idempotent.

    The process that commits calls this once every owner has answered and before ranks hear of the failure, because a
    rank that tries again stages its file under the same name."""
    with suppress(OSError):  # nothing was staged, or not on this file system
        shutil.rmtree(_take_staged(directory))


def _take_staged(directory: Path) -> Path:
    """Rename the staging folder to a name that only the committing process uses. Returns that name, also if nothing
    was staged.

    A rank that gives up withdraws its file. If it does so before the rename, the commit fails; afterwards it no longer
    finds the file. So a save is never committed by half."""
    taken = taken_path(directory)
    shutil.rmtree(taken, ignore_errors=True)  # left by a process that was killed
    with suppress(FileNotFoundError):
        staging_path(directory).rename(taken)
    return taken


def checkpoint_folders(parent: Path) -> list[Path]:
    """The folders in ``parent`` that hold a manifest, sorted by name, whether their content is sound or not.

    Staging folders do not count, nor do links to another folder of ``parent``."""
    found = sorted(path.parent for path in parent.glob(f"*/{MANIFEST}") if not _STALE.fullmatch(path.parent.name))
    return [path for path in found if not (path.is_symlink() and path.resolve().parent == path.parent.resolve())]


def stale_folders(parent: Path) -> list[Path]:
    """The folders that interrupted saves left in ``parent``, sorted by name: staged files, and checkpoints that were
    being replaced.

    A folder of such a name that holds anything else belongs to somebody else and is not listed."""

    def is_left(path: Path) -> bool:
        match = _STALE.fullmatch(path.name)
        if match is None or match[2] != "replaced":
            return match is not None and holds_nothing_else(path)
        return path.is_dir() and not path.is_symlink() and (path / MANIFEST).is_file()

    return [path for path in sorted(parent.glob(".*.*")) if is_left(path)]


def holds_nothing_else(path: Path) -> bool:
    """Whether ``path`` is a folder, not a link to one, that holds a checkpoint's files and nothing else."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(_OF_A_SAVE.fullmatch(inside.name) for inside in path.iterdir())


def sweep_stale(parent: Path, checkpoint: str | None = None) -> list[str]:
    """Clear what interrupted saves left in ``parent``, and return the names. Call it while nobody saves there.

    ``checkpoint``: clear only what saves under this name left.

    A checkpoint that was being replaced gets its name back if the new one never came."""
    swept: list[str] = []
    for path in stale_folders(parent):
        match = _STALE.fullmatch(path.name)
        if match is None or match[1] != (checkpoint or match[1]):
            continue
        if match[2] == "replaced" and not (parent / match[1]).exists():
            path.rename(parent / match[1])
        else:
            shutil.rmtree(path)
        swept.append(path.name)
    return swept


def write_tensors(
    directory_staging: Path,
    name: str,
    tensors: Mapping[str, Writable],
    content: Mapping[str, Mapping[str, Any]],
    *,
    again: bool = True,
) -> FileEntry:
    """Write and fsync one safetensors file in a staging directory, which is made if it is missing.

    ``tensors``: by name, of any shape and any dtype that safetensors has; contiguous CPU tensors are written without a
    copy, deferred and streamed ones are made one at a time. ``content``: per tensor, the fields of a ``FilePiece`` but
    ``dtype`` and ``sha256``, which are added here; other keys are kept. ``again``: False: the tensors can be made only
    once, so that the file fails if its directory is taken away meanwhile. Raises CheckpointWriteError if the file
    cannot be written, UnsupportedError for another dtype.
    """
    return _write_file(directory_staging, name, tensors, content, {}, tries=_TRIES if again else 1)


def write_rank_state(
    directory_staging: Path,
    rank: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    buffers: Mapping[str, Tensor] | None = None,
    tied: Mapping[str, str] | None = None,
    sync: bool = True,
) -> FileEntry:
    """Write one rank's file: its loop state as JSON, its loop's tensors (such as RNG states), the model's persistent
    buffers, and its tied names (other name -> the name in the layout). ``sync``: make it durable now;
    ``commit_checkpoint`` does that, too. Raises CheckpointError if ``state`` is not JSON-able, CheckpointWriteError if
    the file cannot be written."""
    try:
        metadata = {"state": json.dumps(state), "tied": json.dumps(dict(tied or {}))}
    except (TypeError, ValueError) as exc:
        raise CheckpointError(
            f"rank {rank}: the loop state is not JSON-able ({exc}); pass tensors as tensors, everything else as plain "
            "values"
        ) from exc
    named: dict[str, Writable] = {STATE + key: value for key, value in tensors.items()}
    named |= {BUFFER + key: value for key, value in (buffers or {}).items()}
    return _write_file(directory_staging, rank_file_name(rank), named, {}, metadata, sync=sync)


def unwritten(rank: int, why: str) -> FileEntry:
    """An entry in place of a rank's file that could not be written: the save fails on every rank with this reason."""
    return FileEntry(name=rank_file_name(rank), size_bytes=0, sha256="", content={_UNWRITTEN: {"why": why}})


def _write_file(
    staging: Path,
    name: str,
    tensors: Mapping[str, Writable],
    content: Mapping[str, Mapping[str, Any]],
    metadata: Mapping[str, str],
    *,
    sync: bool = True,
    tries: int = _TRIES,
) -> FileEntry:
    try:
        file = _stage(staging / name, tensors, metadata, sync=sync, tries=tries)
    except BaseException as exc:
        withdraw(staging / (name + _PART))
        withdraw(staging / name)
        if isinstance(exc, OSError):
            raise CheckpointWriteError(f"cannot write {staging / name}: {exc.strerror}") from exc
        raise
    described = {
        key: {"shape": list(t.shape), **content.get(key, {}), "dtype": dtype_name(t.dtype), "sha256": file.sha256[key]}
        for key, t in tensors.items()
    }
    return FileEntry(name=name, size_bytes=file.size_bytes, sha256=file.file_sha256, content=described)


def _stage(
    path: Path, tensors: Mapping[str, Writable], metadata: Mapping[str, str], *, sync: bool, tries: int
) -> TensorFileWriter:
    """Write a file under another name, and give it its own once it is whole: one that a rank's former life has staged
    may be committed meanwhile."""
    part = path.with_name(path.name + _PART)
    while True:
        with _begin(part, tensors, metadata, sync=sync) as file:
            file.write_all(tensors)
        try:
            part.rename(path)
            return file
        except FileNotFoundError:  # the folder was taken meanwhile, to be committed or discarded
            tries -= 1
            if not tries:
                raise


def _begin(path: Path, tensors: Mapping[str, Writable], metadata: Mapping[str, str], *, sync: bool) -> TensorFileWriter:
    """Open a file in its staging directory, which another process's ``withdraw`` may remove while it is empty."""
    tries = _TRIES
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return TensorFileWriter(path, {key: declare(t) for key, t in tensors.items()}, metadata, sync=sync)
        except (FileNotFoundError, FileExistsError):  # it was removed after, or while, mkdir found or made it
            tries -= 1
            if not tries:
                raise


def withdraw(path: Path) -> None:
    """Remove this process's file from its staging directory, and the directory if nothing else is in it. Idempotent.

    Called for a file that could not be written or whose save failed. The files of other processes stay."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def commit_checkpoint(
    directory: Path,
    *,
    step: int,
    spec: ModelSpec,
    hyper: Sequence[Hyper],
    slot_steps: Mapping[str, int],
    owner_files: Sequence[FileEntry],
    rank_files: Sequence[FileEntry],
) -> CheckpointInfo:
    """Make the staged files a checkpoint: manifest, fsync, rename. Before the rename, nothing new exists under
    ``directory``.

    ``slot_steps``: parameter -> how many updates it has had. A piece's content may say this too, as ``"step"``; the two
    must agree. Raises CheckpointError if a staged file is missing or has another size than announced, if the pieces do
    not make up every parameter of ``spec.layout``, or if something that is not a checkpoint is at ``directory``;
    CheckpointWriteError if the file system refuses or a rank could not write its file. After an error, nothing staged
    is left.
    """
    try:
        manifest = Manifest(
            step=step,
            spec=spec,
            hyper=tuple(hyper),
            slot_steps=_merged_steps(slot_steps, owner_files),
            owner_files=tuple(sorted(owner_files, key=lambda entry: entry.name)),
            rank_files=tuple(sorted(rank_files, key=lambda entry: entry.name)),
        )
        _commit_staged(directory, manifest)
    except BaseException as exc:
        discard_staging(directory)
        if isinstance(exc, OSError):
            raise CheckpointWriteError(f"cannot save to {directory}: {exc}") from exc
        raise
    return CheckpointInfo(path=str(directory), step=step, digest=manifest.digest)


def resume_commit(directory: Path, step: int, rank_files: Sequence[FileEntry]) -> CheckpointInfo | None:
    """Take up a commit whose process has died: the checkpoint of ``step`` with just these ``rank_files``, if it is
    there; else None, and what that process had taken is staged again."""
    if (made := committed(directory, step, rank_files)) is not None:
        return made
    taken, staging = taken_path(directory), staging_path(directory)
    if holds_nothing_else(taken):
        staging.mkdir(exist_ok=True)
        for path in taken.iterdir():
            if not (staging / path.name).exists():
                path.rename(staging / path.name)
        shutil.rmtree(taken)
    return None


def committed(directory: Path, step: int, rank_files: Sequence[FileEntry]) -> CheckpointInfo | None:
    """The checkpoint of ``step`` at ``directory``, if these files of ranks are among its own; None: it is not there."""
    if not (directory / MANIFEST).is_file():
        return None
    with suppress(CheckpointError):  # another one, and damaged
        text = (directory / MANIFEST).read_text(encoding="utf-8")
        manifest = Manifest.from_json(text, str(directory / MANIFEST))
        if manifest.step == step and all(entry in manifest.rank_files for entry in rank_files):
            return CheckpointInfo(path=str(directory), step=step, digest=manifest.digest)
    return None


def _commit_staged(directory: Path, manifest: Manifest) -> None:
    check_target(directory)
    taken = _take_staged(directory)
    _check_staged(taken, manifest.files)
    manifest.check_complete()
    wanted = {entry.name for entry in manifest.files}
    for path in taken.iterdir():
        if path.name not in wanted:  # an interrupted save with more owners or ranks left it under the same name
            path.unlink()
    for entry in manifest.rank_files:  # of a save that training does not wait for, nobody has yet
        fsync(taken / entry.name)
    (taken / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    fsync(taken / MANIFEST)
    fsync(taken)
    _rename_into_place(taken, directory)


def _merged_steps(slot_steps: Mapping[str, int], owner_files: Sequence[FileEntry]) -> dict[str, int]:
    merged = dict(slot_steps)
    for entry in owner_files:
        for content in entry.content.values():
            if "step" in content and merged.setdefault(content["param"], content["step"]) != content["step"]:
                raise CheckpointError(
                    f"{entry.name} says that {content['param']!r} had {content['step']} updates, "
                    f"but others say {merged[content['param']]}"
                )
    return dict(sorted(merged.items()))


def _check_staged(taken: Path, entries: Sequence[FileEntry]) -> None:
    for entry in entries:
        if _UNWRITTEN in entry.content:
            raise CheckpointWriteError(entry.content[_UNWRITTEN]["why"])
        path = taken / entry.name
        got = path.stat().st_size if path.exists() else None
        if got != entry.size_bytes:
            found = "it is not there" if got is None else f"it has {got:,} bytes"
            raise CheckpointError(
                f"{path} should have {entry.size_bytes:,} bytes, but {found}; "
                "every node must write to the same storage (run_config.storage_path)"
            )


def _rename_into_place(taken: Path, directory: Path) -> None:
    """The commit point. An older checkpoint of the same name is first moved aside and afterwards removed.

    After the rename the checkpoint is there and whole. Whatever fails from then on is only a warning."""
    replaced = _replaced_path(directory)
    if directory.exists():
        if replaced.exists():  # left by a save that could not be made durable or tidied; its checkpoint is in place
            shutil.rmtree(replaced)
        directory.rename(replaced)
    try:
        taken.rename(directory)
    except OSError:
        if replaced.exists():
            replaced.rename(directory)
        raise
    try:
        fsync(directory.parent)
        if replaced.exists():
            shutil.rmtree(replaced)
    except OSError as exc:
        log.warning(
            "the checkpoint %s is complete, but its folder could not be made durable or tidied (%s): a power failure "
            "may undo the save, and the checkpoint that it replaced may stay until the next start",
            directory,
            exc,
        )
