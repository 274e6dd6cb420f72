"""Owners and ranks with certificates: who is let in, what each role may call, and that training goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import grpc
import pytest

from rayzero.errors import HandshakeError, TransferError
from rayzero.security.authority import Authority
from rayzero.security.credentials import ANY_RANK, OWNER, Credentials, is_loopback, name_of_rank
from rayzero.store.owner.server import OwnerServer
from rayzero.store.rank.store import RankStore
from rayzero.store.wire.rpc import (
    OWNER_SERVICE,
    STORE_SERVICE,
    Metadata,
    from_status,
    life_metadata,
    methods,
    open_channel,
    token_metadata,
)
from store.stores import TOKEN
from store.test_grpc import connected, serving
from store.toy import WAIT, make_spec, masters, random_grads, start, take_step

RUN = Authority("this one", on_loopback=True)
OTHER = Authority("this one", on_loopback=True)  # of a run of the same name
OWN = RUN.issue("optimizer", [OWNER])


def of_rank(rank: int) -> Credentials:
    return RUN.issue(f"rank {rank}", [name_of_rank(rank)])


def refusal(server: OwnerServer, shown: Credentials | None, service: str, name: str, metadata: Metadata) -> Any:
    """The error of a call to one method."""
    method = methods(service)[name]
    with open_channel(server.address, shown) as channel:
        request: Any = iter([b""]) if method.client_streaming else method.request()
        try:
            answer = method.bind(channel)(request, metadata=metadata, timeout=WAIT)
            list(answer if method.server_streaming else [])
        except grpc.RpcError as error:
            return from_status(error, "the owner")
    return None


@contextmanager
def one_step_goes_on(servers: list[OwnerServer]) -> Iterator[None]:
    """Before the block and after it, a rank that is let in takes a step."""
    spec = make_spec(1)
    with connected(servers, tls=of_rank(0)) as stores:
        ranks = start(stores, spec)
        take_step(ranks, [random_grads(spec, 1)], 0.5)
        yield
        take_step(ranks, [random_grads(spec, 2)], 0.5)
        assert masters(ranks[0])


def test_steps_over_tls() -> None:
    with serving(2, tls=OWN) as servers, one_step_goes_on(servers):
        pass


@pytest.mark.parametrize("tls", [None, OWN], ids=["plain", "tls"])
def test_steps_over_ipv6(tls: Credentials | None) -> None:
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
    "another authority's trust": replace(OTHER.issue("rank 0", [name_of_rank(0)]), authority=OWN.authority),
    "an expired certificate": RUN.issue("rank 0", [name_of_rank(0)], timedelta(seconds=-1)),
    "another's key": replace(of_rank(0), key=of_rank(0).key),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_with_the_token_is_not_let_in(stranger: str) -> None:
    with serving(tls=OWN) as servers, one_step_goes_on(servers):
        for service, name in ((STORE_SERVICE, "Describe"), (OWNER_SERVICE, "Identify")):
            said = refusal(servers[0], STRANGERS[stranger], service, name, token_metadata(TOKEN))
            assert isinstance(said, TransferError), said


def test_a_client_that_shows_nothing_is_not_let_in() -> None:
    with serving(tls=OWN) as (server,):
        trusting = grpc.ssl_channel_credentials(OWN.authority)
        options = (("grpc.ssl_target_name_override", OWNER),)
        identify = methods(OWNER_SERVICE)["Identify"]
        with grpc.secure_channel(server.address, trusting, options) as channel, pytest.raises(grpc.RpcError) as refused:
            identify.bind(channel)(identify.request(), metadata=token_metadata(TOKEN), timeout=WAIT)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("shown", [of_rank(0), RUN.issue("any", [ANY_RANK]), RUN.issue("nobody", [])], ids=str)
def test_what_owners_ask_of_each_other_is_not_for_ranks(shown: Credentials) -> None:
    with serving(tls=OWN) as servers, one_step_goes_on(servers):
        for name in methods(OWNER_SERVICE):
            said = refusal(servers[0], shown, OWNER_SERVICE, name, token_metadata(TOKEN))
            assert isinstance(said, HandshakeError), name
            assert f"{name} was called with a certificate of" in str(said)


def test_what_a_rank_asks_is_for_that_rank_alone() -> None:
    metadata = (*token_metadata(TOKEN), *life_metadata(0, 0))
    with serving(tls=OWN) as servers, one_step_goes_on(servers):
        for shown in (of_rank(1), OWN):
            for name in methods(STORE_SERVICE):
                said = refusal(servers[0], shown, STORE_SERVICE, name, metadata)
                assert isinstance(said, HandshakeError), name
                assert f"{name} was called by rank 0 with a certificate of" in str(said)


def test_a_rank_that_does_not_say_which_one_it_is_may_ask_nothing() -> None:
    with serving(tls=OWN) as servers, one_step_goes_on(servers):
        for name in methods(STORE_SERVICE):
            said = refusal(servers[0], of_rank(0), STORE_SERVICE, name, token_metadata(TOKEN))
            assert isinstance(said, HandshakeError), name


def test_what_is_kept_of_a_loop_is_for_its_next_owner_too() -> None:
    with serving(tls=OWN) as servers, one_step_goes_on(servers):
        assert refusal(servers[0], OWN, STORE_SERVICE, "GetKept", token_metadata(TOKEN)) is None


@pytest.mark.parametrize("names", [[], [name_of_rank(0)], ["127.0.0.1"]])
def test_a_server_that_is_no_owner_gets_nothing(names: list[str]) -> None:
    posing = RUN.issue("rank 0", names)
    with (
        serving(tls=posing) as servers,
        connected(servers, tls=of_rank(0)) as (store,),
        pytest.raises(TransferError, match="UNAVAILABLE"),
    ):
        store.attach(make_spec(1))


def test_connections_within_a_host_need_none_unless_they_shall() -> None:
    plain = replace(OWN, on_loopback=False)
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


def test_refused_calls_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with serving(tls=OWN) as (server,):
        for _ in range(5):
            refusal(server, of_rank(0), OWNER_SERVICE, "Apply", token_metadata(TOKEN))
    (said,) = [line for line in caplog.messages if line.startswith("refused")]
    assert "refused 1 call, the last from ipv4:127.0.0.1:" in said
    assert said.endswith("Apply was called with a certificate of rank-0.rayzero; it takes one of owner.rayzero")
