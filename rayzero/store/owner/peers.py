"""How the lead reaches an owner in another process: over gRPC or, within a step on its host, through a mailbox.

A link that breaks fails nothing: calls that had no answer are repeated ([Note: a broken link] in
store/host/owner_link.py), and the owner executes each once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rayzero.concurrency.futures import DONE, settle, then
from rayzero.errors import EpochOverError, RayZeroError, StoreClosedError, StoreError
from rayzero.protocol.messages import Decision, FileEntry, FinishReport, NormParts, Record, Write
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import BrokenLinkError, Caller
from rayzero.store.host.owner_link import AnyChannel, LinkUser, OwnerLink
from rayzero.store.owner.memory.shared_owner import SharedOwner
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import CallTerms
from rayzero.store.wire.translate import Once, to_failure
from rayzero.telemetry.recorder import NullRecorder, Recorder


def _collect(reports: tuple[FinishReport, ...]) -> pb.CollectRequest:
    return pb.CollectRequest(step=reports[0].step, reports=translate.reports_to_pb(reports))


def _apply(decision: Decision) -> pb.ApplyRequest:
    return pb.ApplyRequest(decision=translate.decision_to_pb(decision))


def _nothing(_: object) -> None:
    return None


collect_request = Once(_collect)  # of all ranks' reports of one step
apply_request = Once(_apply)  # of a decision


T = TypeVar("T")

_QUICK_S = 10.0  # of an abort
_ABORT_S = 3.0  # how long an abort is repeated: an owner that cannot be reached has most likely gone itself. An owner
# that does not hear of it keeps its ranks waiting until they stall


class _Successor(NamedTuple):
    """What a successor of the owner has to redo first."""

    records: Sequence[Record]
    caught_up: Future[None]


class RemotePeer(LinkUser):
    """One owner in another process. An ``OwnerPeer`` (lead/attempt.py), and the user of the lead's link to it.

    Knows how to call the owner; not what a step is. Its futures complete in any thread: callbacks on them must not
    block."""

    greets = True

    def __init__(
        self,
        owner: int,
        address: str,
        terms: CallTerms,
        *,
        succeeds: bool,
        shared: SharedOwner | None = None,
        timeout_s: float = 600.0,
        recorder: Recorder | None = None,
    ) -> None:
        """``succeeds``: an owner that dies gets a successor. ``shared``: the lead's own end of shared memory, which may
        have a mailbox to the owner; None: it has none. ``timeout_s``: the longest that a call may take, and that the
        link may be down, in seconds."""
        self.owner, self._shared = owner, shared
        self.succeeds, self.patience_s = succeeds, timeout_s
        self._applied: Future[None] = DONE  # the last decision handed over
        self._aborts: list[Future[Any]] = []
        self._saves = secrets.randbits(48)  # the number of the last call; a former life of the lead has used others
        self._successor: _Successor | None = None
        self._redone: Future[Any] = DONE  # a successor redoes a record
        self._failed: Callable[[StoreError], None] = lambda _: None
        recorder = recorder or NullRecorder()
        self._link = OwnerLink(Caller.lead(), owner, address, terms, self, recorder)  # freed by: close()

    # ---- the link

    def open(self, failed: Callable[[StoreError], None]) -> None:
        """This process leads: open the link. ``failed`` is called, in any thread, once the owner will never answer
        again."""
        self._failed = failed
        self._link.open()

    def lost(self, link: OwnerLink, error: RayZeroError) -> None:
        if not isinstance(error, EpochOverError):  # that ends the lead, too
            self._failed(error if isinstance(error, StoreError) else StoreError(str(error)))

    def succeed(self, address: str, records: Sequence[Record]) -> Future[None]:
        """The owner's process has died; its successor is at ``address``. It redoes ``records``; then every call that
        was not answered is repeated. Done once it has redone them, unless it dies meanwhile."""
        self._successor = _Successor(records, Future())
        self._link.succeed(address)
        return self._successor.caught_up

    def rejoin(self, link: OwnerLink, channel: AnyChannel) -> None:
        """Have a successor redo what is recorded."""
        successor = self._successor
        for record in () if successor is None else successor.records:
            request = pb.RedoRequest(record=translate.record_to_pb(record))
            self._redone = channel.start("Redo", request, self.patience_s)
            channel.answer(self._redone)
        if successor is not None and successor is self._successor:
            settle(successor.caught_up, None)

    def trouble(self) -> str | None:
        """Why its link is down, if it is. May be called in any thread."""
        down = self._link.down()
        return None if down is None else str(down)

    def close(self) -> None:
        """Close the connection once the aborts have gone out; other calls under way fail."""
        wait(self._aborts, _ABORT_S if self._link.channel() is None else _QUICK_S)
        self._link.close()
        self._redone.cancel()
        self._link.join()

    # ---- calls

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """Ask for the step's norm parts, which come once every counted push is there."""
        read = partial(translate.parts_from_pb, step)
        return self._within_step("Collect", collect_request(reports), pb.CollectResponse, read)

    def apply(self, decision: Decision) -> Future[None]:
        """Act on the decision; done when the owner has queued it."""
        self._applied = self._within_step("Apply", apply_request(decision), pb.ApplyResponse, _nothing)
        return self._applied

    def redo(self, record: Record) -> Future[None]:
        """Act on a recorded decision; done when the owner has queued it."""
        return self._call("Redo", pb.RedoRequest(record=translate.record_to_pb(record)), _nothing)

    def begin_checkpoint(self, step: int, directory: Path) -> Future[None]:
        """Begin to write the owner's shards of version ``step``, which ``write_checkpoint`` then waits for; decisions
        wait for the answer."""
        return self._call("BeginShards", self._save_request(step, directory), _nothing)

    def write_checkpoint(self, step: int, directory: Path) -> Future[FileEntry]:
        """Write the owner's shards of version ``step`` into the staging directory."""
        request = self._save_request(step, directory)
        return self._call("WriteShards", request, lambda answer: translate.file_from_pb(answer.file))

    def _save_request(self, step: int, directory: Path) -> pb.WriteShardsRequest:
        self._saves += 1
        return pb.WriteShardsRequest(step=step, directory=str(directory), number=self._saves)

    def write(self, number: int, write: Write) -> Future[None]:
        """Change the owner's shards of a unit; done when they are changed. It must not overtake a decision in the
        mailbox."""
        return self._call("Overwrite", pb.OverwriteRequest(number=number, write=translate.write_to_pb(write)), _nothing)

    def abort(self, error: StoreError) -> None:
        """Fail every wait at the owner, once it has a decision that is in the mailbox. Errors are ignored: an owner
        that cannot be reached has gone itself."""
        request = pb.AbortRequest(failure=to_failure(error))

        def abort(_: object) -> None:
            if not isinstance(error, StoreClosedError):
                self._aborts.append(self._link.ask("Abort", request, _QUICK_S))
            elif (channel := self._link.channel()) is not None:  # at its end, a run's owners end in turn: no repeats
                with suppress(BrokenLinkError):
                    self._aborts.append(channel.start("Abort", request, _QUICK_S))

        (DONE if self._shared is None else self._applied).add_done_callback(abort)

    def _call(self, method: str, request: Any, read: Callable[[Any], T]) -> Future[T]:
        return then(self._link.ask(method, request, self.patience_s), read)

    def _within_step(self, method: str, request: Any, response: type[Any], read: Callable[[Any], T]) -> Future[T]:
        """Call through the mailbox, if there is one that holds the request."""
        shared = self._shared
        asked = None if shared is None else shared.ask(self.owner, method, request.SerializeToString())
        if asked is None:
            return self._call(method, request, read)
        return then(asked, lambda answer: read(response.FromString(answer)))
