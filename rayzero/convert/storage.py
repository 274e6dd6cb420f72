"""One folder of remote storage behind six calls. fsspec's errors become ours; nothing else here knows fsspec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from rayzero.errors import CheckpointError, CheckpointWriteError, UnsupportedError

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
        if no package knows the protocol."""
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
    return fs, str(path).rstrip("/")


def _below(root: str, path: str, url: str) -> str:
    """``path`` from ``root``. Raises CheckpointError for one that is not below: a storage may list anything."""
    relative = PurePosixPath(path.lstrip("/")).relative_to(root.lstrip("/"))
    if ".." in relative.parts or not relative.parts:
        raise CheckpointError(f"{url} lists {path[:200]!r}, which is outside of it")
    return str(relative)


def _one_line(exc: Exception) -> str:
    return " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
