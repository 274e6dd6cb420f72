"""Where a rank finds its owners, and over which transport it reaches them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rayzero.concurrency.futures import DONE
from rayzero.config import ZeroConfig
from rayzero.errors import UnsupportedError
from rayzero.protocol.ownership import Ownership
from rayzero.protocol.store import ParameterStore
from rayzero.security.credentials import Identity
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.store.shm.signals import why_no_sharing
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Followed:
    store: RankStore
    connection: RemoteConnection  # to the present owners


class OwnerTable:
    """The owners and their addresses, which change when an owner gets a successor or there are others, and the stores
    that follow them.

    One a process: a rank's stores, one for each prepared model, learn of a change together."""

    def __init__(self, addresses: Sequence[str], ownership: Ownership | None = None) -> None:
        """``addresses``: by owner. ``ownership``: who owns what by now; None: it is the run's first epoch."""
        self._lock = threading.Lock()
        self._addresses, self._ownership = list(addresses), ownership
        self._followed: list[_Followed] = []
        self._gone_over = DONE  # the last change: stores go over to one epoch after the other

    def connect(self, rank: int, terms: RankTerms) -> RankStore:
        """A rank's store over a connection that follows later changes."""
        with self._lock:
            connection = RemoteConnection(rank, self._addresses, terms, self._ownership)
            store = RankStore(connection)
            self._followed.append(_Followed(store, connection))
        return store

    def succeed(self, owner: int, address: str) -> None:
        """The process of an owner has died; its successor is at ``address``. Does not block."""
        with self._lock:
            self._addresses[owner] = address
            for each in self._followed:
                each.connection.succeed(owner, address)

    def go_over(self, addresses: Sequence[str], ownership: Ownership) -> Future[None]:
        """The next epoch has begun, with these owners. Does not block: the future is done when every store goes on
        there, or has failed. A later ``succeed`` is about these owners, and the stores may wait for it."""
        with self._lock:
            self._addresses, self._ownership = list(addresses), ownership
            changes = []
            for each in self._followed:
                before, each.connection = each.connection, each.connection.next(addresses, ownership)
                changes.append((each.store, before, each.connection))
            last, self._gone_over = self._gone_over, Future()
            over = self._gone_over

        def go() -> None:
            try:
                last.result()
                for store, before, now in changes:
                    store.change(before, now, ownership.epoch)
            except BaseException as error:
                over.set_exception(error)
                raise
            over.set_result(None)

        threading.Thread(target=go, name="rayzero-next-epoch", daemon=True).start()
        return over


def connect_store(
    rank: int,
    table: OwnerTable,
    model: int = 0,
    *,
    token: str,
    config: ZeroConfig,
    recorder: Recorder,
    life: int = 0,
    ranks_here: Sequence[int] = (),
    outlives_owners: bool = False,
    tls: Identity | None = None,
) -> ParameterStore:
    """Make a rank's store for owners in other processes, which are where ``table`` says. ``model``: the prepared
    model's number. ``life``: how often the rank has died and was started again. ``ranks_here``: the ranks of
    this one's host, itself included; empty: it is alone. ``outlives_owners``: ``table`` will
    have their successors. ``tls``: what the rank shows to owners at addresses that it protects; None: no TLS.

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
