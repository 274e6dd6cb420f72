"""Requests for other owners: files in a run's folder, which whoever supervises the run takes."""

from __future__ import annotations

import json
import logging
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import get_args

from rayzero.config.zero import Placement
from rayzero.errors import ConfigError
from rayzero.files import parse_json, read_text, replace_file

log = logging.getLogger(__name__)

_FILES = "scale-*.json"
_MOST = 1 << 16  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """What is asked for. Raises ConfigError for a number that no run can have."""

    num_optimizers: int
    avoid: tuple[str, ...] = ()  # nodes that no optimizer is to be on, by id or address
    placement: Placement | None = None  # where all of them are to be from now on; None: as before
    id: str = field(default_factory=lambda: secrets.token_hex(8))  # names it in the run's record

    def __post_init__(self) -> None:
        if self.num_optimizers < 1:
            raise ConfigError(f"num_optimizers is {self.num_optimizers}: pass at least 1")
        if self.placement is not None and self.placement not in get_args(Placement):
            raise ConfigError(f"placement is {self.placement!r}: choose one of {', '.join(get_args(Placement))}")


def ask(run_dir: Path, request: ScaleRequest) -> None:
    """Leave a request. Raises OSError."""
    replace_file(_file(run_dir, request), json.dumps(asdict(request)))


def withdraw(run_dir: Path, request: ScaleRequest) -> bool:
    """Take a request back. False: it has been taken. Raises OSError."""
    try:
        _file(run_dir, request).unlink()
    except FileNotFoundError:
        return False
    return True


def _file(run_dir: Path, request: ScaleRequest) -> Path:
    return run_dir / _FILES.replace("*", request.id)


def take(run_dir: Path) -> list[ScaleRequest]:
    """Take the requests that were left, the newest last: that one counts, and who asked for an earlier one waits to
    hear so. One that cannot be read is set aside, with a warning."""
    found = []
    for path in run_dir.glob(_FILES):
        with suppress(FileNotFoundError):
            asked_at = path.stat().st_mtime_ns
            if (request := _take(path)) is not None:
                found.append((asked_at, request))
    return [request for _, request in sorted(found, key=itemgetter(0))]


def _take(path: Path) -> ScaleRequest | None:
    try:
        request = _parsed(read_text(path, at_most=_MOST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
        aside = path.with_suffix(".unreadable")
        log.warning("%s is no request that can be read (%r); it is now %s", path, error, aside.name)
        with suppress(OSError):
            path.rename(aside)
        return None
    with suppress(OSError):
        path.unlink()
    return request


def _parsed(text: str) -> ScaleRequest:
    data = parse_json(text)
    number, avoid = data["num_optimizers"], data["avoid"]
    if type(number) is not int or type(avoid) is not list:
        raise ValueError(f"num_optimizers is {number!r}, avoid is {avoid!r}: a whole number and a list are needed")
    nodes = tuple(map(str, avoid))
    return ScaleRequest(num_optimizers=number, avoid=nodes, placement=data.get("placement"), id=str(data["id"]))
