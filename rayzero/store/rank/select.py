"""Chooses the transport of a rank's store, and logs why it is gRPC for every owner."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rayzero.config import ZeroConfig
from rayzero.errors import UnsupportedError
from rayzero.protocol.store import ParameterStore
from rayzero.security.credentials import Identity
from rayzero.store.rank.owner_table import OwnerTable
from rayzero.store.rank.remote import RankTerms
from rayzero.store.shm.same_host import why_no_sharing
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)


def connect_store(
    rank: int,
    table: OwnerTable,
    *,
    token: str,
    config: ZeroConfig,
    recorder: Recorder,
    model: int = 0,
    life: int = 0,
    ranks_here: Sequence[int] = (),
    outlives_owners: bool = False,
    tls: Identity | None = None,
) -> ParameterStore:
    """Make a rank's store for owners in other processes, which are where ``table`` says. ``model``: the prepared
    model's number. ``life``: how often the rank has died and was started again. ``ranks_here``: the ranks of
    this one's host, itself included; empty: it is alone. ``outlives_owners``: ``table`` will be
    told of successors. ``tls``: what the rank shows to owners at addresses that it protects; None: no TLS.

    Raises UnsupportedError if ``config.transport`` cannot reach them."""
    if config.transport == "inproc":
        raise UnsupportedError(
            "transport='inproc' needs the owners in the rank's own process; on a cluster use 'auto' or 'grpc'"
        )
    share = config.shared_directory
    reason = why_no_sharing(share) if share is not None else "transport='grpc' is set"
    if config.transport == "shm" and reason is not None:
        raise UnsupportedError(f"transport='shm' does not work here: {reason}; use 'auto' or 'grpc'")
    if reason is not None:
        level = logging.INFO if share is None else logging.WARNING  # shared memory was wanted
        log.log(level, "rank %d uses gRPC to every owner: %s", rank, reason)

    terms = RankTerms(
        token=token,
        tls=tls,
        model=model,
        life=life,
        stall_timeout=config.stall_timeout,
        wire_compression=config.wire_compression,
        share=share if reason is None else None,
        share_with_all=config.transport == "shm",
        host_push=config.pushes_for_host if reason is None else "never",
        ranks_here=ranks_here,
        outlives_owners=outlives_owners,
        recorder=recorder,
    )
    return table.connect(rank, terms)
