"""Which Ray this process is to join: what the environment names, found to answer before Ray is asked to join it.

Ray itself waits for minutes, or for ever, on an address where nobody answers.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from ray._common.network_utils import parse_address
from ray._common.utils import get_ray_address_file
from ray._private import services
from ray._private.utils import read_ray_address

from rayzero.errors import ConfigError

__all__ = ["RayAddress", "find_ray", "silence_at"]

VARIABLE = "RAY_ADDRESS"

_ANSWER_S = 5.0
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # RFC 9113, 3.4: preface and empty SETTINGS
_FRAME_HEADER, _SETTINGS = 9, 4  # bytes; the type of the frame that a server sends first


@dataclass(frozen=True, slots=True)
class RayAddress:
    """Where a run's Ray is."""

    joined: str | None  # the address to join; None: this process starts a Ray of its own
    ignored: str | None = None  # one line on a stale file of ``ray start``, where there is one


def find_ray() -> RayAddress:
    """The Ray to join: that of ``RAY_ADDRESS``, else that of the file which ``ray start`` writes, where it answers.

    Takes ten seconds at most, beside the resolution of a name. Raises ConfigError where ``RAY_ADDRESS`` names a Ray
    that does not answer; a file that names one is ignored."""
    named = os.environ.get(VARIABLE)
    if named:
        return RayAddress(_named(named))
    noted = read_ray_address()
    why = silence_at(noted) if noted else None
    if why is None:
        return RayAddress(noted or None)
    return RayAddress(
        None,
        f"{get_ray_address_file(None)} names a Ray at {noted} that does not answer ({why}): this run starts a Ray of "
        "its own; `ray stop` removes the file",
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
            f"{VARIABLE} is {named!r}, and no Ray answers there ({why}); start that cluster, set {VARIABLE} to one "
            "that runs, or unset it to start a Ray on this machine"
        )
    return address


def silence_at(address: str) -> str | None:
    """Why no Ray can be joined at ``host:port``; None: a server answers there in HTTP/2, as Ray's does.

    A connection alone says little: the kernel takes it for a process that is stopped, too."""
    parsed = parse_address(address)
    if parsed is None or not parsed[1].isdigit():
        return "it is not HOST:PORT"
    try:
        with socket.create_connection((parsed[0].strip("[]"), int(parsed[1])), timeout=_ANSWER_S) as connection:
            return None if _encrypted() or _speaks_http2(connection) else "what listens there is not Ray"
    except TimeoutError:
        return f"no answer within {_ANSWER_S:g} s"
    except OverflowError:
        return "there is no such port"
    except OSError as error:
        return error.strerror or str(error)


def _encrypted() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _speaks_http2(connection: socket.socket) -> bool:
    connection.sendall(_HTTP2_HELLO)
    first = connection.recv(64)
    return len(first) >= _FRAME_HEADER and first[3] == _SETTINGS
