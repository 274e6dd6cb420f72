"""Which transport carries a rank's bytes, decided once per run and said in one log line."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rayzero.config import ZeroConfig
from rayzero.errors import UnsupportedError
from rayzero.store.grpc_client import GrpcStore
from rayzero.store.protocol import ParameterStore
from rayzero.store.rpc import TlsFiles
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)


def connect_store(
    rank: int,
    addresses: Sequence[str],
    *,
    token: str,
    config: ZeroConfig,
    recorder: Recorder,
    tls: TlsFiles | None = None,
) -> ParameterStore:
    """A rank's store for owners in other processes at ``addresses`` (by owner index).

    Raises UnsupportedError where ``config.transport`` names one that cannot reach them."""
    if config.transport == "inproc":
        raise UnsupportedError(
            "transport='inproc' needs the owners in the rank's own process; on a cluster use 'auto' or 'grpc'"
        )
    if config.transport == "shm":
        raise UnsupportedError("transport='shm' (shared memory) is not there yet; use 'auto' or 'grpc'")
    reason = "asked for" if config.transport == "grpc" else "owners are in other processes"
    log.info("rank %d: gRPC to %d owners (%s)", rank, len(addresses), reason)
    return GrpcStore(
        rank,
        addresses,
        token=token,
        tls=tls,
        stall_timeout=config.stall_timeout,
        chunk_bytes=config.chunk_bytes,
        wire_compression=config.wire_compression,
        broadcast=config.broadcast,
        recorder=recorder,
    )
