"""Reads a checkpoint: verified slices of any parameter, however its files cut it into pieces. Finds those of a folder,
the newest of them and those that are not kept, by their manifests and not by their names."""

from __future__ import annotations

import hashlib
import logging
import re
import reprlib
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.checkpoint.manifest import MANIFEST, MAX_BYTES, FilePiece, Manifest, slots_of
from rayzero.checkpoint.tensor_file import TensorFile, as_bytes
from rayzero.checkpoint.writer import BUFFER, STATE, checkpoint_folders, holds_nothing_else, taken_path
from rayzero.errors import CheckpointError
from rayzero.files import open_regular, parse_json, read_text, regular_size
from rayzero.kernels.moments import unpack
from rayzero.protocol.messages import FileEntry
from rayzero.quantities import count

log = logging.getLogger(__name__)

_LAST_NUMBER = re.compile(r"(.*?)\d+(\D*)", re.DOTALL)
_CHUNK = 1 << 20  # elements read at once while a piece is verified


class CheckpointReader:
    """An open, complete checkpoint.

    Opening it checks the manifest and that every file is there in its size. A file's header is checked when the file
    is first needed, and bytes are compared with their hash when they are first read. It opens only regular files in the
    checkpoint's directory. Thread-safe.

    Knows files and element ranges; not who wrote them, or who will own what is read.
    """

    def __init__(self, directory: Path | str) -> None:
        """Raises CheckpointError if ``directory`` is missing, not a checkpoint, damaged or of another version."""
        self.directory = Path(directory)
        self.manifest = manifest = _read_manifest(self.directory)
        self.step = manifest.step  # decided steps that the content includes
        self.digest = manifest.digest  # of the content: equal for equal parameters, states, steps, hyper-parameters
        self.spec = manifest.spec  # model and optimizer, as the run described them to its owners
        self.layout = manifest.spec.layout
        self.hyper = manifest.hyper  # per parameter group, as of the last decision
        self.world_size = len(manifest.rank_files)  # ranks that wrote it; each has its loop state here
        for entry in manifest.files:
            _check_size(self.directory / entry.name, entry)
        self._lock = threading.Lock()
        self._open: dict[str, TensorFile] = {}  # by file name. freed by: close()
        self._verified: set[tuple[str, str]] = set()  # (file, tensor)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        with self._lock:
            self._open.clear()

    def hold(self) -> None:
        """Map every file now: what is mapped can be read to the end, also if a run deletes the checkpoint meanwhile."""
        for entry in self.manifest.files:
            self._file(entry.name)

    def slot_step(self, param: str) -> int:
        """How many updates ``param`` has had."""
        return self.manifest.slot_steps.get(param, 0)

    def kinds(self, param: str) -> list[str]:
        """What can be read of ``param``: "master" and the names of its states, or "compute" if it has no master."""
        return self.manifest.kinds(param)

    def read_slice(self, param: str, kind: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of ``param`` in C order: 1D, fp32 ("compute" has the parameter's dtype).

        Do not write to the result: a range inside one piece is a view of the mapped file, unless it is kept in codes.
        Beside the range, a read needs memory for one chunk of 1,048,576 elements. Raises CheckpointError if the
        checkpoint does not hold the range or if bytes do not match their hash."""
        parts = list(self._parts(param, kind, start, stop))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")

    def read_whole(self, param: str, kind: str) -> Tensor:
        """All elements of a kind, as ``read_slice`` gives some; of a state in its own shape (``own_shapes``) those."""
        pieces = self.manifest.pieces.get((param, kind), ())
        return self.read_slice(param, kind, 0, pieces[-1].stop if pieces else 1)

    def own_shapes(self, param: str) -> dict[str, tuple[int, ...]]:
        """The kinds of optimizer states that have another shape than ``param``, and these shapes."""
        of_kinds = {kind: self.manifest.pieces[param, kind][0].own_shape for kind in self.kinds(param)}
        return {kind: shape for kind, shape in of_kinds.items() if shape is not None}

    def _parts(self, param: str, kind: str, start: int, stop: int) -> Iterator[Tensor]:
        at = start
        for piece in self.manifest.pieces.get((param, kind), ()):
            if piece.start <= at < piece.stop and at < stop:
                end = min(stop, piece.stop)
                yield self._read(piece, at - piece.start, end - piece.start)
                at = end
        if at < stop:
            held = {k: [(p.start, p.stop) for p in self.manifest.pieces[param, k]] for k in self.kinds(param)}
            lacks = f"elements {start}..{stop} of {kind!r} of {param!r}; it holds {held}"
            if not held:
                lacks = f"parameter {param!r}; is it a checkpoint of another model?"
            raise CheckpointError(f"{self.directory} has no {lacks}")

    def _read(self, piece: FilePiece, start: int, stop: int) -> Tensor:
        flat = self._file(piece.file).flat(piece.tensor)
        if (piece.file, piece.tensor) not in self._verified:
            self._verify_piece(piece, flat)
        if piece.moments:
            return unpack(flat, piece.moments, start, stop, is_root=piece.kind == "exp_avg_sq")
        return flat[start:stop]

    def _verify_piece(self, piece: FilePiece, flat: Tensor) -> None:
        digest = hashlib.sha256()
        for at in range(0, len(flat), _CHUNK):
            digest.update(as_bytes(flat[at : at + _CHUNK]))
        if digest.hexdigest() != piece.sha256:
            raise CheckpointError(
                f"{self.directory / piece.file} is damaged: {piece.kind} of {piece.param!r} "
                f"[{piece.start}:{piece.stop}] has hash {digest.hexdigest()[:12]}, but the manifest says "
                f"{piece.sha256[:12]}; use another checkpoint"
            )
        self._verified.add((piece.file, piece.tensor))

    def _file(self, name: str) -> TensorFile:
        with self._lock:
            return self._open.get(name) or self._open.setdefault(name, self._checked(name))

    def _checked(self, name: str) -> TensorFile:
        file = TensorFile(self.directory / name)
        file.require(self.manifest.tensors[name])
        return file

    def require_classes(self, ours: str) -> None:
        """Raise CheckpointError unless a run whose optimizer's classes are ``ours`` can go on from it."""
        if (saved := self.spec.classes) != ours:
            raise CheckpointError(
                f"{self.directory} was written with optimizer {saved!r}, but this run has {ours!r}; use the same class"
            )

    def rank_state(self, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """One rank's loop state and its tensors (views of the mapped file), as ``write_rank_state`` was given them.

        The first call for a rank compares the file with its hash. Raises CheckpointError if the file is damaged, or if
        the checkpoint has none for this rank because fewer ranks wrote it."""
        file = self._rank_file(rank)
        return self._described(file, "state"), file.with_prefix(STATE)

    def buffers(self, rank: int = 0) -> dict[str, Tensor]:
        """The model's persistent buffers by name, as one rank had them; views of the mapped file."""
        return self._rank_file(rank).with_prefix(BUFFER)

    def tied(self) -> dict[str, str]:
        """Other names of tied parameters -> the name in the layout. Raises CheckpointError if one makes no sense."""
        file = self._rank_file(0)
        names = {slot.name for _, slot in slots_of(self.layout)}
        for alias, name in (aliases := self._described(file, "tied")).items():
            if alias in names or not isinstance(name, str) or name not in names:
                raise CheckpointError(
                    f"{file.path} is damaged: it says that {reprlib.repr(alias)} is another name of "
                    f"{reprlib.repr(name)}; use another checkpoint"
                )
        return aliases

    def _described(self, file: TensorFile, key: str) -> dict[str, Any]:
        """A JSON object from the metadata of a rank's file."""
        try:
            found = parse_json(file.metadata.get(key, ""))
        except ValueError as exc:
            raise CheckpointError(f"{file.path} is damaged: its {key!r} is not JSON ({exc})") from exc
        if not isinstance(found, dict):
            raise CheckpointError(f"{file.path} is damaged: its {key!r} is {reprlib.repr(found)}, not a JSON object")
        return found

    def _rank_file(self, rank: int) -> TensorFile:
        if not 0 <= rank < self.world_size:
            raise CheckpointError(
                f"{self.directory} has no state of rank {rank}: {count(self.world_size, 'rank')} wrote it"
            )
        entry = self.manifest.rank_files[rank]
        file = self._file(entry.name)
        if (entry.name, "") not in self._verified:
            _check_hash(file.path, entry)
            self._verified.add((entry.name, ""))
        return file

    def verify(self) -> None:
        """Compare all files with the manifest. Raises CheckpointError that names the first that differs."""
        for entry in self.manifest.files:
            _check_size(self.directory / entry.name, entry)
            self._checked(entry.name)
            _check_hash(self.directory / entry.name, entry)


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        if directory.is_file():
            raise CheckpointError(f"{directory} is a file; give a checkpoint's folder, which has a {MANIFEST}")
        if not directory.is_dir():
            beside = [found.name for found in checkpoint_folders(directory.parent)]
            there = f"checkpoints in {directory.parent}: {', '.join(beside)}" if beside else "there is no such folder"
            raise CheckpointError(f"no checkpoint at {directory}; {there}")
        return Manifest.from_json(read_text(path, at_most=MAX_BYTES, follow_links=False), str(path))
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is not a checkpoint: it has no {MANIFEST}; name a folder inside checkpoints/"
        ) from None
    except UnicodeDecodeError as exc:
        raise CheckpointError(f"{path} is damaged: {exc}") from exc
    except OSError as exc:  # a folder, or not ours to read
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}") from exc


def _check_size(path: Path, entry: FileEntry) -> None:
    try:
        got = regular_size(path, follow_links=False)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, but the manifest names it; use another checkpoint") from None
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}") from exc
    if got != entry.size_bytes:
        raise CheckpointError(
            f"{path} has {got:,} bytes, but the manifest says {entry.size_bytes:,}: it is truncated or was changed; "
            "use another checkpoint"
        )


def _check_hash(path: Path, entry: FileEntry) -> None:
    try:
        with open_regular(path, follow_links=False) as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}") from exc
    if got != entry.sha256:
        raise CheckpointError(
            f"{path} is damaged: its hash is {got[:12]}, but the manifest says {entry.sha256[:12]}; use another "
            "checkpoint"
        )


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint whose manifest is sound and whose files are there in their sizes. No hash was compared."""

    path: Path
    step: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """The checkpoints of a folder."""

    sound: tuple[SavedCheckpoint, ...]  # lowest step first; of equal steps, the one written last comes last
    damaged: Mapping[Path, str]  # folder -> why it cannot be used

    @classmethod
    def of(cls, folder: Path, further: Iterable[Path] = ()) -> Catalog:
        """Read the manifest of every checkpoint in ``folder``. A folder that does not exist has none.

        ``further``: checkpoints in other places; those that no longer exist are left out."""
        sound: list[tuple[int, int, SavedCheckpoint]] = []
        damaged: dict[Path, str] = {}
        for path in [*checkpoint_folders(folder), *(path for path in further if (path / MANIFEST).exists())]:
            try:
                with CheckpointReader(path) as checkpoint:
                    written_ns = (path / MANIFEST).stat().st_mtime_ns
                    sound.append((checkpoint.step, written_ns, SavedCheckpoint(path, checkpoint.step)))
            except (CheckpointError, OSError) as error:
                if path.exists():  # else a run has deleted it meanwhile
                    damaged[path] = str(error)
        return cls(sound=tuple(one for _, _, one in sorted(sound, key=lambda found: found[:2])), damaged=damaged)

    def newest(self) -> Path | None:
        """The checkpoint of the highest step, or None. Skips each damaged one with a warning that names it."""
        for why in self.damaged.values():
            log.warning("skipping a checkpoint: %s", why)
        return self.sound[-1].path if self.sound else None


def delete_older(directory: Path, keep: int, keep_every: int | None = None, busy: Collection[Path] = ()) -> list[Path]:
    """Delete the oldest checkpoints beside ``directory``, a complete checkpoint, until ``keep`` are left, counting
    ``directory`` itself. Returns those that were deleted.

    keep_every: those of steps that it divides stay, beside the newest ``keep``. busy: those that somebody reads stay
    this time.

    Only its own series counts: checkpoints of earlier steps whose names differ from its name in the last number alone.
    Beside ``step-000100``, ``best`` and ``other-1`` are never touched; nor are links, folders that hold other files,
    and damaged checkpoints. If one cannot be deleted, there is a warning, because the new checkpoint is good all the
    same."""
    found = _LAST_NUMBER.fullmatch(directory.name)
    if found is None:
        return []
    series = re.compile(re.escape(found[1]) + r"\d+" + re.escape(found[2]))
    sound = [
        saved
        for saved in Catalog.of(directory.parent).sound
        if series.fullmatch(saved.path.name) and holds_nothing_else(saved.path)
    ]
    step = next((saved.step for saved in sound if saved.path.name == directory.name), 0)
    older = [saved for saved in sound if saved.step < step]
    deleted, kept = [], {path.absolute() for path in busy}
    for path in (saved.path for saved in too_old(older, keep - 1, keep_every) if saved.path.absolute() not in kept):
        try:
            _delete(path)
        except OSError as error:
            log.warning("an old checkpoint could not be deleted: %s: %s", path, error.strerror or error)
        else:
            deleted.append(path)
    return deleted


def too_old(older: Sequence[SavedCheckpoint], keep: int, keep_every: int | None) -> list[SavedCheckpoint]:
    """Those of ``older``, lowest step first, not among the last ``keep`` nor of a step that ``keep_every`` divides."""
    return [saved for saved in older[: max(0, len(older) - keep)] if keep_every is None or saved.step % keep_every]


def _delete(path: Path) -> None:
    """Delete a checkpoint, all at once as readers see it: the name goes first. If the process is killed before the
    rest has gone, a sweep removes it."""
    taken = taken_path(path)
    shutil.rmtree(taken, ignore_errors=True)
    path.rename(taken)
    shutil.rmtree(taken)
