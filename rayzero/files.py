"""Makes files and folders as a whole, and reads files without trusting what somebody else may have put there.

Opening a FIFO waits for its other end, opening a device may have effects, and ``/dev/zero`` never ends. Code that reads
a checkpoint or a run's directory uses these functions, which raise OSError or ValueError for all of that.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

__all__ = [
    "fsync",
    "new_folder",
    "open_regular",
    "parse_json",
    "read_bytes",
    "read_text",
    "regular_size",
    "replace_file",
    "to_json",
]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def replace_file(path: Path, content: bytes | str) -> None:
    """Replace the file ``path`` with ``content`` (text as UTF-8). A reader sees the old file or the new, never a part.

    That holds even if this process is killed. Nothing is synced: after a power failure the file may be the old one, the
    new one or, on some file systems, empty. One writer at a time. If it raises OSError, the old file is still there."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise


def fsync(path: Path) -> None:
    """Make the bytes of a file durable, those of other writers too, or the names in a folder. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name ``target`` by a rename once the block has ended; nothing is left of it if
    that fails. The name is made durable, not what is in the folder. Raises OSError."""
    staging = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed
    staging.mkdir(parents=True)
    try:
        yield staging
        staging.rename(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    fsync(target.parent)


def regular_size(path: Path, *, follow_links: bool = True) -> int:
    """The bytes of a regular file. Raises OSError if there is none, or something else. Opens nothing."""
    try:
        return _size(os.stat(path, follow_symlinks=follow_links))
    except ValueError as exc:  # the name has a NUL or half of a surrogate pair
        raise OSError(errno.EINVAL, f"no file can have this name ({exc})") from exc


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a regular file for reading, without ever waiting. Raises OSError if there is none, or something else.

    follow_links: whether the file may be a symbolic link to a regular file."""
    regular_size(path, follow_links=follow_links)  # before it is opened, because opening a device may have effects
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    handle = os.open(path, flags)
    try:
        _size(os.fstat(handle))  # somebody may have exchanged the file
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_text(path: Path, *, at_most: int, follow_links: bool = True) -> str:
    """The text of a regular UTF-8 file of up to ``at_most`` bytes.

    Raises OSError if it is larger or not a regular file, and ValueError if it is not UTF-8."""
    return read_bytes(path, at_most=at_most, follow_links=follow_links).decode("utf-8")


def read_bytes(path: Path, *, at_most: int, follow_links: bool = True) -> bytes:
    """The content of a regular file of up to ``at_most`` bytes. Raises OSError if it is larger or not a regular
    file."""
    with open_regular(path, follow_links=follow_links) as file:
        size = _size(os.fstat(file.fileno()))
        if size > at_most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, but such a file has at most {at_most:,}")
        return file.read(size)


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if the text is not JSON or is nested too deeply. Takes NaN and
    Infinity, too, which Python writes."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def to_json(value: Any, *, indent: int | None = None) -> str:
    """``value`` as JSON that every reader takes: null for inf and NaN, which JSON does not have, and an escape for half
    of a surrogate pair (in a file's name that is not UTF-8), which is no character. What JSON has no kind for, such as
    a path, becomes its text."""
    return json.dumps(_standard(value), indent=indent, default=lambda other: _standard(str(other)), allow_nan=False)


def _standard(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_standard(name): _standard(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(each) for each in value]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _size(status: os.stat_result) -> int:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a regular file")
    return status.st_size
