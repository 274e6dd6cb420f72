"""Requests for other owners: files in a run's folder, which the run's supervisor takes."""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from pydantic import ConfigDict, Field

from rayzero.config import ConfigModel, Processes
from rayzero.config.zero import Placement
from rayzero.errors import ConfigError
from rayzero.files import replace_file
from rayzero.records import Several, load_record

log = logging.getLogger(__name__)

_FILES = "scale-*.json"
_MOST = 1 << 16  # bytes


class ScaleRequest(ConfigModel):
    """What is asked for."""

    model_config = ConfigDict(extra="ignore")

    num_optimizers: Processes
    """Optimizer actors that the run is to have."""

    avoid: Several[str] = ()
    """Nodes that no optimizer with shards is to be on, by id or address."""

    placement: Placement | None = None
    """Where all of them are to be from now on; None: as before."""

    id: str = Field(default_factory=lambda: secrets.token_hex(8))
    """Names the request in the run's record."""


def ask(run_dir: Path, request: ScaleRequest) -> None:
    """Leave a request. Raises OSError."""
    replace_file(_file(run_dir, request), request.model_dump_json())


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
        request = load_record(path, ScaleRequest, "a request for other optimizers", "ask again", at_most=_MOST)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        aside = path.with_suffix(".unreadable")
        log.warning("a request is set aside as %s: %s", aside.name, error)
        with suppress(OSError):
            path.rename(aside)
        return None
    with suppress(OSError):
        path.unlink()
    return request
