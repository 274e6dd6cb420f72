"""Where a rank finds its owners."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rayzero.concurrency.futures import DONE
from rayzero.protocol.ownership import Ownership
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.rank.remote import RankTerms, RemoteConnection


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
