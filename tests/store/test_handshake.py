"""What a rank asks owners and their successors, and which answers it refuses: without a socket."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest

from rayzero.concurrency.futures import settled
from rayzero.errors import HandshakeError, StateLostError
from rayzero.protocol.messages import SharedPaths
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import Channel
from rayzero.store.host.owner_link import OwnerLink
from rayzero.store.remote.handshake import Handshake

from .toy import make_spec

HERE = pb.SharedFiles(control="/dev/shm/control", tensors=["/dev/shm/params"])


class Owner:
    """An owner that answers at once, or its successor: the link to it and the channel at the same time."""

    def __init__(self, owner: int, answer: pb.AttachResponse, *, knows_spec: bool = True) -> None:
        self.owner, self.name, self.knows_spec = owner, f"optimizer {owner}", knows_spec
        self.answers_with = answer
        self.asked: list[tuple[str, Any]] = []
        self.mirror: pb.SharedFiles | None = None

    def open(self) -> None:
        self.asked.append(("open", None))

    def start(self, method: str, request: Any, timeout_s: float) -> Any:
        copied = type(request)()
        copied.CopyFrom(request)
        self.asked.append((method, copied))
        if method != "Attach":
            return pb.ShareResponse(mirror=self.mirror)
        return self.answers_with if self.knows_spec or request.spec else pb.AttachResponse(needs_spec=True)

    def answer(self, started: Any) -> Any:
        return started

    def ask(self, method: str, request: Any, timeout_s: float) -> Future[Any]:
        return settled(self.start(method, request, timeout_s))


def answer(**fields: Any) -> pb.AttachResponse:
    return pb.AttachResponse(**{"version": 3, "kernel": "avx2"} | fields)


def shaken(*owners: Owner, **said: Any) -> Handshake:
    handshake = Handshake(1, {link.owner: cast(OwnerLink, link) for link in owners}, len(owners), stall_timeout=60.0)
    assert not handshake.has_begun
    handshake.attach(make_spec(), **{"host": "here", "summed": (0, 1)} | said)
    return handshake


def meet(handshake: Handshake, owner: int, successor: Owner, history: pb.LeadHistory | None = None) -> None:
    links = handshake._links
    handshake.greet(links[owner], cast(Channel, successor), history)
    handshake.require_values(links[owner])
    handshake.share_again(links[owner], cast(Channel, successor))


def test_only_an_owner_that_does_not_know_the_spec_gets_it() -> None:
    first, second = Owner(0, answer(), knows_spec=False), Owner(1, answer())
    shaken(first, second)
    sent = [bool(request.spec) for _, request in first.asked[1:]]
    assert sent == [False, True]
    assert len(second.asked) == 2


@pytest.mark.parametrize(("field", "other"), [("kernel", "torch"), ("version", 4)])
def test_owners_that_disagree_are_refused_by_name(field: str, other: str | int) -> None:
    with pytest.raises(HandshakeError, match=f"optimizer 0 has {field} .*, optimizer 2 has {other!r}"):
        shaken(Owner(0, answer()), Owner(1, answer()), Owner(2, answer(**{field: other})))


def test_only_the_lead_gets_the_history_with_another_lead() -> None:
    owners, history = [Owner(0, answer()), Owner(1, answer())], pb.LeadHistory(steps=[pb.LeadHistory.Step(step=5)])
    shaken(*owners, history=(1, history))
    assert [request.history for request in (owner.asked[1][1] for owner in owners)] == [pb.LeadHistory(), history]


def test_a_successor_is_asked_what_its_predecessor_was_with_a_history() -> None:
    owner, successor = Owner(0, answer()), Owner(0, answer(), knows_spec=False)
    handshake = shaken(owner)
    handshake.admit_loss([0], before=4)
    history = pb.LeadHistory(steps=[pb.LeadHistory.Step(step=5)])
    meet(handshake, 0, successor, history)
    expected = pb.AttachRequest()
    expected.CopyFrom(owner.asked[-1][1])
    assert expected.lost_before == 4
    expected.history.CopyFrom(history)
    assert successor.asked[0] == ("Attach", expected)
    assert successor.asked[1][1].spec
    meet(handshake, 0, successor)
    assert successor.asked[-1][1].HasField("history")


OTHER = pb.SharedFiles(control="/dev/shm/other")


@pytest.mark.parametrize(
    "now", [answer(shared=HERE, needs_load=True), answer(shared=OTHER), answer()], ids=["values", "files", "no memory"]
)
def test_a_successor_without_what_its_predecessor_had_is_the_end(now: pb.AttachResponse) -> None:
    handshake = shaken(Owner(0, answer(shared=HERE)))
    handshake.share(SharedPaths("/dev/shm/rank", ()), back_at=None, away=())
    with pytest.raises(StateLostError, match=r"rank 1: optimizer 0 has died before .* start the run again"):
        meet(handshake, 0, Owner(0, now))
    with pytest.raises(StateLostError, match="optimizer 0 has died"):
        handshake.check_successors()


def test_an_owner_that_dies_before_any_value_is_loaded_has_lost_none() -> None:
    """It is seen once the rank has attached: until then both need the values."""
    handshake = shaken(Owner(0, answer(needs_load=True)))
    handshake.greet(handshake._links[0], cast(Channel, Owner(0, answer(needs_load=True))), None)
    handshake.check_successors()
    with pytest.raises(StateLostError):
        handshake.require_values(handshake._links[0])
