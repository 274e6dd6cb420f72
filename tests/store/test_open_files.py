"""What processes have open, counted, and what rayzero/cluster/nodes/resources.py says that they may have."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import psutil
import pytest
from forked import forked

from rayzero.cluster.nodes.resources import PROCESS, files_of_owner, files_of_rank, most_ranks, tensor_connections
from rayzero.concurrency.processes import this_process
from rayzero.protocol.ownership import Ownership
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.transfer_calls import TransferThreads, most_transfers
from rayzero.store.shm.signals import why_no_sharing
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import STORE_SERVICE, life_metadata, methods, open_channel, token_metadata
from rayzero.store.wire.tensor_stream import WELCOME
from tests.support.waiting import until

from .stores import TOKEN, connected, over_grpc
from .test_grpc import attach_request
from .toy import WAIT, make_spec, random_grads, started, take_step


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextmanager
def owners(num_owners: int, num_doors: int = 0) -> Iterator[tuple[list[str], int]]:
    """The addresses of some owners, all in one process, and its process id. The last ``num_doors`` have no shards."""
    program = f"""
        from rayzero.protocol.ownership import Ownership
        from rayzero.store.owner.server import serve_models
        from rayzero.store.owner.hosted import HostedModels
        known = Ownership({num_owners}, doors={num_doors})
        models = [HostedModels(i, {num_owners}, ownership=known) for i in range({num_owners})]
        servers = [serve_models(each, token={TOKEN!r}) for each in models]
        for server in servers:
            server.connect_peers([each.address for each in servers])
        print(*(server.address for server in servers), flush=True)
        input()
    """
    with forked(program) as process:
        yield process.said().split(), process.pid


def as_rank(stack: ExitStack, address: str, rank: int, num_ranks: int) -> None:
    """Attach to an owner as a rank, and open as many connections for tensors as a rank may."""
    channel = stack.enter_context(open_channel(address, None))
    metadata = (*token_metadata(TOKEN), *life_metadata(rank, 0))
    calls = {name: methods(STORE_SERVICE)[name].bind(channel) for name in ("Attach", "OpenTensorStream")}
    asks = attach_request(make_spec(num_ranks), rank=rank)
    asks.process.CopyFrom(translate.process_to_pb(this_process()))
    calls["Attach"](asks, metadata=metadata, timeout=WAIT)
    for _ in range(tensor_connections(1)):
        asked = pb.OpenTensorStreamRequest(rank=rank, host="127.0.0.1")
        opening = calls["OpenTensorStream"](asked, metadata=metadata, timeout=WAIT)
        connection = socket.create_connection(("127.0.0.1", opening.port), timeout=WAIT)
        stack.enter_context(closing(connection))
        connection.sendall(opening.ticket)
        assert connection.recv(1) == WELCOME


def test_an_owner_has_as_many_files_open_as_its_ranks_make() -> None:
    """Each rank here is on the owner's host and has one link."""
    with owners(1) as ((address,), pid), ExitStack() as stack:
        found = {}
        for rank in range(40):
            as_rank(stack, address, rank, 40)
            found[rank + 1] = open_files(pid)
    a_rank = 1 + tensor_connections(1) + 1  # its gRPC connection, those for tensors, its process
    assert found[40] - found[20] == 20 * a_rank
    assert found[20] - 20 * a_rank < PROCESS / 2, "what it has open without ranks; Ray adds as much"
    said = [files_of_owner(ranks, 1, ranks) for ranks in (20, 40)]
    assert 20 * a_rank <= said[1] - said[0] <= 3 * 20 * a_rank
    assert found[40] <= said[1]


def test_a_rank_has_as_many_files_open_as_owners_make() -> None:
    """Connections for tensors are opened when there is none to spare, so there may be fewer than there could be."""
    found = {}
    for num_owners in (1, 2, 6):  # the first time, the process opens what its links share
        with owners(num_owners) as (addresses, _):
            before = open_files(os.getpid())
            with started(connected(addresses), make_spec(1)) as ranks:
                take_step(ranks, [random_grads(ranks[0].spec, 1)], 0.5)
                assert ranks[0].fetch()
                found[num_owners] = open_files(os.getpid()) - before
    per_owner = (found[6] - found[2]) / 4
    least, most = 1 + 1 + 1, 1 + 1 + 1 + tensor_connections(6)  # gRPC's connection, an eventfd, the owner's process
    assert least < per_owner <= most
    assert found[6] <= files_of_rank(6, 6)


def test_a_rank_has_no_connection_to_a_door_of_another_host_once_it_has_attached() -> None:
    with owners(6, num_doors=4) as (addresses, _), ExitStack() as stack:
        before, ownership = open_files(os.getpid()), Ownership(6, doors=4)
        there = connected(addresses, ownership=ownership, share=SHARED_MEMORY)
        ranks = stack.enter_context(started(there, make_spec(1)))
        take_step(ranks, [random_grads(ranks[0].spec, 1)], 0.5)
        assert open_files(os.getpid()) - before <= files_of_rank(6, 1, 4) - PROCESS - 3 * (1 + 1)

        def reached() -> list[bool]:
            ports = {each.raddr.port for each in psutil.Process().net_connections("tcp") if each.raddr}
            return [int(address.rpartition(":")[2]) in ports for address in addresses]

        until(lambda: reached() == [True] * 2 + [False] * 4)


@pytest.mark.parametrize("num_owners", [1, 2, 3, 4, 7, 8, 64, 256])
def test_a_rank_has_no_more_transfers_with_an_owner_than_threads_for_it(num_owners: int) -> None:
    threads = TransferThreads(num_owners, "rank 0")
    threads.close()
    assert most_transfers(num_owners) == threads.streams + min(3 * threads.streams, threads.pushes._max_workers)
    assert tensor_connections(num_owners) <= 4


@pytest.mark.parametrize(("limit", "num_owners"), [(1024, 8), (4096, 64), (1 << 20, 8), (300, 1)])
def test_the_most_ranks_are_those_that_fit(limit: int, num_owners: int) -> None:
    most = most_ranks(limit, num_owners)
    assert files_of_owner(most + 1, num_owners, num_owners - 1) > limit
    assert most == 0 or files_of_owner(most, num_owners, num_owners - 1) <= limit


@pytest.mark.skipif(why_no_sharing() is not None, reason="no memory that processes share here")
def test_slabs_of_a_host_are_among_what_neighbours_make() -> None:
    def slabs() -> int:
        files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sum(".slab" in os.readlink(file) for file in files if os.path.lexists(file))

    before = slabs()
    with started(over_grpc(3, 3, shares=lambda owner: True), make_spec(3)) as ranks:
        take_step(ranks, [random_grads(ranks[0].spec, rank) for rank in range(3)], 0.5)
        neighbours = files_of_rank(1, 5) - files_of_rank(1, 0)
        assert 6 * 5 < slabs() - before <= 6 * neighbours, "of six processes together, which are this one"
