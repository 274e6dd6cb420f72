"""Every store there is, by name: the conformance suite runs over all of them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from rayzero.config.zero import HostPush
from rayzero.owner.terms import OwnerTerms
from rayzero.protocol.ownership import Ownership
from rayzero.protocol.store import ParameterStore
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.inprocess import LocalConnection, LocalOwners
from rayzero.store.owner.hosted import ByModel, HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.store.shm.same_host import why_no_sharing

# Its own: other tests run beside, and ports are given out again. Processes that these tests start have the same.
TOKEN = os.environ.setdefault("RAYZERO_TEST_TOKEN", f"the token of test run {secrets.token_hex(8)}")


class Stores(list[ParameterStore]):
    """The ranks' stores of a run's first prepared model, in rank order; ``connect`` gives those of the others."""

    def __init__(self, connect: Callable[[int, int, int], ParameterStore], world_size: int, stack: ExitStack) -> None:
        """``connect(rank, model, life)`` makes one, which is closed with ``stack``."""
        self._connect, self._stack = connect, stack
        super().__init__(self._open(rank, 0) for rank in range(world_size))

    def connect(self, rank: int, model: int) -> ParameterStore:
        """A rank's store of one model."""
        return self._open(rank, model) if model else self[rank]

    def again(self, rank: int, life: int = 1) -> ParameterStore:
        """The store of a rank that has died and comes back."""
        return self._open(rank, 0, life)

    def _open(self, rank: int, model: int, life: int = 0) -> ParameterStore:
        store = self._connect(rank, model, life)
        self._stack.callback(store.close)
        return store


StoreFactory = Callable[..., AbstractContextManager[Stores]]


@contextmanager
def inprocess(
    world_size: int, num_owners: int, *, stall_timeout: float = 60.0, owner_threads: int = 1
) -> Iterator[Stores]:
    """``world_size`` ranks over ``num_owners`` owners in this process; everything is closed at the end."""
    with ExitStack() as stack:
        models = ByModel(lambda _: LocalOwners(num_owners, threads=owner_threads))
        stack.callback(lambda: [owners.close() for owners in models.close()])
        yield Stores(
            lambda rank, model, life: RankStore(
                LocalConnection(rank, models[model], stall_timeout=stall_timeout, life=life)
            ),
            world_size,
            stack,
        )


@contextmanager
def over_grpc(
    world_size: int,
    num_owners: int,
    *,
    stall_timeout: float = 60.0,
    owner_threads: int = 1,
    shares: Callable[[int], bool] = lambda owner: False,
    door: bool = False,
    host_push: HostPush = "never",
) -> Iterator[Stores]:
    """The same over gRPC on loopback: every owner has a server, every rank its own channels. ``shares(owner)``: it
    shares memory with the ranks, as owners of their host do; the others are as on other hosts. ``door``: an owner
    without shards shares memory with them, too. ``host_push``: whether the others get one sum of all ranks."""
    ownership = Ownership(num_owners + door, doors=int(door))
    sharing = [owner for owner in range(ownership.num_owners) if owner == num_owners or shares(owner)]
    alone = host_push == "never" and not sharing
    somewhere = None if alone else SHARED_MEMORY
    token = f"{TOKEN} {secrets.token_hex()}"  # by which ranks of a host find each other
    with ExitStack() as stack:
        servers = []
        for owner in range(ownership.num_owners):
            share = SHARED_MEMORY if owner in sharing else None
            models = HostedModels(
                owner, ownership.num_owners, OwnerTerms(threads=owner_threads), ownership=ownership, share=share
            )
            stack.callback(models.close)
            servers.append(stack.enter_context(serve_models(models, token=token)))
        addresses = [server.address for server in servers]
        for server in servers:
            server.connect_peers(addresses)

        def connect(rank: int, model: int, life: int) -> ParameterStore:
            return RankStore(
                RemoteConnection(
                    rank,
                    addresses,
                    RankTerms(
                        token=token,
                        stall_timeout=stall_timeout,
                        share=somewhere,
                        host_push=host_push,
                        ranks_here=range(world_size),
                        model=model,
                        life=life,
                    ),
                    ownership,
                )
            )

        yield Stores(connect, world_size, stack)


STORES: dict[str, StoreFactory] = {
    "inprocess": inprocess,
    "grpc": over_grpc,
}
if why_no_sharing() is None:
    STORES["shm"] = partial(over_grpc, shares=lambda owner: True)
    STORES["mixed"] = partial(over_grpc, shares=lambda owner: owner % 2 == 0)
    STORES["sums"] = partial(over_grpc, door=True, host_push="always")
    STORES["door"] = partial(over_grpc, door=True)
"""name -> factory(world_size, num_owners, *, stall_timeout=..., owner_threads=...): a context with one store a rank"""
