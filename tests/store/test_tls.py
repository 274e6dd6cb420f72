"""Owners and ranks with certificates: who is let in, what each role may call, and that training goes on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import grpc
import pytest

from rayzero.errors import HandshakeError, TransferError
from rayzero.security.authority import Authority
from rayzero.security.clients import is_loopback
from rayzero.security.credentials import ANY_RANK, FOLLOWER, OWNER, Identity, follower_token, identity_of, name_of_rank
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.server import OwnerServer
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.wire.rpc import (
    FOLLOWER_SERVICE,
    OWNER_SERVICE,
    STORE_SERVICE,
    LinkNumber,
    Metadata,
    from_status,
    life_metadata,
    methods,
    open_channel,
    token_metadata,
)
from rayzero.telemetry.names import LINK_RECONNECTS
from rayzero.telemetry.recorder import MemoryRecorder
from store.proxy import Proxy
from store.stores import TOKEN, connected, serving
from store.test_tensor_streams import ask, member
from store.toy import WAIT, make_spec, masters, random_grads, start, started, take_step
from tests.support.waiting import until

RUN = Authority("this one", on_loopback=True)
OTHER = Authority("this one", on_loopback=True)  # of a run of the same name
OWN = Identity(RUN.issue("optimizer", [OWNER]))


def of_rank(rank: int) -> Identity:
    return Identity(RUN.issue(f"rank {rank}", [name_of_rank(rank)]))


def refusal(
    server: OwnerServer, shown: Identity | None, service: str, name: str, metadata: Metadata, sent: Any = None
) -> Any:
    """The error of a call to one method. ``sent``: its request; None: an empty one."""
    method = methods(service)[name]
    with open_channel(server.address, shown) as channel:
        try:
            answer = method.bind(channel)(sent or method.request(), metadata=metadata, timeout=WAIT)
            list(answer if method.server_streaming else [])
        except grpc.RpcError as error:
            return from_status(error, "the owner")
    return None


@contextmanager
def one_step_goes_on(servers: list[OwnerServer]) -> Iterator[None]:
    """Before the block and after it, a rank that is let in takes a step."""
    with started(connected(servers, tls=of_rank(0)), make_spec(1)) as ranks:
        take_step(ranks, [random_grads(ranks[0].spec, 1)], 0.5)
        yield
        take_step(ranks, [random_grads(ranks[0].spec, 2)], 0.5)
        assert masters(ranks[0])


@pytest.mark.promise("exact", "tls")
def test_steps_over_tls() -> None:
    with serving(2, tls=OWN) as servers, one_step_goes_on(servers):
        pass


@pytest.mark.parametrize("tls", [None, OWN], ids=["plain", "tls"])
def test_steps_over_ipv6(tls: Identity | None) -> None:
    shown = None if tls is None else of_rank(0)
    with serving(2, host="::1", tls=tls) as servers, connected(servers, tls=shown) as stores:
        assert all(server.address.startswith("[::1]:") for server in servers)
        spec = make_spec(1)
        ranks = start(stores, spec)
        take_step(ranks, [random_grads(spec, 1)], 0.5)
        assert masters(ranks[0])


STRANGERS = {
    "no TLS": None,
    "no certificate of the run": OTHER.issue("rank 0", [name_of_rank(0)]),
    "another authority's trust": replace(OTHER.issue("rank 0", [name_of_rank(0)]), authority=OWN.now.authority),
    "an expired certificate": RUN.issue("rank 0", [name_of_rank(0)], timedelta(seconds=-1)),
    "another's key": replace(of_rank(0).now, key=of_rank(0).now.key),
}


@pytest.mark.promise("safe", "tls")
@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_with_the_token_is_not_let_in(stranger: str) -> None:
    with serving(tls=OWN) as servers, one_step_goes_on(servers):
        for service, name in ((STORE_SERVICE, "Describe"), (OWNER_SERVICE, "Abort")):
            said = refusal(servers[0], identity_of(STRANGERS[stranger]), service, name, token_metadata(TOKEN))
            assert isinstance(said, TransferError), said


def test_a_client_that_shows_nothing_is_not_let_in() -> None:
    with serving(tls=OWN) as (server,):
        trusting = grpc.ssl_channel_credentials(OWN.now.authority)
        options = (("grpc.ssl_target_name_override", OWNER),)
        abort = methods(OWNER_SERVICE)["Abort"]
        with grpc.secure_channel(server.address, trusting, options) as channel, pytest.raises(grpc.RpcError) as refused:
            abort.bind(channel)(abort.request(), metadata=token_metadata(TOKEN), timeout=WAIT)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


RANK_0 = (*token_metadata(TOKEN), *life_metadata(0, 0))
NOT_FOR: dict[str, tuple[str, list[str], Metadata, str]] = {
    **{
        f"what owners ask, {names}": (OWNER_SERVICE, names, token_metadata(TOKEN), " was called with a certificate of")
        for names in ([name_of_rank(0)], [ANY_RANK], [])
    },
    "what another rank asks": (STORE_SERVICE, [name_of_rank(1)], RANK_0, " was called by rank 0 with a certificate of"),
    **{
        f"what no named rank asks, {name}": (STORE_SERVICE, [name], token_metadata(TOKEN), " was called ")
        for name in (name_of_rank(0), ANY_RANK)
    },
    **{  # a call over a newer link ends those of the same caller over older ones
        f"what is sent over a link of {caller}": (
            STORE_SERVICE,
            [name_of_rank(0)],
            (*RANK_0, *LinkNumber(caller, 10**30).metadata),
            f" of rank 0 was sent over a link of {caller}",
        )
        for caller in ("rank 1", "lead")
    },
}
"""service, the names in the certificate, what a call shows, its refusal behind the name of the method"""


@pytest.mark.parametrize("what", NOT_FOR)
def test_no_method_is_for_another_certificate_of_the_run(what: str) -> None:
    service, names, metadata, refused = NOT_FOR[what]
    shown = Identity(RUN.issue("somebody", names))
    with serving(tls=OWN) as servers, one_step_goes_on(servers):
        for method in methods(service):
            said = refusal(servers[0], shown, service, method, metadata)
            assert isinstance(said, HandshakeError), method
            assert str(said).startswith(method + refused)


def test_a_follower_asks_for_what_is_published_and_for_nothing_else() -> None:
    follower, link = Identity(RUN.issue("a follower", [FOLLOWER])), LinkNumber("follower 1", 1).metadata
    own, of_run = token_metadata(follower_token(TOKEN)), token_metadata(TOKEN)
    with serving(tls=OWN) as servers, one_step_goes_on(servers):

        def said(shown: Identity, service: str, name: str, metadata: Metadata) -> str:
            error = refusal(servers[0], shown, service, name, metadata)
            assert isinstance(error, HandshakeError), (name, error)
            return str(error)

        for service in (STORE_SERVICE, OWNER_SERVICE):
            for name in methods(service):
                assert "is not the run's token" in said(follower, service, name, own)
                metadata = (*of_run, *life_metadata(0, 0))
                assert "with a certificate of follower.rayzero" in said(follower, service, name, metadata)
        for name in methods(FOLLOWER_SERVICE):
            assert "is not the run's token" in said(follower, FOLLOWER_SERVICE, name, (*of_run, *link))
            assert "with a certificate of rank-0.rayzero" in said(of_rank(0), FOLLOWER_SERVICE, name, (*own, *link))
            for link_of_others in ((), LinkNumber("rank 0", 1).metadata):
                assert "which one it is" in said(follower, FOLLOWER_SERVICE, name, (*own, *link_of_others))
        opens = pb.OpenTensorStreamRequest(host="127.0.0.1")
        assert refusal(servers[0], follower, FOLLOWER_SERVICE, "OpenTensorStream", (*own, *link), opens) is None


def test_an_owner_asks_as_a_rank_that_it_names() -> None:
    with serving(tls=OWN) as servers:
        said = refusal(servers[0], OWN, STORE_SERVICE, "Describe", token_metadata(TOKEN))
        assert "Describe was called with a certificate of owner.rayzero" in str(said)
        said = refusal(servers[0], OWN, STORE_SERVICE, "Describe", (*token_metadata(TOKEN), *life_metadata(0, 0)))
        assert "no rank has attached yet" in str(said)


def test_a_message_of_a_rank_is_taken_from_that_rank_alone() -> None:
    metadata, refused = (*token_metadata(TOKEN), *life_metadata(0, 0)), []
    with serving(tls=OWN) as servers, one_step_goes_on(servers):
        for name, method in methods(STORE_SERVICE).items():
            named = "rank" in method.request.DESCRIPTOR.fields_by_name
            if named or name == "Finish":
                sent = method.request(rank=1) if named else method.request(report=pb.FinishReport(rank=1))
                said = refusal(servers[0], of_rank(0), STORE_SERVICE, name, metadata, sent)
                assert isinstance(said, HandshakeError), name
                assert str(said) == f"{name} of rank 1 was sent by rank 0"
                refused.append(name)
    assert {"Attach", "Finish", "Commit", "Mean", "Discard", "Write", "Save", "Leave", "Notices"} <= set(refused)


def test_without_tls_a_rank_says_which_one_it_is_too() -> None:
    with serving() as (server,), connected([server]) as stores:
        start(stores, make_spec(1))
        for method in sorted(methods(STORE_SERVICE)):
            said = refusal(server, None, STORE_SERVICE, method, token_metadata(TOKEN))
            assert str(said) == f"{method} was called by a rank that does not say which one it is"


def test_what_a_rank_pushes_has_gradients_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Also a host's sum, which any of its ranks may send."""
    summands = [pb.Summand(rank=rank, attempt=0, pushes=1) for rank in (1, 2)]
    with serving(tls=OWN) as servers, one_step_goes_on(servers):
        for contribution, whose in (
            (pb.Contribution(rank=1, presence=b"\1"), "rank 1"),
            (pb.Contribution(rank=1, presence=b"\1", summands=summands), "rank 1, rank 2"),
            (pb.Contribution(rank=0, presence=b"\1", summands=summands), "rank 1, rank 2"),
        ):
            request = pb.PushRequest(units=[pb.PushRequest.Unit(contribution=contribution, shards=[0])])
            with member(servers[0], shown=of_rank(0)) as stream, pytest.raises(HandshakeError) as refused:
                ask(stream, "Push", request).answer()
            assert str(refused.value) == f"Push of {whose} was sent by rank 0"
    assert "refused 1 call" in caplog.text


@pytest.mark.parametrize("names", [[], [name_of_rank(0)], ["127.0.0.1"]])
def test_a_server_that_is_no_owner_gets_nothing(names: list[str]) -> None:
    posing = Identity(RUN.issue("rank 0", names))
    with (
        serving(tls=posing) as servers,
        connected(servers, tls=of_rank(0)) as (store,),
        pytest.raises(TransferError, match="UNAVAILABLE"),
    ):
        store.attach(make_spec(1))


def test_connections_within_a_host_need_none_unless_they_shall() -> None:
    plain = Identity(replace(OWN.now, on_loopback=False))
    with serving(tls=plain) as servers, connected(servers) as stores:
        assert isinstance(stores[0], RankStore)
        assert start(stores, make_spec(1))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:50", True), ("127.1.2.3", True), ("localhost:9", True), ("[::1]:50", True), ("::1", True),
        ("10.0.0.1:50", False), ("[fd00::1]:50", False), ("fd00::1", False), ("node-3:50", False), ("", False),
    ],
)  # fmt: skip
def test_which_addresses_are_within_a_host(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


# ---- certificates that end


def test_new_certificates_are_shown_to_who_connects_next_and_cut_no_connection() -> None:
    """An owner and a rank that began with certificates that have ended now take steps over what is open, and what they
    open next needs new ones."""
    short = timedelta(seconds=6)  # all begin in that time on a busy machine
    owner, rank = Identity(RUN.issue("optimizer", [OWNER], short)), Identity(RUN.issue("0", [name_of_rank(0)], short))
    spec, recorder = make_spec(1), MemoryRecorder()
    with serving(tls=owner) as servers, started(connected(servers, tls=rank, recorder=recorder), spec) as ranks:
        take_step(ranks, [random_grads(spec, 1)], 0.5)
        time.sleep(max(0.0, rank.now.ends.timestamp() + 0.1 - time.time()))
        assert owner.now.have_ended
        take_step(ranks, [random_grads(spec, 2)], 0.5)  # over connections that live on
        assert status_of_call(servers[0], OWN) is grpc.StatusCode.UNAVAILABLE, "the owner's has ended"
        owner.renew(RUN.issue("optimizer", [OWNER]))
        assert status_of_call(servers[0], OWN) is None
        assert status_of_call(servers[0], Identity(owner.now)) is None
        assert status_of_call(servers[0], Identity(RUN.issue("x", [OWNER], -short))) is grpc.StatusCode.UNAVAILABLE
        take_step(ranks, [random_grads(spec, 3)], 0.5)
        assert recorder.total(LINK_RECONNECTS) == 0
        assert masters(ranks[0])


def status_of_call(server: OwnerServer, shown: Identity) -> grpc.StatusCode | None:
    """What becomes of a call over a new connection; None: it is answered."""
    method = methods(OWNER_SERVICE)["Describe"]
    with open_channel(server.address, shown) as channel:
        try:
            method.bind(channel)(method.request(), metadata=token_metadata(TOKEN), timeout=WAIT)
        except grpc.RpcError as error:
            return error.code()
    return None


def test_a_link_that_is_cut_when_certificates_have_ended_is_opened_with_new_ones() -> None:
    """Until the run has renewed them, the link says why it cannot be opened."""
    rank, spec = of_rank(0), make_spec(1)
    with (
        serving(tls=OWN) as (server,),
        Proxy(server.address) as proxy,
        connected([proxy], tls=rank) as stores,
    ):
        ranks = start(stores, spec)
        take_step(ranks, [random_grads(spec, 1)], 0.5)
        rank.renew(RUN.issue("rank 0", [name_of_rank(0)], timedelta(seconds=-1)))
        proxy.cut()
        (link,) = stores[0].connection._links.values()
        until(lambda: "; the certificate of rank 0 ended at 2" in str(link.down()))
        rank.renew(RUN.issue("rank 0", [name_of_rank(0)]))
        take_step(ranks, [random_grads(spec, 2)], 0.5)
        assert masters(ranks[0])
