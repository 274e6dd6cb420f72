"""Links that break and are opened again: nothing is lost, executed twice or waited for without end."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from rayzero.concurrency.backoff import backoff
from rayzero.concurrency.futures import DONE
from rayzero.concurrency.processes import ProcessIdentity
from rayzero.errors import RankLeftError, StallError, StoreClosedError, StoreError, TransferError
from rayzero.owner.service import ShardService
from rayzero.protocol.messages import Action, Decision, Norm, Record
from rayzero.store.owner.calls.rank_links import RunningCalls
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.peers import RemotePeer
from rayzero.store.owner.server import serve_models
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote import handshake
from rayzero.store.remote.owner_table import OwnerTable
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.store.shm.signals import why_no_sharing
from rayzero.store.wire.payload import CHUNK_BYTES
from rayzero.store.wire.rpc import (
    OWNER_SERVICE,
    STORE_SERVICE,
    CallTerms,
    LinkNumber,
    break_of,
    link_of,
    methods,
    transfers,
)
from rayzero.telemetry.names import LINK_DOWN_SECONDS, LINK_RECONNECTS, TRANSFER_RETRIES
from store.faults import FAULTS, LINKS, difference, make_spec, net, outcome, ranks_of, run, sharing, undisturbed
from store.proxy import Proxy, all_of
from store.stores import TOKEN, connect, connected, owner_process, seeing_transfers
from store.toy import WAIT, equal, make_large_spec, masters, random_grads, start, started, take_step
from store.toy import make_spec as toy_spec
from tests.support.waiting import until

SHARES = why_no_sharing() is None


# ---- faults at random moments (faults.py tries more seeds, and says how to replay one)


@pytest.mark.spread(1)
@pytest.mark.parametrize("which", LINKS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_whose_links_break_ends_with_the_bits_of_one_whose_links_do_not(
    seed: int, fault: str, which: str
) -> None:
    differs = run(seed, fault, which)
    assert not differs, f"run({seed}, {fault!r}, {which!r}) of tests/store/faults.py"


# ---- a call that is executed, whose answer is lost


class LosesAnswers(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Executes the first calls of a method, cuts all connections, and only then answers."""

    def __init__(self, method: str, calls: int) -> None:
        self.method, self.left, self.lost, self.executed = method, calls, 0, 0
        self.proxies: list[Proxy] = []

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if not details.method.endswith(f"/{self.method}"):
            return handler
        formats = handler.request_deserializer, handler.response_serializer

        async def one(requests: Any, context: Any) -> Any:
            answer = await handler.stream_unary(requests, context)
            await self._lose()
            return answer

        async def many(requests: Any, context: Any) -> None:
            await handler.stream_stream(requests, context)
            await self._lose()

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(many, *formats)
        return grpc.stream_unary_rpc_method_handler(one, *formats)

    async def see(self, method: str, answer: Any, request: bytes) -> Any:
        """A transfer."""
        answered = await answer()
        if method == self.method:
            await self._lose()
        return answered

    async def _lose(self) -> None:
        self.executed += 1
        if self.left > 0 and self.proxies:
            self.left -= 1
            self.lost += 1
            await asyncio.get_running_loop().run_in_executor(None, all_of(self.proxies, Proxy.cut))


_REPEATED = sorted(
    {name for service in (STORE_SERVICE, OWNER_SERVICE) for kind in (methods, transfers) for name in kind(service)}
)
_NEVER = ("Notices", "Describe", "Leave", "Abort", "GetDecision", "Redo", "Keep", "GetKept")
_NEVER += ("DescribeEpoch", "GiveShards", "Ask", "Mute", "GetHost")  # test_next_epoch.py, test_lead_questions.py
# no answer to lose, or not in the run
_HERE = ("Share", "Bring")  # what a rank asks owners of its host


@pytest.mark.spread(2)
@pytest.mark.parametrize("method", [method for method in _REPEATED if method not in _NEVER])
def test_a_call_whose_answer_is_lost_is_repeated_and_counts_once(method: str, tmp_path: Path) -> None:
    if method in _HERE and not SHARES:
        pytest.skip("no shared memory here")
    way = "mixed" if method in _HERE else "grpc"
    expected, _ = undisturbed(way)
    loses, spec = LosesAnswers(method, 3), make_spec()
    with seeing_transfers(loses.see), net(spec, sharing(way), interceptors=[loses]) as made:
        loses.proxies = made.links("all")
        with ranks_of(made, spec, way) as ranks:
            found = outcome(ranks, tmp_path)
        assert not difference(found, expected)
        assert 1 <= loses.lost < loses.executed


def test_a_decision_whose_answer_is_lost_is_asked_for_again(tmp_path: Path) -> None:
    loses, spec = LosesAnswers("GetDecision", 1), toy_spec(2)
    with net(spec, interceptors=[loses]) as made, ranks_of(made, spec) as ranks:
        loses.proxies = made.links("all")
        decision = ranks[0].store.decision(0)
        take_step(ranks, [random_grads(spec, 1), random_grads(spec, 2)])
        assert decision.result(WAIT).step == 0
        assert loses.lost == 1


def test_a_leave_whose_answer_is_lost_counts_once() -> None:
    loses, spec = LosesAnswers("Leave", 1), toy_spec(2)
    with net(spec, interceptors=[loses]) as made, ranks_of(made, spec) as ranks:
        loses.proxies = made.links("all")
        norm = ranks[0].finish()
        ranks[1].store.close("enough")
        with pytest.raises(RankLeftError, match=r"rank 1 left .*\(enough\)"):
            norm.result(WAIT)
        assert loses.lost == 1


def test_an_abort_reaches_owners_whose_link_is_cut() -> None:
    spec = toy_spec(2)
    with net(spec) as made, ranks_of(made, spec) as ranks:
        take_step(ranks, [random_grads(spec, 1), random_grads(spec, 2)])
        all_of(made.links("lead-owner"), Proxy.cut)()
        waits = [ranks[0].fetch_unit(unit.index, 2)[0] for unit in spec.layout.units]
        ranks[0].finish()
        ranks[1].store.close("enough")
        for wait in waits:
            with pytest.raises(RankLeftError, match="enough"):
                wait.result(WAIT)


# ---- what arrives late


def test_calls_of_an_earlier_link_are_ended_and_refused() -> None:
    calls, ended = RunningCalls(1), []
    older, newer = LinkNumber("rank 0", 5), LinkNumber("rank 0", 6)

    async def call(link: LinkNumber | None, seconds: float = WAIT) -> None:
        try:
            with calls.running(link):
                await asyncio.sleep(seconds)
        except TransferError as error:
            ended.append(str(error))

    async def both() -> None:
        running = [asyncio.create_task(call(link)) for link in (older, LinkNumber("rank 1", 1), LinkNumber("lead", 1))]
        await asyncio.sleep(0)
        await call(newer, 0)
        await running[0]
        await call(older)
        await call(newer, 0)
        await call(None, 0)
        assert [task.done() for task in running] == [True, False, False]
        for task in running[1:]:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(both())
    assert ended == ["optimizer 1: rank 0 has opened a newer link than that of this call"] * 2


def test_link_numbers_cross_the_wire_and_grow() -> None:
    first = LinkNumber("rank 3", 0).next()
    assert link_of(first.metadata) == first
    assert first.number < first.next().number
    assert LinkNumber("lead", 1 << 62).next().number == (1 << 62) + 1  # a clock that goes back
    assert link_of(()) is None
    with pytest.raises(StoreError, match="must be a caller and a number"):
        link_of((("rayzero-link", "rank x"),))


# ---- back-off, and how it ends


def test_pauses_grow_to_two_seconds_and_differ() -> None:
    assert list(islice(backoff(lambda: 0.0), 8)) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert list(islice(backoff(lambda: 1.0), 3)) == [0.025, 0.05, 0.1]
    assert list(islice(backoff(), 9)) != list(islice(backoff(), 9))


@pytest.mark.spread(1)
@pytest.mark.parametrize("lead", [True, False])
def test_a_link_that_stays_down_ends_waits_that_stall_and_is_named(lead: bool) -> None:
    spec = toy_spec(2)
    with net(spec) as made, ranks_of(made, spec, stall_timeout=3.0) as ranks:
        take_step(ranks, [random_grads(spec, 1), random_grads(spec, 2)])
        for rank in ranks:
            rank.fetch()
        owner = made.lead if lead else next(i for i in range(3) if i != made.lead)
        for proxy in made.links("rank-lead" if lead else "rank-owner"):
            proxy.stop()
        shards = [ranks[0].fetch_unit(unit.index, 2)[0] for unit in spec.layout.units]
        pushes = [ranks[0].push_unit(unit.index, random_grads(spec, 3)) for unit in spec.layout.units]
        down = rf"optimizer {owner} at \S+: its link is down since \S+ s \((?!locally cancelled)\D+\)"
        named = rf"rank 0 waits \S+ s for .*{down}"
        texts = []
        for wait in [*pushes, *shards, *([ranks[0].finish()] if lead else [])]:
            try:
                wait.result(WAIT)
            except StallError as error:
                texts.append(str(error))
        assert any(re.search(named + ".*of a Push|of a Push" + ".*its link is down", text) for text in texts), texts
        assert sum(bool(re.search(named, text)) for text in texts) >= 2, texts
        began = time.monotonic()
        ranks[0].store.close()
        assert time.monotonic() - began < WAIT


@pytest.mark.thorough
def test_a_link_that_breaks_again_and_again_hides_no_stall() -> None:
    """It comes back each time, but of three chunks only the first gets through."""
    spec = make_large_spec(2)
    with net(spec) as made, ranks_of(made, spec, stall_timeout=3.0) as ranks:
        ranks[0].fetch()
        for proxy in made.for_tensors:
            proxy.cut_after(*[3 * CHUNK_BYTES // 2] * 10_000)
        push = ranks[0].push_unit(spec.layout.units[-1].index, random_grads(spec, 1))
        assert isinstance(push.exception(WAIT), StallError)
        assert made.recorder.total(LINK_RECONNECTS, peer="optimizer") > 2


def test_a_shard_whose_link_is_cut_between_its_chunks_comes_again_whole() -> None:
    spec = make_large_spec(2)
    grads = [random_grads(spec, rank) for rank in range(2)]
    found = []
    for cuts in ((), (0.5, 1.5, 2.5)):
        with net(spec) as made, ranks_of(made, spec) as ranks:
            for proxy in made.for_tensors:
                proxy.cut_after(*(int(each * CHUNK_BYTES) for each in cuts))
            take_step(ranks, grads)
            found.append(ranks[1].fetch() | masters(ranks[0]))
            assert (made.recorder.total(TRANSFER_RETRIES) > 2) == bool(cuts)
    assert equal(*found)


@pytest.mark.spread(2)
@pytest.mark.parametrize("which", ["rank-owner", "lead-owner", "rank-lead"])
def test_a_server_of_another_run_at_an_owners_port_is_a_link_that_is_down(which: str) -> None:
    """The port of an owner that ended may be another process's by the time a link is opened again."""
    spec = toy_spec(2)
    with (
        net(spec) as made,
        serve_models(HostedModels(0, 1), token="another run's") as other,
        ranks_of(made, spec) as ranks,
        ThreadPoolExecutor(1) as threads,
    ):
        take_step(ranks, [random_grads(spec, 1), random_grads(spec, 2)])
        proxies = made.links(which)
        there = [proxy.target for proxy in proxies]
        for proxy in proxies:
            proxy.come_back(other.address)
        step = threads.submit(take_step, ranks, [random_grads(spec, 3), random_grads(spec, 4)])
        with pytest.raises(FutureTimeoutError):
            step.result(0.5)
        for proxy, (host, port) in zip(proxies, there, strict=True):
            proxy.come_back(f"{host}:{port}")
        step.result(WAIT)
        for rank in ranks:
            rank.fetch()


def test_a_link_of_the_lead_that_stays_down_ends_the_step_and_is_named() -> None:
    spec = toy_spec(2)
    with net(spec, peer_timeout_s=0.5) as made, ranks_of(made, spec) as ranks:
        take_step(ranks, [random_grads(spec, 1), random_grads(spec, 2)])
        owner = next(index for index in range(3) if index != made.lead)
        made.for_lead[owner].stop()
        norms = [rank.finish() for rank in ranks]
        with pytest.raises(StoreError, match=rf"optimizer {owner} at \S+: its link is down since \S+ s"):
            norms[0].result(WAIT)


def test_a_successor_that_the_lead_meets_first_redoes_what_is_recorded_before_any_other_call(tmp_path: Path) -> None:
    """The lead may be a successor itself, which has never met the owner that died."""
    done: list[str] = []

    def redo(_: ShardService, record: Record) -> Future[None]:
        done.append(f"redo {record.decision.step}")
        return DONE

    def begin(_: ShardService, step: int, directory: Path) -> Future[None]:
        done.append(f"save {step}")
        return DONE

    what: dict[str, Any] = {"attempts": (0,), "action": Action.APPLY, "scale": 1.0, "norm": 1.0, "hyper": ()}
    records = [
        Record(decision=Decision(step=step, **what), reports=(), norm=Norm(step=step, total=1.0, finite=True))
        for step in range(2)
    ]
    with (
        patch.object(ShardService, "redo", redo),
        patch.object(ShardService, "begin_checkpoint", begin),
        serve_models(HostedModels(1, 2), token=TOKEN) as server,
        closing(RemotePeer(1, "127.0.0.1:1", CallTerms(token=TOKEN), succeeds=True)) as peer,
    ):
        peer.open(lambda error: done.append(str(error)))
        begun = peer.begin_checkpoint(5, tmp_path)
        with pytest.raises(FutureTimeoutError):
            begun.result(0.2)
        peer.succeed(server.address, records).result(WAIT)
        begun.result(WAIT)
        assert done == ["redo 0", "redo 1", "save 5"]


def test_closing_ends_every_wait_for_a_link_at_once() -> None:
    spec = toy_spec(1)
    with net(spec) as made, started(connected(made.for_ranks, stall_timeout=600.0), spec) as (rank,):
        for proxy in made.for_ranks:
            proxy.stop()
        waits: list[Future[Any]] = [rank.push_unit(0, random_grads(spec, 1)), rank.fetch_unit(0)[0], rank.finish()]
        time.sleep(1.0)  # the pauses between two tries are long now
        began = time.monotonic()
        rank.store.close()
        assert time.monotonic() - began < WAIT
        for wait in waits:
            with pytest.raises(StoreClosedError):
                wait.result(WAIT)


def test_an_owner_that_was_never_there_is_not_waited_for() -> None:
    began = time.monotonic()
    unavailable = r"rank 0, optimizer 0 at 127.0.0.1:1: UNAVAILABLE"
    with connected(["127.0.0.1:1"]) as (store,), pytest.raises(TransferError, match=unavailable):
        store.attach(toy_spec(1))
    assert time.monotonic() - began < WAIT


def test_an_owner_that_dies_before_a_rank_has_met_it_is_waited_for_if_it_gets_a_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rayzero.store.host.owner_link._FIRST_S", 0.1)
    spec = toy_spec(1)
    with net(spec) as made:
        addresses = [proxy.address for proxy in made.for_ranks]
        table = OwnerTable(["127.0.0.1:1", *addresses[1:]])
        store = table.connect(0, RankTerms(token=TOKEN, outlives_owners=True))
        with ThreadPoolExecutor(1) as threads:
            attaching = threads.submit(store.attach, spec)
            time.sleep(0.5)
            assert not attaching.done()
            table.succeed(0, addresses[0])
            assert attaching.result(WAIT).needs_load
        store.close()


@pytest.mark.parametrize(
    ("details", "said"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote "
            "host: connect: Connection refused (111)",
            "connection refused",
        ),
        ("Stream removed (Socket closed)", "socket closed"),
        ("recvmsg:Connection reset by peer (104))", "connection reset by peer"),
        ("keepalive watchdog timeout", "keepalive watchdog timeout"),
    ],
)
def test_why_a_link_broke_is_said_in_a_few_words(details: str, said: str) -> None:
    class Broken(grpc.RpcError):
        def details(self) -> str:
            return details

    assert break_of(Broken()) == said


def test_a_break_is_logged_and_counted_once_at_each_end(caplog: pytest.LogCaptureFixture) -> None:
    spec = toy_spec(2)
    with (
        net(spec) as made,
        ranks_of(made, spec) as ranks,
        ThreadPoolExecutor(1) as threads,
        caplog.at_level(logging.WARNING, "rayzero.store"),
    ):
        with made.for_lead[1].down():
            with made.for_ranks[1].down():
                seen = [f"{name} lost the link to optimizer 1 " for name in ("the lead", "rank 0", "rank 1")]
                seen += [f"optimizer 1 lost the link to rank {number}" for number in range(2)]
                until(lambda: all(any(text.startswith(one) for text in caplog.messages) for one in seen))
                time.sleep(0.25)
            step = threads.submit(take_step, ranks, [random_grads(spec, 1), random_grads(spec, 2)])
            with pytest.raises(FutureTimeoutError):
                step.result(0.1)
        step.result(WAIT)
        for rank in ranks:
            rank.fetch()
        assert made.at_owners.total(LINK_RECONNECTS, peer="rank") == 2
        assert made.at_owners.total(LINK_RECONNECTS, peer="optimizer") == 1
        for peer in ("rank", "optimizer"):
            assert 0 < made.at_owners.total(LINK_DOWN_SECONDS, peer=peer) < 2 * WAIT
        assert made.recorder.total(LINK_RECONNECTS, peer="optimizer") == 2
        assert 2 * 0.25 < made.recorder.total(LINK_DOWN_SECONDS, peer="optimizer") < 2 * WAIT
        of_lead = [text for text in caplog.messages if text.startswith("the lead")]
    for rank_number in range(2):
        lost = [text for text in caplog.messages if f"rank {rank_number} lost the link to optimizer 1 " in text]
        back = [text for text in caplog.messages if text.startswith(f"rank {rank_number}: the link to optimizer 1 ")]
        assert (len(lost), len(back)) == (1, 1), caplog.messages
        assert f"optimizer 1 lost the link to rank {rank_number}" in caplog.messages
        there = f"optimizer 1: the link to rank {rank_number} is back after "
        assert sum(text.startswith(there) for text in caplog.messages) == 1
    assert [" lost the link to optimizer 1 " in text for text in of_lead] == [True, False], of_lead


# ---- a process that is dead, and a rank that does not come back


@pytest.mark.parametrize("dead", [0, 1])
def test_an_owner_that_dies_is_named_at_once(dead: int) -> None:
    """Owner 0 leads. Rank 1 ends no second step: rank 0 waits. Proxies go on listening: no connection is refused."""
    spec = toy_spec(2)
    with owner_process(0) as (zero, a), owner_process(1) as (one, b), Proxy(a) as first, Proxy(b) as second:
        processes, proxies = [zero, one], [first, second]
        connect(processes, [proxy.address for proxy in proxies])
        with started(connected(proxies, 2, stall_timeout=600.0), spec) as ranks:
            take_step(ranks, [random_grads(spec, 1), random_grads(spec, 2)])
            ranks[0].fetch()
            waits: list[Future[Any]] = [ranks[0].fetch_unit(unit.index, 2)[0] for unit in spec.layout.units]
            waits.append(ranks[0].finish())
            began = time.monotonic()
            processes[dead].send_signal(signal.SIGKILL)
            for wait in waits:
                with pytest.raises(StoreError, match=rf"optimizer {dead} \(pid {processes[dead].pid}\) has died"):
                    wait.result(WAIT)
            assert time.monotonic() - began < 10, "the process says so, not the connection, which takes 20 s"


def test_an_owner_that_dies_while_a_rank_attaches_is_not_waited_for() -> None:
    standing = """
        import time
        from rayzero.owner.service import ShardService
        def attach(*_, **__):
            print("attaching", flush=True)
            time.sleep(1000)
        ShardService.attach = attach
    """
    with owner_process(0, 1, first=standing) as (process, address):
        connect([process], [address])
        with connected([address]) as (store,), ThreadPoolExecutor(1) as threads:
            attaching = threads.submit(store.attach, toy_spec(1))
            assert process.said() == "attaching"
            process.send_signal(signal.SIGKILL)
            with pytest.raises(StoreError, match=rf"optimizer 0 \(pid {process.pid}\) has died"):
                attaching.result(WAIT)


def test_the_lead_names_an_owner_that_dies_to_ranks_that_cannot_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayzero.store.host.owner_link.SeenProcess.open", lambda _: None)
    spec = toy_spec(1)
    with owner_process(0) as (zero, a), owner_process(1) as (one, b):
        connect([zero, one], [a, b])
        with started(connected([a, b], stall_timeout=600.0), spec) as (rank,):
            take_step([rank], [random_grads(spec, 1)])
            rank.fetch()
            one.send_signal(signal.SIGKILL)
            with pytest.raises(StoreError, match=rf"optimizer 1 \(pid {one.pid}\) has died"):
                rank.finish().result(WAIT)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks say that they are processes of another host."""
    monkeypatch.setattr(handshake, "this_process", lambda: ProcessIdentity("another host", 1, 1))


def test_a_rank_of_another_host_whose_link_stays_down_is_gone_after_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch)
    spec = toy_spec(2)
    monkeypatch.setattr(handshake, "LEASE", 0.1)
    with net(spec) as made, Proxy(made.servers[made.lead].address) as theirs:
        near = [server.address for server in made.servers]
        far = [theirs.address if owner == made.lead else address for owner, address in enumerate(near)]
        stores = [
            RankStore(RemoteConnection(rank, addresses, RankTerms(token=TOKEN, stall_timeout=60.0)))
            for rank, addresses in enumerate((near, far))
        ]
        ranks = start(stores, spec)
        theirs.refuse(0.5)  # it comes back within its lease
        take_step(ranks, [random_grads(spec, 1), random_grads(spec, 2)])
        theirs.stop()
        began = time.monotonic()
        norm = ranks[0].finish()
        with pytest.raises(RankLeftError, match=r"rank 1 left .*\(its link broke 6 s ago and did not come back\)"):
            norm.result(WAIT)
        assert time.monotonic() - began > 5.5
        for store in stores:
            store.close()


def test_a_supervisor_that_knows_ends_the_wait_for_a_rank_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch)
    spec = toy_spec(2)
    with net(spec) as made, ranks_of(made, spec, stall_timeout=600.0) as ranks:
        norm = ranks[0].finish()
        for server in made.servers:
            server.lost(1, "its actor died: SIGKILL")
        with pytest.raises(RankLeftError, match=r"rank 1 left .*\(its actor died: SIGKILL\)"):
            norm.result(WAIT)


def test_a_rank_that_is_alive_on_this_host_keeps_its_place_without_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its links are refused for longer than its lease; owners see that its process lives."""
    spec = toy_spec(2)
    monkeypatch.setattr(handshake, "LEASE", 2.0 / 60.0)
    with net(spec) as made, ranks_of(made, spec, stall_timeout=60.0) as ranks:
        norm = ranks[0].finish()
        all_of(made.for_ranks, lambda proxy: proxy.refuse(3.0))()
        ranks[1].fetch()
        ranks[1].push(random_grads(spec, 1))
        ranks[1].finish().result(WAIT)
        norm.result(WAIT)
