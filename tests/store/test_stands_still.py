"""A process that stands still (SIGSTOP) is noticed by whoever waits for it, named, and ended without a wait."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver
from multiprocessing import resource_tracker as tracker
from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch
from forked import Forked, forked

import rayzero
from rayzero.engine.context import RankContext
from rayzero.errors import StallError
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.shm.signals import why_no_sharing
from rayzero.testing import run_ranks
from store.stores import TOKEN, connect, connected, owner_process
from store.toy import WAIT, Rank, make_spec, random_grads, started, take_step

TIMEOUT_S = 3.0
BUSY_S = 60.0  # what a crowded machine may add to any of the times here

WAYS = ["grpc"] if why_no_sharing() is not None else ["grpc", "shm"]


@contextmanager
def one_rank(way: str, away: int, slab_dir: Path) -> Iterator[tuple[Rank, Forked]]:
    """A rank that has attached to two owners; the process of owner ``away``, the other one is here."""
    share = slab_dir if way == "shm" else None
    with ExitStack() as stack:
        process, address = stack.enter_context(owner_process(away, share=share))
        models = HostedModels(1 - away, 2, share=share)
        stack.callback(models.close)
        server = stack.enter_context(serve_models(models, token=TOKEN))
        addresses = [server.address, address] if away else [address, server.address]
        connect([process], addresses)
        server.connect_peers(addresses)
        stores = connected(addresses, share=share, stall_timeout=TIMEOUT_S)
        (rank,) = stack.enter_context(started(stores, make_spec(1)))
        yield rank, process


def stand_still(pid: int) -> None:
    """Stop every thread of a process: on a crowded machine, some may still run when the signal is sent."""
    os.kill(pid, signal.SIGSTOP)
    threads = [psutil.Process(thread.id) for thread in psutil.Process(pid).threads()]
    while any(thread.status() != psutil.STATUS_STOPPED for thread in threads):
        time.sleep(0.01)


@pytest.mark.spread(1)
@pytest.mark.parametrize("away", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_an_owner_that_stands_still_is_named_by_whatever_waits_for_it(way: str, away: int, slab_dir: Path) -> None:
    """A fetch, the norm, and over gRPC a push; then the store closes soon. Owner 0 leads."""
    with one_rank(way, away, slab_dir) as (rank, process):
        spec = rank.spec
        take_step([rank], [random_grads(spec, 1)])
        rank.fetch()
        stand_still(process.pid)
        began = time.monotonic()
        pushes = [rank.push_unit(unit, random_grads(spec, 2)) for unit in range(len(spec.layout.units))]
        waits = [rank.fetch_unit(unit, 2)[0] for unit in range(len(spec.layout.units))]
        if way == "grpc":
            waits += pushes
        waits.append(rank.finish())
        texts = []
        for wait in waits:
            with pytest.raises(StallError) as caught:
                wait.result(WAIT)
            texts.append(str(caught.value))
        noticed = time.monotonic() - began
        still = rf"optimizer {away} at \S+ (does not answer|its link is down since \S+ s \(ping timeout\))"
        named = rf"^rank 0 waits \S+ s for .*({still}|optimizer {away} has not answered with the norm of step 1)"
        assert re.search(named, texts[-1]), texts[-1]
        assert all(re.search(still, text) for text in texts if f"optimizer {away} to take" in text), texts
        assert sum(bool(re.search(named, text)) for text in texts) > 1, texts
        assert TIMEOUT_S <= noticed < 1.5 * TIMEOUT_S + BUSY_S
        began = time.monotonic()
        rank.store.close("stalled")
        assert time.monotonic() - began < 10 + BUSY_S


def stops_in_its_second_step(ctx: RankContext) -> None:
    model = torch.nn.Linear(3, 4)
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(3):
        model(torch.ones(2, 3)).sum().backward()
        if (ctx.rank, step) == (1, 1):
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.step()
        rayzero.full_state_dict(model)
        optimizer.zero_grad()


@pytest.mark.spread(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_stands_still_is_named_and_its_process_ended(way: Literal["grpc", "shm"]) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(StallError, match=r"rank 0 waits \S+ s for .*: rank 1 has not finished step 1"):
        run_ranks(stops_in_its_second_step, 2, 2, way, processes=True, stall_timeout=8.0)  # they also start
    pythons = {tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}  # for all later processes, too
    assert {child.pid for child in psutil.Process().children()} - before <= pythons


@pytest.mark.parametrize("stops", [False, True])
def test_a_deadline_that_passes_while_the_caller_stands_still_says_nothing_of_the_owner(stops: bool) -> None:
    """The owner takes connections, and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, forked(ASKS, *server.getsockname()) as caller:
        assert caller.said() == "asked"
        if stops:
            stand_still(caller.pid)
            time.sleep(3.0)
            caller.send_signal(signal.SIGCONT)
        assert caller.said() == ("BrokenLinkError" if stops else "NoAnswerError")


ASKS = """
    import sys, threading
    from rayzero.errors import RayZeroError
    from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
    from rayzero.store.host.channel import Caller
    from rayzero.store.host.channel import Channel
    from rayzero.store.wire.rpc import LinkNumber
    channel = Channel(Caller.rank(0), "optimizer 0", ":".join(sys.argv[1:]), LinkNumber("rank 0", 1), (), None)
    call = channel.start("Describe", pb.DescribeRequest(shard=0), 1.5)
    print("asked", flush=True)
    ended = threading.Event()
    def answered(call):
        try:
            channel.answer(call)
        except RayZeroError as error:
            print(type(error).__name__, flush=True)
        ended.set()
    call.add_done_callback(answered)  # as links do
    ended.wait()
    channel.close()
"""
"""A program that asks an owner at an address, within 1.5 seconds, and says what comes of it."""
