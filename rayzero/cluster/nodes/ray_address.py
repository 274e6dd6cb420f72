"""Finds the Ray that this process should join: checks that the address in the environment answers before Ray joins it,
and that Ray's processes will run this rayzero.

Ray itself waits for minutes, or for ever, for an address that does not answer.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ray._common.network_utils import parse_address
from ray._common.utils import get_ray_address_file
from ray._private import services
from ray._private.utils import read_ray_address

import rayzero
from rayzero.errors import ConfigError
from rayzero.telemetry.http import LAST_PORT

VARIABLE = "RAY_ADDRESS"

_ANSWER_S = 5.0
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # RFC 9113, 3.4: preface and empty SETTINGS
_FRAME_HEADER, _SETTINGS = 9, 4  # bytes; the type of the frame that a server sends first


@dataclass(frozen=True, slots=True)
class RayAddress:
    """The address of a run's Ray."""

    joined: str | None  # the address to join; None: this process starts a Ray of its own
    ignored: str | None = None  # a message about a stale file of ``ray start``; None if there is none


def find_ray() -> RayAddress:
    """The Ray to join: that of ``RAY_ADDRESS``, else that of the file that ``ray start`` writes, if it answers.

    Takes at most ten seconds besides resolving a name. Raises ConfigError if ``RAY_ADDRESS`` names a Ray that does not
    answer, and where Ray's processes would import another rayzero; ignores a file that names a Ray that does not
    answer."""
    _require_one_rayzero(Path.cwd(), Path(rayzero.__file__).parent)
    named = os.environ.get(VARIABLE)
    if named:
        return RayAddress(_named(named))
    noted = read_ray_address()
    why = silence_at(noted) if noted else None
    if why is None:
        return RayAddress(noted or None)
    return RayAddress(
        None,
        f"{get_ray_address_file(None)} names a Ray at {noted} that does not answer ({why}), so this run starts its "
        f"own Ray; `ray stop` removes the file",
    )


def _require_one_rayzero(folder: Path, ours: Path) -> None:
    """Ray puts the driver's current folder before everything else that its processes import from."""
    other = folder / "rayzero"
    if (other / "__init__.py").exists() and not other.samefile(ours):
        raise ConfigError(
            f"Ray's processes would import rayzero from the current folder, {folder}, and not the installed one, "
            f"{ours}; go to another folder, or install that one as it is (pip install -e {folder})"
        )


def _named(named: str) -> str | None:
    if named == "local":
        return None
    if "://" in named:  # a Ray client or a dashboard: another protocol, with errors of its own
        return named
    try:
        # "auto" becomes an address, names become numbers
        address: str | None = services.canonicalize_bootstrap_address(None)
        why = silence_at(address or "")
    except (ValueError, OSError) as error:
        why = " ".join(str(error).split())
    if why is not None:
        raise ConfigError(
            f"{VARIABLE} is {named!r}, but no Ray answers there ({why}); start that cluster, set {VARIABLE} to one "
            f"that runs, or unset it to start Ray on this machine"
        )
    return address


def silence_at(address: str) -> str | None:
    """Why no Ray can be joined at ``host:port``; None if a server answers there in HTTP/2, as Ray's does.

    A connection alone proves little, because the kernel accepts it for a stopped process too."""
    parsed = parse_address(address)
    if parsed is None or not parsed[1].isdigit():
        return "it is not HOST:PORT"
    if int(parsed[1]) > LAST_PORT:  # the C library would ask the port that is 65,536 lower
        return f"ports end at {LAST_PORT}"
    try:
        with socket.create_connection((parsed[0].strip("[]"), int(parsed[1])), timeout=_ANSWER_S) as connection:
            return None if _encrypted() or _speaks_http2(connection) else "the program that listens there is not Ray"
    except TimeoutError:
        return f"no answer within {_ANSWER_S:g} s"
    except OSError as error:
        return error.strerror or str(error)


def _encrypted() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _speaks_http2(connection: socket.socket) -> bool:
    connection.sendall(_HTTP2_HELLO)
    first = connection.recv(64)
    return len(first) >= _FRAME_HEADER and first[3] == _SETTINGS
