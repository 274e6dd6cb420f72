"""A peer whose machine vanishes and comes back without what it knew: connections stay half open, then end by RST."""

from __future__ import annotations

from typing import Any

import pytest

from rayzero.concurrency.processes import ProcessIdentity
from rayzero.errors import HandshakeError, StateLostError
from rayzero.store.host import owner_link
from rayzero.store.owner import handlers
from rayzero.store.remote import handshake
from store.proxy import Proxy
from store.stores import connected, serving
from store.toy import make_spec, masters, random_grads, start, take_step


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``machines(name, ...)``: from now on, owners (handlers) or ranks (handshake) that begin in this process are on a
    machine that nobody else sees into."""

    def be(name: str, *whose: Any) -> None:
        for module in whose:
            monkeypatch.setattr(module, "this_process", lambda: ProcessIdentity(name, 1, 1))

    monkeypatch.setattr(owner_link.SeenProcess, "open", lambda _: None)
    return be


@pytest.mark.parametrize(
    ("outlives", "said"),
    [(False, "another process answers as optimizer 0 at .*: its host has come back, perhaps"), (True, "lacks some")],
)
def test_an_owner_that_comes_back_without_its_shards_is_not_taken_for_the_one_before(
    outlives: bool, said: str, machines: Any
) -> None:
    """``outlives``: the rank would go on with a successor, which has what its predecessor had."""
    spec = make_spec(1)
    machines("first boot", handlers)
    with (
        serving() as (before,),
        Proxy(before.address) as proxy,
        connected([proxy], outlives_owners=outlives) as (store,),
    ):
        ranks = start([store], spec)
        take_step(ranks, [random_grads(spec, 1)], 0.5)
        proxy.freeze()
        machines("second boot", handlers)
        with serving() as (after,):
            proxy.come_back(after.address)
            with pytest.raises(StateLostError, match=said):
                take_step(ranks, [random_grads(spec, 2)], 0.5)


def test_a_rank_that_comes_back_without_what_it_knew_is_refused_and_does_not_hinder_the_one_before(
    machines: Any,
) -> None:
    """The owner still takes the connection of the one before for open. (A run that replaces ranks says that one is
    lost, and gives the next another life: tests/store/test_lives.py.)"""
    spec = make_spec(1)
    machines("first boot", handshake)
    with serving() as (owner,), Proxy(owner.address) as proxy, connected([proxy]) as (before,):
        ranks = start([before], spec)
        take_step(ranks, [random_grads(spec, 1)], 0.5)
        proxy.freeze()
        machines("second boot", handshake)
        with connected([owner]) as (after,), pytest.raises(HandshakeError, match="but this run replaces no ranks"):
            after.attach(spec)
        proxy.come_back(owner.address)
        take_step(ranks, [random_grads(spec, 2)], 0.5)
        assert masters(ranks[0])
