"""What a rank notes of its calls to the lead, for the lead's successor."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import CheckpointWriteError, StallError
from rayzero.protocol.messages import BegunSave, CheckpointInfo, EndedSave, LeadHistory, MeanInput
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.lead_questions import long_call
from rayzero.store.host.waits import StallWatch
from rayzero.store.rank.connection import Epochs
from rayzero.store.remote.lead_line import RemoteLead
from rayzero.store.wire import translate
from tests.store.toy import WAIT

SAVE = {"number": 3, "step": 2}
MADE = CheckpointInfo(path="p", step=2, digest="d")


class Mailbox:
    """A lead that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Future[bytes]] = []

    def ask_lead(self, method: str, request: bytes) -> Future[bytes]:
        self.asked.append(Future())
        return self.asked[-1]

    def ask_again(self) -> None:
        """Nothing is on its way."""


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox()


@pytest.fixture
def line(mailbox: Mailbox) -> Iterator[RemoteLead]:
    link: Any = SimpleNamespace(caller=SimpleNamespace(number=1))
    shared: Any = mailbox
    watch = StallWatch("rank 1", WAIT, poll_s=None)
    line = RemoteLead(link, None, shared, watch, Epochs(change=False))
    yield line
    line.close()
    watch.close()


def heard(line: RemoteLead) -> LeadHistory:
    """What the rank tells a successor of the lead."""
    return translate.history_from_pb(pb.LeadHistory.FromString(line.history().SerializeToString()))


@pytest.mark.parametrize("complete", [True, False])
def test_a_successor_hears_how_a_save_has_ended(
    line: RemoteLead, mailbox: Mailbox, tmp_path: Path, complete: bool
) -> None:
    saved = line.save("the checkpoint", 3, 2, tmp_path, (), begun=False)
    assert heard(line).saved is None
    if complete:
        settle(mailbox.asked[0], pb.SaveResponse(checkpoint=translate.checkpoint_to_pb(MADE)).SerializeToString())
        assert saved.result(WAIT) == MADE
        assert heard(line).saved == EndedSave(**SAVE, directory=str(tmp_path), checkpoint=MADE)
        return
    fail(mailbox.asked[0], CheckpointWriteError("the disk is full"))
    assert isinstance(saved.exception(WAIT), CheckpointWriteError)
    ended = heard(line).saved
    assert ended is not None
    assert (ended.number, ended.step, ended.directory, ended.checkpoint) == (3, 2, str(tmp_path), None)
    assert repr(ended.failure) == "CheckpointWriteError('the disk is full')"


def test_a_successor_hears_which_save_has_begun(line: RemoteLead, mailbox: Mailbox, tmp_path: Path) -> None:
    begun = line.begin_save("the beginning", 3, 2, tmp_path, ())
    assert heard(line).begun is None
    settle(mailbox.asked[0], b"")
    begun.result(WAIT)
    assert heard(line).begun == BegunSave(**SAVE, directory=str(tmp_path))


def test_a_successor_hears_the_last_means_and_those_of_a_former_life(line: RemoteLead) -> None:
    for number in range(1, 67):
        line.give_again("a mean", number, MeanInput(values=(float(number),), weight=1.0))
    for number in (65, 66, 67):
        line.mean("a mean", number, MeanInput(values=(float(number),), weight=1.0))
    means = heard(line).means
    assert [mean.number for mean in means] == list(range(4, 68))
    assert [mean.given.values[0] for mean in means] == [float(number) for number in range(4, 68)]


def test_a_call_that_nobody_waits_for_any_more_is_cancelled() -> None:
    asked: Future[Any] = Future()
    link: Any = SimpleNamespace(ask=lambda *_, **__: asked)
    with ThreadPoolExecutor(1) as answers:
        norm = long_call(link, "Finish", None, str, executor=answers, awaited="a norm")
        fail(norm, StallError("rank 1 waits"))
    assert asked.cancelled()
    assert isinstance(norm.exception(), StallError)
