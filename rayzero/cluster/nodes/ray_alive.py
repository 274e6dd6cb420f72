"""Whether the Ray at hand is still there, asked without Ray: its own calls wait a minute, and then end the process."""

from __future__ import annotations

import socket

import ray

__all__ = ["ray_answers"]

_CONNECT_S = 5.0


def ray_answers() -> bool:
    """True when something listens where the cluster's GCS was. A signal to the whole process group (``timeout``, a
    service manager) ends a Ray that this process started, too."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True
