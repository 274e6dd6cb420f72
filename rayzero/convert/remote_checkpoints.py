"""Remote storage by URL (s3://, gs://), and copies of whole checkpoints there: made beside the training, fetched to be
read. fsspec's errors become ours; nothing else here knows fsspec.

An object store has no rename, so the manifest makes a remote checkpoint exist: it is removed before any other file
changes and written after all of them. Here, a copy gets its name by a rename once every file has its size.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from rayzero.checkpoint.manifest import MANIFEST, MAX_BYTES, Manifest
from rayzero.checkpoint.reader import Catalog
from rayzero.errors import CheckpointError, CheckpointWriteError, UnsupportedError
from rayzero.files import new_folder

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://.+", re.DOTALL)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # protocol -> RayZero's extra that installs its package

_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "oci"}  # have no folders; making one would make a missing bucket


def is_url(place: object) -> bool:
    """Whether ``place`` is a text such as ``"s3://bucket/run"``."""
    return isinstance(place, str) and _URL.fullmatch(place) is not None


class RemoteFolder:
    """A folder that a URL names. Nothing is opened before the first call."""

    def __init__(self, url: str) -> None:
        """Raises UnsupportedError that names the package to install if fsspec or the protocol's package is missing, or
        if no package knows the protocol; CheckpointError if the storage cannot be opened."""
        self.url = url.rstrip("/")
        self._fs, self._path = _open(self.url)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url}/{name}")

    def files(self) -> dict[str, int]:
        """The bytes of every file below, by its path from this folder; empty if there is no such folder."""
        with self._to_be("read"):
            self._fs.invalidate_cache()
            found = self._fs.find(self._path, detail=True)
        return {
            _below(self._path, path, self.url): int(about["size"])
            for path, about in found.items()
            if path.strip("/") != self._path.strip("/")  # of a file, some storages list the file itself
        }

    def read(self, name: str, *, at_most: int) -> bytes:
        """A small file. Raises CheckpointError if it is missing or has more than ``at_most`` bytes."""
        with self._to_be("read"), self._fs.open(f"{self._path}/{name}", "rb") as file:
            content: bytes = file.read(at_most + 1)
        if len(content) > at_most:
            raise CheckpointError(f"{self.url}/{name} has more than {at_most:,} bytes")
        return content

    def get(self, name: str, path: Path) -> None:
        """Copy a file from here to ``path``."""
        with self._to_be("read"):
            self._fs.get_file(f"{self._path}/{name}", str(path))

    def put(self, path: Path, name: str) -> None:
        """Copy the file ``path`` here, replacing one of the same name."""
        with self._to_be("written", CheckpointWriteError):
            target = f"{self._path}/{name}"
            if self.url.partition("://")[0] not in _BUCKETS:
                self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(path), target)

    def remove(self, name: str) -> None:
        """Remove a file. It need not be there."""
        with self._to_be("written", CheckpointWriteError):
            self._fs.invalidate_cache()
            if self._fs.exists(f"{self._path}/{name}"):
                self._fs.rm_file(f"{self._path}/{name}")

    @contextmanager
    def _to_be(self, done: str, kind: type[CheckpointError] = CheckpointError) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # each storage has errors of its own
            raise kind(f"{self.url} cannot be {done}: {_one_line(exc)}") from exc


def _open(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as exc:
        raise UnsupportedError(f"{url} needs the package fsspec: pip install rayzero[remote]") from exc
    protocol = url.partition("://")[0]
    try:
        fs, path = url_to_fs(url)
    except ImportError as exc:
        install = f"pip install rayzero[{_EXTRAS[protocol]}]" if protocol in _EXTRAS else "install it"
        raise UnsupportedError(f"{url} needs a package that is missing ({_one_line(exc)}): {install}") from exc
    except ValueError as exc:
        raise UnsupportedError(f"{url}: no storage is known as {protocol}:// ({_one_line(exc)})") from exc
    except Exception as exc:  # some connect at once, or need more than a URL says
        raise CheckpointError(f"{url} cannot be opened: {_one_line(exc)}") from exc
    return fs, str(path).rstrip("/")


def _below(root: str, path: str, url: str) -> str:
    """``path`` from ``root``. Raises CheckpointError for one that is not below: a storage may list anything."""
    relative = PurePosixPath(path.lstrip("/")).relative_to(root.lstrip("/"))
    if ".." in relative.parts or not relative.parts:
        raise CheckpointError(f"{url} lists {path[:200]!r}, which is outside of it")
    return str(relative)


def _one_line(exc: Exception) -> str:
    return " ".join(f"{type(exc).__name__}: {exc}".split())[:300]


_CACHE = "RAYZERO_CACHE"

log = logging.getLogger(__name__)


def upload_checkpoint(directory: Path, url: str) -> str:
    """Copy the complete checkpoint ``directory`` into the remote folder ``url``, under its own name; returns its URL.

    A reader sees meanwhile the checkpoint that was there before, none, or the whole new one: never a part. Raises
    CheckpointWriteError if the storage refuses or has another size than was sent, CheckpointError if ``directory`` is
    not a checkpoint."""
    if not (directory / MANIFEST).is_file():
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {MANIFEST}")
    manifest = (directory / MANIFEST).read_bytes()
    target = RemoteFolder(url) / directory.name
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
    target.remove(MANIFEST)
    for path, name in zip(files, sizes, strict=True):
        target.put(path, name)
    there = target.files()
    for name, size in sizes.items():
        if there.get(name) != size:
            raise CheckpointWriteError(f"{target}/{name} has {there.get(name)} bytes there, and {size:,} here")
    if (directory / MANIFEST).read_bytes() != manifest:
        raise CheckpointWriteError(f"{directory} was replaced by another checkpoint while it was copied to {target}")
    target.put(directory / MANIFEST, MANIFEST)
    for name in there.keys() - sizes.keys():
        target.remove(name)  # of a checkpoint that was replaced
    return str(target)


def newest_url(url: str) -> str | None:
    """The checkpoint of the highest step in the remote folder ``url`` or, if it has none, in ``url/checkpoints``.

    As ``newest_checkpoint``: a damaged one, or one whose files are not there in their sizes, is skipped with a
    warning."""
    for folder in (RemoteFolder(url), RemoteFolder(url) / "checkpoints"):
        files = folder.files()
        names = sorted(
            name.partition("/")[0] for name in files if name.count("/") == 1 and name.endswith(f"/{MANIFEST}")
        )
        sound: list[tuple[int, str]] = []
        for name in names:
            below = {path.removeprefix(f"{name}/"): size for path, size in files.items() if path.startswith(f"{name}/")}
            try:
                sound.append((_manifest(folder / name, below).step, name))
            except CheckpointError as error:
                log.warning("skipping a checkpoint: %s", error)
        if sound:
            return str(folder / max(sound)[1])
    return None


def _manifest(folder: RemoteFolder, files: Mapping[str, int]) -> Manifest:
    """The manifest of a remote checkpoint. Raises CheckpointError if it is damaged or a file lacks its size."""
    where = f"{folder}/{MANIFEST}"
    try:
        manifest = Manifest.from_json(folder.read(MANIFEST, at_most=MAX_BYTES).decode("utf-8"), where)
    except UnicodeDecodeError as exc:
        raise CheckpointError(f"{where} is damaged: {exc}") from exc
    for entry in manifest.files:
        if files.get(entry.name) != entry.size_bytes:
            raise CheckpointError(
                f"{folder}/{entry.name} has {files.get(entry.name)} bytes, but the manifest says {entry.size_bytes:,}"
            )
    return manifest


# ---- copies there, beside the training -------------------------------------------------------------------------------


class Uploads:
    """The checkpoints that one rank copies to remote storage, in a thread of its own.

    While one is copied, the newest that came since waits; one between them is left out, with a warning, so that a slow
    link never holds more than two. Knows folders and URLs; not what else happens to the folders. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[Future[None], Path] = {}  # oldest first; also some that have ended
        self._thread = ThreadPoolExecutor(1, "checkpoint-upload")

    @property
    def busy(self) -> frozenset[Path]:
        """The folders that are being read or will be: nobody may delete them."""
        with self._lock:
            return frozenset(directory for copy, directory in self._copies.items() if not copy.done())

    def add(self, directory: Path, url: str) -> None:
        """Upload a complete checkpoint once the one before is there."""
        with self._lock:
            for copy, older in self._copies.items():
                if copy.cancel():
                    log.warning("CHECKPOINT NOT UPLOADED: %s: a newer one came before its turn", older)
            self._copies = {copy: older for copy, older in self._copies.items() if not copy.done()}
            self._copies[self._thread.submit(_upload, directory, url)] = directory

    def wait(self) -> None:
        """Return when nothing is left to upload."""
        with self._lock:
            left = list(self._copies)
        wait(left)


def _upload(directory: Path, url: str) -> None:
    try:
        log.info("checkpoint uploaded: %s", upload_checkpoint(directory, url))
    except Exception as error:  # a storage may raise anything; who waits must hear that it is over
        log.warning("CHECKPOINT NOT UPLOADED: %s: %s. It stays in %s", url, error, directory)


# ---- copies here ------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where copies of remote checkpoints are kept: $RAYZERO_CACHE, or ``~/.cache/rayzero``. Ranks and owners on several
    hosts need one that all of them see."""
    return Path(os.environ.get(_CACHE) or Path.home() / ".cache" / "rayzero")


def local_checkpoint(place: str, into: Path | None = None) -> Path:
    """The path that ``place`` is or, of a URL, a copy of that checkpoint in ``into`` (default: ``cache_folder()``)."""
    return fetch_checkpoint(place, into or cache_folder()) if is_url(place) else Path(place)


def fetch_checkpoint(url: str, into: Path) -> Path:
    """Copy the remote RayZero checkpoint ``url`` into the folder ``into``; returns the copy's folder.

    The same checkpoint is copied once, however often it is asked for, also by several processes at the same time.
    Raises CheckpointError if it is missing, incomplete or damaged, CheckpointWriteError if it cannot be written."""
    folder = RemoteFolder(url)
    files = folder.files()
    if MANIFEST not in files:
        raise CheckpointError(f"no checkpoint at {url}: it has no {MANIFEST}")
    manifest = _manifest(folder, files)
    target = into / f"{folder.name}-{hashlib.sha256(f'{url} {manifest.to_json()}'.encode()).hexdigest()[:12]}"
    with _alone(target):
        if not (target / MANIFEST).is_file():
            _fetch(folder, files, target)
    return target


def fetch_folder(url: str, target: Path) -> Path:
    """Copy everything in the remote folder ``url``, a checkpoint of any format or a single file, to the new folder
    ``target``; returns ``target``, or the copy of the file."""
    folder = RemoteFolder(url)
    files = folder.files()
    if not files:
        parent, _, name = folder.url.rpartition("/")
        above = RemoteFolder(parent)
        if name not in above.files():
            raise CheckpointError(f"nothing is at {url}")
        _fetch(above, {name: above.files()[name]}, target)
        return target / name
    _fetch(folder, files, target)
    return target


def newest_checkpoint(folder: Path | str) -> Path | None:
    """The checkpoint of the highest step in ``folder`` or, if it has none, in ``folder / "checkpoints"``.

    ``folder``: may be a URL such as ``"s3://bucket/run"``; the checkpoint is then copied into the folder
    ``$RAYZERO_CACHE`` (``~/.cache/rayzero``), unless it is there, and the copy is returned.

    None if there is no checkpoint or no such folder yet. Raises CheckpointError if ``folder`` is a file.

    The step comes from the manifest, so a checkpoint may have any name. If its manifest is damaged or one of its files
    is missing or has the wrong size, the checkpoint is skipped with a warning that names it. Hashes are only compared
    when the content is read."""
    if isinstance(folder, str) and is_url(folder):
        newest = newest_url(folder)
        return None if newest is None else local_checkpoint(newest)
    folder = Path(folder)
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file, not a folder of checkpoints")
    return Catalog.of(folder).newest() or Catalog.of(folder / "checkpoints").newest()


@contextmanager
def nearby(place: str, beside: Path) -> Iterator[Path]:
    """The path that ``place`` is or, of a URL, a copy of it in the folder of ``beside``, until the block ends: there is
    room for what is about to be written, and here for what it is made from.

    The URL is a checkpoint of any format, a safetensors file, or a run's folder, which means its newest checkpoint."""
    if not is_url(place):
        yield Path(place)
        return
    parent = beside.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        holder = TemporaryDirectory(dir=parent, prefix=f".{beside.name}.")
    except OSError as exc:
        raise CheckpointWriteError(f"cannot write to {parent}: {exc.strerror or exc}") from exc
    with holder as folder:
        url = place if MANIFEST in RemoteFolder(place).files() else newest_url(place) or place
        yield fetch_folder(url, Path(folder) / RemoteFolder(url).name)


def _fetch(folder: RemoteFolder, files: Mapping[str, int], target: Path) -> None:
    try:
        with new_folder(target) as staging:
            for name, size in files.items():
                path = staging / name
                path.parent.mkdir(parents=True, exist_ok=True)
                folder.get(name, path)
                if (got := path.stat().st_size) != size:
                    raise CheckpointError(f"{folder}/{name} came with {got:,} bytes, and has {size:,} there")
    except OSError as exc:
        raise CheckpointWriteError(f"cannot copy {folder} to {target}: {exc.strerror or exc}") from exc


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One process at a time makes ``target``; the others wait for it. The kernel ends the lock of one that dies."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f".{target.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as exc:
        raise CheckpointWriteError(f"cannot write to {target.parent}: {exc.strerror or exc}") from exc
