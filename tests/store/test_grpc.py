"""What only the gRPC store has: tokens, certificates, damaged and broken streams, long waits, lost connections."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from forked import forked
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rayzero import errors
from rayzero.concurrency.futures import settled
from rayzero.config import ZeroConfig
from rayzero.errors import (
    ConfigError,
    HandshakeError,
    RankLeftError,
    RayZeroError,
    StoreClosedError,
    StoreError,
    UnsupportedError,
)
from rayzero.lead.lead import StepLead
from rayzero.protocol.messages import PROTOCOL_VERSION, FinishReport, ModelSpec, StepInputs
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.owner_link import OwnerLink
from rayzero.store.owner.calls.long_calls import WAITING_CALLS, Repeats
from rayzero.store.owner.handlers import RankCalls
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.served_model import ServerTerms
from rayzero.store.owner.server import OwnerServer, serve_models
from rayzero.store.remote.lead_line import RemoteLead
from rayzero.store.remote.owner_table import OwnerTable, connect_store
from rayzero.store.remote.remote_connection import RemoteConnection
from rayzero.store.wire import rpc, translate
from rayzero.store.wire.rpc import (
    _CODES,
    OWNER_SERVICE,
    STORE_SERVICE,
    from_status,
    life_metadata,
    methods,
    to_status,
    token_metadata,
    unseal,
)
from rayzero.store.wire.translate import from_failure, to_failure
from rayzero.telemetry.names import FETCH_SECONDS, PUSH_SECONDS, TRANSFER_BYTES
from rayzero.telemetry.recorder import MemoryRecorder
from store.stores import TOKEN, connected, serving
from store.toy import HYPER, WAIT, equal, make_spec, masters, random_grads, start, started, take_step
from tests.support.leftovers import threads, threads_left
from tests.support.waiting import until

BF16 = torch.bfloat16


@contextmanager
def channel_to(server: OwnerServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def test_a_change_of_the_owners_waits_for_the_lead_to_know_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    attach, asked, held = StepLead.attach, list[threading.Thread](), list[dict[int, int]]()

    def held_meanwhile(lead: StepLead, *args: Any, **options: Any) -> int:
        thread = threading.Thread(target=lambda: held.append(server.hold()))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "there is nothing to hold yet"
        asked.append(thread)
        return attach(lead, *args, **options)

    monkeypatch.setattr(StepLead, "attach", held_meanwhile)
    with serving() as (server,), connected([server]) as (store,):
        store.attach(make_spec(1))
        asked[0].join(WAIT)
        assert held == [{0: 0}]


# ---- who may talk


@pytest.mark.parametrize("service", [STORE_SERVICE, OWNER_SERVICE])
@pytest.mark.parametrize("metadata", [(), token_metadata(""), token_metadata(TOKEN + "x")])
def test_every_method_wants_the_token(service: str, metadata: Any) -> None:
    with serving() as (server,), channel_to(server) as channel:
        for method in methods(service).values():
            call = method.bind(channel)
            request: Any = method.request()

            def ask(call: Any = call, request: Any = request, streams: bool = method.server_streaming) -> None:
                answer = call(request, metadata=metadata, timeout=WAIT)
                list(answer if streams else [])

            with pytest.raises(grpc.RpcError) as refused:
                ask()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.path


def test_health_is_answered_without_a_token() -> None:
    with serving() as (server,), channel_to(server) as channel:
        for service in ("", STORE_SERVICE, OWNER_SERVICE):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_an_empty_token_is_refused_where_it_is_set() -> None:
    with pytest.raises(ConfigError, match="token must not be empty"):
        ServerTerms(token="")


# ---- handshake (rule 9); what two ranks disagree on is in the conformance suite


def attach_request(spec: ModelSpec, **changes: Any) -> pb.AttachRequest:
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "rank": 0,
        "spec": translate.spec_to_bytes(spec),
        "spec_digest": translate.spec_digest(translate.spec_to_bytes(spec)),
        "layout_digest": spec.layout.digest,
        "owner": 0,
        "num_owners": 1,
    }
    return pb.AttachRequest(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"protocol_version": PROTOCOL_VERSION + 1},
            f"rank 0 speaks protocol {PROTOCOL_VERSION + 1}, optimizer 0 speaks {PROTOCOL_VERSION}",
        ),
        ({"owner": 1, "num_owners": 2}, "takes this server for optimizer 1 of 2, but it is optimizer 0 of 1"),
        ({"spec_digest": "0" * 64}, "rank 0 names its spec by 000000000000, which is not the digest of what it sends"),
        ({"layout_digest": "0" * 64}, "rank 0 describes a layout with digest 0000.*, optimizer 0 computes"),
    ],
)
def test_a_handshake_that_does_not_fit_names_both_sides(changes: dict[str, Any], what: str) -> None:
    with serving() as (server,), channel_to(server) as channel:
        attach = methods(STORE_SERVICE)["Attach"].bind(channel)
        metadata = (*token_metadata(TOKEN), *life_metadata(0, 0))
        with pytest.raises(grpc.RpcError) as refused:
            attach(attach_request(make_spec(1), **changes), metadata=metadata, timeout=WAIT)
        error = from_status(refused.value, "optimizer 0")
        assert isinstance(error, HandshakeError)
        with pytest.raises(HandshakeError, match=what):
            raise error


def test_the_lead_must_know_its_peers() -> None:
    with (
        closing(HostedModels(0, 1)) as models,
        serve_models(models, token=TOKEN) as server,
        connected([server]) as (store,),
        pytest.raises(StoreError, match="optimizer 0 leads but has no peers"),
    ):
        store.attach(make_spec(1))


# ---- bytes


def test_the_byte_counters_equal_the_arithmetic() -> None:
    spec = make_spec(1, dtypes=[BF16, torch.float32, BF16], frozen=[2])
    recorder = MemoryRecorder()
    with serving(3) as servers, started(connected(servers, recorder=recorder), spec) as (rank,):

        def moved(direction: str) -> float:
            return recorder.total(TRANSFER_BYTES, direction=direction, transport="grpc")

        units = spec.layout.units
        assert moved("load") == sum(u.numel * (4 if u.trainable else u.dtype.itemsize) for u in units)
        assert moved("fetch") == moved("push") == 0
        rank.fetch()
        rank.fetch()
        assert moved("fetch") == 2 * sum(u.numel * u.dtype.itemsize for u in units)
        rank.push(random_grads(spec, 1))
        assert moved("push") == sum(u.numel * u.dtype.itemsize for u in units if u.trainable)
        rank.push_unit(1, random_grads(spec, 2), seq=0).result(WAIT)  # a repeat travels too
        assert moved("push") == sum(u.numel * u.dtype.itemsize for u in units if u.trainable) + units[1].size_bytes
        until(lambda: recorder.timing(FETCH_SECONDS, transport="grpc").count == 6)  # after what waits for it goes on
        until(lambda: recorder.timing(PUSH_SECONDS, transport="grpc").count == 3)


# ---- waits


def test_many_waiting_ranks_do_not_block_a_push() -> None:
    """A server that gave each waiting call a thread would have none left for the push they all wait for."""
    waiting_ranks = 60
    spec = make_spec(waiting_ranks + 1)
    inputs = StepInputs(edits=(), hyper=(HYPER,))
    with serving() as servers, connected(servers, 2) as (last, many):
        last_rank = start([last, many], spec)[0]
        with channel_to(servers[0]) as channel:
            attach, finish = (methods(STORE_SERVICE)[name].bind(channel) for name in ("Attach", "Finish"))
            norms = []
            for rank in range(1, waiting_ranks + 1):
                metadata = (*token_metadata(TOKEN), *life_metadata(rank, 0))
                if rank > 1:
                    attach(attach_request(spec, rank=rank), metadata=metadata, timeout=WAIT)
                report = FinishReport(step=0, attempt=0, rank=rank, counts=(0, 0, 0))
                request = pb.FinishRequest(report=translate.report_to_pb(report), inputs=translate.inputs_to_pb(inputs))
                norms.append(finish.future(request, metadata=metadata, timeout=WAIT))
            last_rank.push(random_grads(spec, 1))
            assert not any(norm.done() for norm in norms)
            total = last_rank.finish().result(WAIT).total
            assert {norm.result(WAIT).norm.total for norm in norms} == {total}


def test_a_wait_outlasts_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayzero.store.host.lead_questions._AGAIN_S", 0.05)
    with serving() as servers, started(connected(servers, 2), make_spec(2)) as ranks:
        norm = ranks[0].finish()
        decision = ranks[0].store.decision(0)
        ranks[1].fetch()
        ranks[1].push(random_grads(ranks[0].spec, 1))
        time.sleep(0.3)
        assert not norm.done()
        ranks[1].finish().result(WAIT)
        assert norm.result(WAIT).total == decision.result(WAIT).norm


def test_a_dead_process_is_noticed_at_once() -> None:
    with serving(2) as servers, connected(servers, 2, stall_timeout=1000.0) as stores:
        program = f"""
            from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
            from rayzero.store.rank.rank_store import RankStore
            from store.toy import make_spec
            store = RankStore(RemoteConnection(1, {[s.address for s in servers]!r}, RankTerms(token={TOKEN!r})))
            store.attach(make_spec(2))
            print("attached", flush=True)
            input()
        """
        with forked(program) as process:
            ranks = start(stores[:1], make_spec(2))
            assert process.said() == "attached"
            norm, fetch = ranks[0].finish(), ranks[0].fetch_unit(0, 1)[0]
            process.send_signal(signal.SIGKILL)
            for future in (norm, fetch):
                died = rf"rank 1 left .*\(its process, pid {process.pid}, died\), rank 0 is in step 0"
                with pytest.raises(RankLeftError, match=died):
                    future.result(WAIT)


# ---- the end


def test_a_server_that_stops_ends_what_waits_for_it_and_frees_its_port() -> None:
    with serving(2) as servers, started(connected(servers, 2), make_spec(2)) as ranks:
        fetch, norm = ranks[0].fetch_unit(1, 1)[0], ranks[1].finish()
        for server in servers:
            server.stop()
            server.stop()
        with pytest.raises(StoreError):
            fetch.result(WAIT)
        with pytest.raises(StoreError):
            norm.result(WAIT)
        for server in servers:
            host, port = server.address.rsplit(":", 1)
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))) != 0
            with closing(HostedModels(0, 1)) as models:
                OwnerServer(models, ServerTerms(token=TOKEN), port=int(port)).stop()


def test_a_port_that_is_taken_is_an_error() -> None:
    with (
        serving() as (server,),
        closing(HostedModels(0, 1)) as models,
        pytest.raises(StoreError, match=r"optimizer 0 cannot listen on 127.0.0.1:"),
    ):
        OwnerServer(models, ServerTerms(token=TOKEN), port=int(server.address.rsplit(":", 1)[1]))


@pytest.mark.parametrize("late", [False, True])
def test_a_store_that_another_thread_closes_while_it_attaches_leaves_nothing(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its links open, so that the attach fails; or once the owners have answered."""
    errors: list[BaseException] = []

    def close() -> None:
        try:
            stores[0].close("the run ends")
        except BaseException as error:
            errors.append(error)

    closer, left, leave = threading.Thread(target=close, name="closer"), threading.Event(), RemoteConnection.leave

    def leave_first(connection: RemoteConnection, reason: str) -> None:
        leave(connection, reason)
        left.set()

    monkeypatch.setattr(RemoteConnection, "leave", leave_first)

    def close_now() -> None:
        if closer.ident is None:
            closer.start()
            assert left.wait(WAIT)  # as far as it gets while the attach is under way

    patched, name = (RemoteLead, "__init__") if late else (OwnerLink, "open")
    usual = getattr(patched, name)

    def closing_first(patched: Any, *args: Any) -> None:
        close_now()
        usual(patched, *args)

    before = threads()
    with serving(2) as servers, connected(servers, 1) as stores:
        monkeypatch.setattr(patched, name, closing_first)
        with nullcontext() if late else pytest.raises(StoreClosedError, match="the store was closed"):
            stores[0].attach(make_spec(1))
        closer.join(WAIT)
        assert not errors
        assert threads_left(before, "rayzero-rank", "closer") == []


# ---- errors on the wire


class Failed(grpc.RpcError):
    """A failed call as grpc gives it."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
        self._sent = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._sent[0]

    def details(self) -> str:
        return self._sent[1]

    def trailing_metadata(self) -> Any:
        return self._sent[2]


def every_error(cls: type[RayZeroError] = RayZeroError) -> Iterator[type[RayZeroError]]:
    yield cls
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from every_error(child)


@pytest.mark.parametrize("cls", list(every_error()))
def test_every_error_crosses_the_wire_as_itself(cls: type[RayZeroError]) -> None:
    assert cls in _CODES
    for text in ("rank 1: ünïts & \n lines", "x" * 5000):
        code, details, metadata = to_status(cls(text))
        assert len(details) < 250
        for found in (from_status(Failed(code, details, metadata), "x"), from_failure(to_failure(cls(text)))):
            assert (type(found), str(found)) == (cls, text)


def test_an_unknown_failure_is_a_store_error_that_says_it() -> None:
    error = from_status(Failed(grpc.StatusCode.UNKNOWN, "Unexpected <class 'KeyError'>", ()), "rank 1, optimizer 0")
    assert (type(error), str(error)) == (
        StoreError,
        "rank 1, optimizer 0: UNKNOWN: Unexpected <class 'KeyError'>",
    )
    assert str(from_failure(pb.Failure(error="NewError", message="m"))) == "NewError: m"


# ---- select, generated code


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("grpc", "rank 0 uses gRPC to every owner: transport='grpc' is set"),
        ("auto", "rank 0: gRPC (another host or container) to optimizers [0]"),
    ],
)
def test_select_says_why_in_one_line(transport: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    config = ZeroConfig(transport=transport)  # type: ignore[arg-type]
    with serving() as servers, caplog.at_level(logging.INFO, "rayzero.store"):
        table = OwnerTable([server.address for server in servers])
        store = connect_store(0, table, token=TOKEN, config=config, recorder=MemoryRecorder())
        assert store.attach(make_spec(1)).needs_load
        store.close()
    assert [record.getMessage() for record in caplog.records] == [said]
    with pytest.raises(UnsupportedError, match="transport='inproc'"):
        connect_store(0, table, token=TOKEN, config=ZeroConfig(transport="inproc"), recorder=MemoryRecorder())


def test_auto_without_shared_memory_warns_and_shm_refuses(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as servers, caplog.at_level(logging.WARNING, "rayzero.store"):
        options: dict[str, Any] = {"token": TOKEN, "recorder": MemoryRecorder()}
        table = OwnerTable([server.address for server in servers])
        connect_store(0, table, config=ZeroConfig(slab_dir="/nonexistent"), **options).close()
        with pytest.raises(UnsupportedError, match="/nonexistent cannot be written to; use 'auto' or 'grpc'"):
            connect_store(0, table, config=ZeroConfig(slab_dir="/nonexistent", transport="shm"), **options)
    assert caplog.messages == ["rank 0 uses gRPC to every owner: /nonexistent cannot be written to"]


def test_a_load_that_brings_nothing_is_answered_where_nothing_is_wanted() -> None:
    async def compute(act: Callable[[], object]) -> object:
        return act()

    state: Any = SimpleNamespace(
        number=0,
        service=SimpleNamespace(is_loaded=True, owner=0),  # an owner without shards
        compute=compute,
    )
    nothing = pb.LoadRequest(units=[pb.LoadRequest.Unit(unit=0)])  # and no shard
    assert asyncio.run(RankCalls(state).load(nothing, None)) == pb.LoadResponse()


def test_the_same_message_to_another_method_is_another_call() -> None:
    repeats, (request, again) = Repeats(), (pb.WriteShardsRequest(step=3, number=7) for _ in range(2))
    begun, written = (repeats.once(0, method, request, Future[None]) for method in ("BeginShards", "WriteShards"))
    assert begun is not written
    assert repeats.once(0, "BeginShards", again, Future[None]) is begun


def test_a_rank_has_few_calls_that_wait() -> None:
    """Else it could ask for any number of means that never come, and an owner would keep them all."""

    def mean(number: int, values: int = 1) -> Any:
        return pb.MeanRequest(number=number, values=[0.0] * values)

    repeats, large = Repeats(), 5 << 20  # 40 MiB
    waiting = [repeats.once(0, "Mean", mean(number), Future[None]) for number in range(WAITING_CALLS)]
    with pytest.raises(StoreError, match=r"rank 0 has 64 calls of .* waiting here, and asks for one of"):
        repeats.once(0, "Mean", mean(WAITING_CALLS), Future[None])
    assert repeats.once(0, "Mean", mean(7), Future[None]) is waiting[7]
    waiting[0].set_result(None)
    assert repeats.once(0, "Finish", pb.FinishRequest(), lambda: settled("at once")).result(0) == "at once"
    repeats.once(0, "Mean", mean(WAITING_CALLS), Future[None])
    repeats.once(1, "Mean", mean(0, large), Future[None])
    with pytest.raises(StoreError, match=r"rank 1 has 1 call of 40 MiB waiting here, and asks for one of 40 MiB"):
        repeats.once(1, "Mean", mean(1, large), Future[None])


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", ["FinishRequest", "FinishResponse", "CollectResponse", "ApplyRequest"])
def test_a_damaged_message_is_sent_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm, a decision or a report with a flipped bit changes no bit of the training."""

    def train() -> dict[str, torch.Tensor]:
        spec = make_spec(1)
        with serving(2) as servers, started(connected(servers), spec) as ranks:
            for step in range(3):
                take_step(ranks, [random_grads(spec, step)], 0.5)
            return masters(ranks[0])

    expected, damaged = train(), []

    def flip(sealed: bytes, kind_of: type[Any] | None = None, **named: Any) -> Any:
        wanted = kind_of or named["kind"]
        if wanted.DESCRIPTOR.name == kind and not damaged:
            damaged.append(kind)
            sealed = bytes([sealed[0] ^ 16]) + sealed[1:]
        return unseal(sealed, wanted)

    monkeypatch.setattr(rpc, "unseal", flip)
    assert equal(train(), expected)
    assert damaged == [kind]
