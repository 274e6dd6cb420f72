"""Every store there is, by name: the conformance suite runs over all of them."""

from __future__ import annotations

import os
import secrets
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forked import Forked, forked

from rayzero.config.zero import HostPush
from rayzero.owner.owned_model import OwnerTerms
from rayzero.protocol.ownership import Ownership
from rayzero.protocol.store import ParameterStore
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.inprocess import LocalConnection, LocalOwners
from rayzero.store.owner.entrances.access import TransferCalls
from rayzero.store.owner.hosted import ByModel, HostedModels
from rayzero.store.owner.server import OwnerServer, serve_models
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.store.shm.signals import why_no_sharing
from rayzero.telemetry.recorder import Recorder

from .proxy import Proxy

# Its own: other tests run beside, and ports are given out again. Processes that these tests start have the same.
TOKEN = os.environ.setdefault("RAYZERO_TEST_TOKEN", f"the token of test run {secrets.token_hex(8)}")


@contextmanager
def serving(
    num_owners: int = 1,
    *,
    shares: Sequence[Path | None] = (),
    ownership: Ownership | None = None,
    threads: int = 1,
    recorder: Recorder | None = None,
    host: str = "127.0.0.1",
    interceptors: Sequence[Any] = (),
    **terms: Any,
) -> Iterator[list[OwnerServer]]:
    """Connected servers of fresh owners. ``shares``: of each, the directory of the memory that it shares; None: it
    shares none. ``terms``: see ``ServerTerms``."""
    with ExitStack() as stack:
        servers = []
        for owner, share in enumerate(shares or [None] * num_owners):
            models = HostedModels(
                owner,
                len(shares) or num_owners,
                OwnerTerms(threads=threads),
                ownership=ownership,
                share=share,
                recorder=recorder,
            )
            stack.callback(models.close)
            server = serve_models(models, host=host, interceptors=interceptors, **{"token": TOKEN} | terms)
            servers.append(stack.enter_context(server))
        for server in servers:
            server.connect_peers([other.address for other in servers])
        yield servers


@contextmanager
def connected(
    owners: Sequence[OwnerServer | Proxy | str],
    world_size: int = 1,
    ownership: Ownership | None = None,
    **options: Any,
) -> Iterator[list[RankStore]]:
    """One store a rank. ``owners``: servers of them, proxies before them, or addresses. ``options``: see
    ``RankTerms``."""
    with ExitStack() as stack:
        addresses = [each if isinstance(each, str) else each.address for each in owners]
        terms = RankTerms(**{"token": TOKEN} | options)
        stores = [RankStore(RemoteConnection(rank, addresses, terms, ownership)) for rank in range(world_size)]
        for store in stores:
            stack.callback(store.close)
        yield stores


@contextmanager
def owner_process(
    owner: int, num_owners: int = 2, share: Path | None = None, first: str = ""
) -> Iterator[tuple[Forked, str]]:
    """An owner in a process of its own; its address. It reads its peers from its standard input, and says that it is
    connected. ``first``: a program that it runs before."""
    program = f"""
        from pathlib import Path
        from rayzero.store.owner.server import serve_models
        from rayzero.store.owner.hosted import HostedModels
        models = HostedModels({owner}, {num_owners}, share={f"Path({str(share)!r})" if share else None})
        server = serve_models(models, token={TOKEN!r})
        print(server.address, flush=True)
        server.connect_peers(input().split())
        print("connected", flush=True)
        input()
    """
    with forked(textwrap.dedent(first) + textwrap.dedent(program)) as process:
        yield process, process.said()


def connect(processes: Sequence[Forked], addresses: Sequence[str]) -> None:
    """Tell owners their peers."""
    for process in processes:
        process.say(*addresses)
        assert process.said() == "connected"


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
        shared = [SHARED_MEMORY if owner in sharing else None for owner in range(ownership.num_owners)]
        served = serving(shares=shared, ownership=ownership, threads=owner_threads, token=token)
        addresses = [server.address for server in stack.enter_context(served)]

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


@contextmanager
def seeing_transfers(see: Callable[[str, Callable[[], Awaitable[Any]], bytes], Awaitable[Any]]) -> Iterator[None]:
    """A context in which every owner of this process has transfers answered by ``see``: it is given a method, what
    answers it, and the request."""
    answer = TransferCalls.answer

    async def seen(calls: TransferCalls, opened: Any, stream: Any, content: Any) -> Any:
        question = pb.TransferQuestion.FromString(content)
        return await see(question.method, partial(answer, calls, opened, stream, content), question.request)

    with patch.object(TransferCalls, "answer", seen):
        yield
