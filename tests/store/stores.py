"""Every store there is, by name: the conformance suite runs over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from rayzero.memory.slabs import SHARED_MEMORY
from rayzero.optimizer.service import ShardService
from rayzero.store.grpc_server import OwnerServer
from rayzero.store.inprocess import InProcessStore, LocalOwners
from rayzero.store.protocol import ParameterStore
from rayzero.store.remote import RemoteStore
from rayzero.store.same_host import why_no_sharing
from rayzero.store.shared_owner import SharedOwner

TOKEN = "the token of this test run"

StoreFactory = Callable[..., AbstractContextManager[list[ParameterStore]]]


@contextmanager
def inprocess(
    world_size: int, num_owners: int, *, stall_timeout: float = 60.0, owner_threads: int = 1
) -> Iterator[list[ParameterStore]]:
    """``world_size`` ranks over ``num_owners`` owners in this process; everything is closed at the end."""
    with ExitStack() as stack:
        owners = LocalOwners(num_owners, threads=owner_threads)
        stack.callback(owners.close)
        stores: list[ParameterStore] = []
        for rank in range(world_size):
            store = InProcessStore(rank, owners, stall_timeout=stall_timeout)
            stack.callback(store.close)
            stores.append(store)
        yield stores


@contextmanager
def over_grpc(
    world_size: int,
    num_owners: int,
    *,
    stall_timeout: float = 60.0,
    owner_threads: int = 1,
    broadcast: str = "pull",
    shares: Callable[[int], bool] = lambda owner: False,
) -> Iterator[list[ParameterStore]]:
    """The same over gRPC on loopback: every owner has a server, every rank its own channels. ``shares(owner)``: it
    shares memory with the ranks, as owners of their host do; the others are as on other hosts."""
    somewhere = SHARED_MEMORY if any(shares(owner) for owner in range(num_owners)) else None
    with ExitStack() as stack:
        servers = []
        for owner in range(num_owners):
            shared = SharedOwner(owner, num_owners) if shares(owner) else None
            make_memory = shared.make_memory if shared is not None else None
            service = ShardService(owner, num_owners, threads=owner_threads, make_memory=make_memory)
            stack.callback(service.close)
            servers.append(stack.enter_context(OwnerServer(service, token=TOKEN, shared=shared)))
        addresses = [server.address for server in servers]
        for server in servers:
            server.connect_peers(addresses)
        stores: list[ParameterStore] = []
        for rank in range(world_size):
            store = RemoteStore(
                rank,
                addresses,
                token=TOKEN,
                stall_timeout=stall_timeout,
                chunk_bytes=1000,
                broadcast=broadcast,
                share=somewhere,
            )
            stack.callback(store.close)
            stores.append(store)
        yield stores


STORES: dict[str, StoreFactory] = {
    "inprocess": inprocess,
    "grpc": over_grpc,
    "grpc-push": partial(over_grpc, broadcast="push"),
}
if why_no_sharing() is None:
    STORES["shm"] = partial(over_grpc, shares=lambda owner: True)
    STORES["mixed"] = partial(over_grpc, shares=lambda owner: owner % 2 == 0)
"""name -> factory(world_size, num_owners, *, stall_timeout=..., owner_threads=...): a context with one store a rank"""
