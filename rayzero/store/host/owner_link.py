"""A link to one owner, and the calls over it.

[Note: a broken link] A connection that is cut, reset or refused says nothing about the process at its other end. So a
link that breaks is opened again, with back-off, and every call that had no answer is repeated: the owner executes a
repeat once. One thread keeps the link open. It follows the owner's notices, so it sees a break at once; the first
notice says that the link is open, and what is published. Only this thread waits between two tries; calls wait until the
link is open. Each try has a channel of its own, with a number (``LinkNumber``) by which the owner refuses what is still
on its way over an earlier one.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc

from rayzero.concurrency.backoff import backoff
from rayzero.concurrency.futures import fail, failed, settle
from rayzero.concurrency.processes import ProcessIdentity, SeenProcess
from rayzero.errors import RayZeroError, StallError, StateLostError, StoreClosedError, StoreError
from rayzero.security.credentials import utc
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import QUICK_S, BrokenLinkError, Caller, Channel, NoAnswerError
from rayzero.store.host.line_channel import LineChannel
from rayzero.store.shm.lines import Lobby
from rayzero.store.traffic import count_reconnect
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import CallTerms, LinkNumber, break_of
from rayzero.store.wire.tensor_stream import StreamEndedError
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

T = TypeVar("T")
AnyChannel = Channel | LineChannel

_LEAVE_S = 5.0  # deadline of Leave
_FIRST_S = 3.0  # how long an owner that has never answered may be out of reach, if it gets no successor
_NOBODY = ProcessIdentity("", 0, 0)  # no process has been met yet


class LinkDownError(StallError):
    """A link is down. The message says since when, so it differs each time: it must not count as news of a peer."""


class LinkUser(Protocol):
    """The object that a link belongs to. The link calls it, in a thread of its own."""

    succeeds: bool  # an owner whose process dies gets a successor; False: that is the end of its link
    greets: bool = False  # ``rejoin`` is called for the first process, too: it may be a successor
    patience_s: float = math.inf  # after so long a time without a link, it is over

    @property
    def awaited(self) -> Sequence[int]:
        """The ranks without which a link does not open; see ``Channel``."""
        return ()

    def callers_here(self, link: OwnerLink, missing_s: float) -> Sequence[str]:
        """The addresses of optimizer actors of this host, of which the first one that serves makes the calls to the
        owner if that is on another host; empty: this process calls it itself. ``missing_s``: for how many seconds none
        of them has served."""
        return ()

    def hear(self, link: OwnerLink, notice: pb.NoticesResponse) -> None:
        """The owner says something unasked."""
        return

    def rejoin(self, link: OwnerLink, channel: AnyChannel) -> None:
        """There is a channel to a successor of the owner; no other call goes there before this returns."""
        ...

    def lost(self, link: OwnerLink, error: RayZeroError) -> None:
        """The owner will never answer again; at most once."""
        ...


class OwnerLink:
    """A link to one owner, which is opened again whenever it breaks. See [Note: a broken link].

    Knows the owner's address, the channel that is open now and what failures mean; not units, shards or steps."""

    def __init__(
        self,
        caller: Caller,
        owner: int,
        address: str,
        terms: CallTerms,
        user: LinkUser,
        recorder: Recorder,
    ) -> None:
        """``user``: which the link calls."""
        self._met: ProcessIdentity | None = _NOBODY
        self.owner, self.caller = owner, caller
        self.name = f"optimizer {owner} at {address}" + (f" for prepared model {terms.model}" if terms.model else "")
        self._address, self._metadata, self._terms = address, terms.metadata + caller.metadata, terms
        self._user, self._recorder = user, recorder
        self._number = LinkNumber(caller.name, 0)
        self._lock = threading.Lock()
        self._trying: AnyChannel | None = None  # the latest one. freed by: _follow
        self._broken: AnyChannel | None = None  # the latest one that broke
        self._open: AnyChannel | None = None  # the same one, while it is open
        self._waiting: list[Future[AnyChannel]] = []  # for it to open
        self._down_since, self._why = time.monotonic(), "never opened"
        self._openings = 0
        self._missing_since: float | None = None  # no optimizer actor of this host that calls the owner serves
        self._closed = False
        self._end: RayZeroError | None = None  # why it will never open again
        self._ended = threading.Event()
        self._process: ProcessIdentity | None = None  # the owner's
        self._seen: SeenProcess | None = None  # the same, if its death can be seen. freed by: _keep_open, _see
        self._wake = os.eventfd(0)  # readable once the link is over. freed by: join()
        self._thread: threading.Thread | None = None

    # ---- open, broken, over

    def open(self) -> None:
        """Begin to keep the link open. Idempotent."""
        with self._lock:
            if self._thread is not None or self._end is not None:
                return
            self._down_since = time.monotonic()
            name = f"rayzero-{self.caller.name.replace(' ', '')}-notices{self.owner}"
            self._thread = threading.Thread(target=self._keep_open, name=name, daemon=True)
        self._thread.start()

    def _keep_open(self) -> None:
        pauses, opened = backoff(), 0
        while not self._ended.is_set():
            error = self._follow()
            if self._openings > opened:
                pauses, opened = backoff(), self._openings
            down_s = 0.0 if self._open is not None else time.monotonic() - self._down_since
            never = not self._user.succeeds and not opened and down_s > _FIRST_S
            if down_s > self._user.patience_s:
                self._stop(self.down() or error)
            elif never or not isinstance(error, BrokenLinkError):
                self._stop(error)
            if not self._ended.is_set():
                self._pause(next(pauses))
        self._forget()
        assert self._end is not None
        if not self._closed:
            self._user.lost(self, self._end)

    def _follow(self) -> RayZeroError:
        """Open the link and follow the owner's notices until they end; why they did."""
        self._number = self._number.next()
        try:
            channel = self._channel(met=self._openings > 0 or self._user.succeeds)
        except BrokenLinkError as error:
            return error
        with self._lock:
            self._trying = channel
            if self._end is not None:
                channel.give_up()
        try:
            for notice in channel.notices():
                if notice.HasField("process"):
                    self._see(translate.process_from_pb(notice.process))
                    self._meet(channel)
                    self._opened(channel)
                self._user.hear(self, notice)
            return StoreError(f"{self.caller.name}: {self.name} stopped")
        except RayZeroError as error:
            if isinstance(error, BrokenLinkError):
                self.broke(channel, error)
            else:
                self._stop(error)  # before the channel closes, which calls under way would take for a break
            return error
        finally:
            channel.close()  # calls under way end, and are repeated over the next one

    def _channel(self, *, met: bool) -> AnyChannel:
        """A channel to the owner where it is now: over a line if that is this host, and has room for one, or if an
        optimizer actor of this host calls the owner. ``met``: see ``Channel.met``. Raises BrokenLinkError if that is
        missing now."""
        terms, address, lobby, now = self._terms, self._address, None, time.monotonic()
        callers = self._user.callers_here(self, now - (self._missing_since or now))
        named, asked = (self.caller, self.name), self._user.awaited
        try:
            for at in (address, *callers):
                lobby = self._lobby(at)
                if lobby is not None:
                    to, self._missing_since = "" if at == address else address, None
                    return LineChannel(*named, lobby, self._number, self._metadata, terms.token, asked, to=to, met=met)
        except (RayZeroError, OSError) as error:
            log.warning("%s calls %s over gRPC, because it gets no line: %s", self.caller.name, self.name, error)
            if lobby is not None:
                lobby.close()
        else:
            if callers:
                self._missing_since = self._missing_since or now
                self._why = "the optimizer actor of this host that calls it is gone"
                raise BrokenLinkError(f"{self.caller.name}, {self.name}: {self._why}")
        channel = Channel(*named, address, self._number, self._metadata, terms.tls, asked)
        channel.met = met
        return channel

    def _lobby(self, address: str) -> Lobby | None:
        memory = self._terms.memory
        return None if memory is None else Lobby.find(memory, address, self._terms.token)

    def is_here(self) -> bool:
        """Whether the owner is on this host, and serves now."""
        try:
            lobby = self._lobby(self._address)
        except OSError:  # whether it is shows when the link is opened
            return False
        if lobby is not None:
            lobby.close()
        return lobby is not None

    def _opened(self, channel: AnyChannel) -> None:
        with self._lock:
            if self._open is channel or self._end is not None:
                return
            self._open, again = channel, self._openings > 0
            channel.met = True
            self._openings += 1
            waiting, self._waiting = self._waiting, []
            down_s = time.monotonic() - self._down_since
        if again:
            log.warning("%s: the link to %s is back after %.3g s", self.caller.name, self.name, down_s)
            count_reconnect(self._recorder, "optimizer", down_s)
        for wait in waiting:
            settle(wait, channel)

    def broke(self, channel: AnyChannel, error: RayZeroError) -> None:
        """A call over ``channel`` did not get through: open the link again, unless that has begun already."""
        cause = error.__cause__
        with self._lock:
            if self._trying is not channel or self._broken is channel or self._end is not None:
                return  # the first error says why: the others are of calls that this link cancelled
            self._broken = channel
            was_open, self._open = self._open is channel, None
            if was_open:
                self._down_since = time.monotonic()
            if isinstance(cause, grpc.RpcError):
                self._why = break_of(cause) + ("" if was_open else self._ended_certificate())
            elif isinstance(cause, OSError | StreamEndedError):
                self._why = str(error).removeprefix(f"{channel.peer}: ")
        if was_open:
            log.warning("%s lost the link to %s: %s", self.caller.name, self.name, self._why)
            channel.give_up()

    def _ended_certificate(self) -> str:
        """Why no connection can be opened, if that is the reason; else nothing."""
        shown = self._terms.tls
        if shown is None or not shown.protects(self._address) or not shown.now.have_ended:
            return ""
        return f"; the certificate of {self.caller.name} ended at {utc(shown.now.ends)}, and the run has not renewed it"

    def when_open(self, after: AnyChannel | None = None) -> Future[AnyChannel]:
        """Done once a channel other than ``after`` is open; fails if there will be none."""
        wait: Future[AnyChannel] = Future()
        with self._lock:
            channel, end = self._open, self._end
            if end is None and (channel is None or channel is after):
                self._waiting.append(wait)
                return wait
        if end is not None:
            fail(wait, end)
        elif channel is not None:
            settle(wait, channel)
        return wait

    def wait_open(self, after: AnyChannel | None, unless: Future[Any]) -> AnyChannel:
        """The channel of ``when_open``; blocks. Raises the error of ``unless`` if that fails first."""
        opened = self.when_open(after)
        futures.wait([opened, unless], return_when=futures.FIRST_COMPLETED)
        if not opened.done():
            unless.result()
        return opened.result()

    def channel(self) -> AnyChannel | None:
        """The channel that is open now."""
        return self._open

    def down(self) -> LinkDownError | None:
        """The error that says since when the link is down, and why; None while it is open."""
        with self._lock:
            if self._open is not None:
                return None
            since = time.monotonic() - self._down_since
            return LinkDownError(f"{self.name}: its link is down since {since:.3g} s ({self._why})")

    @property
    def address(self) -> str:
        """Where the owner is now."""
        return self._address

    def _see(self, process: ProcessIdentity) -> None:
        """``process`` is the owner's. Its death breaks the link at once, so this thread looks for it between two tries;
        it needs no thread of its own for that."""
        if process != self._process:
            self._forget()
            self._process, self._seen = process, SeenProcess.open(process)

    def _meet(self, channel: AnyChannel) -> None:
        """Shake hands with a successor."""
        first = self._met is _NOBODY
        if first and self._user.greets:
            self._user.rejoin(self, channel)
        elif not first and self._met != self._process:
            if not self._user.succeeds:
                raise StateLostError(
                    f"{self.caller.name}: another process answers as {self.name}, which has nothing of what the one "
                    "before had: its host has come back, perhaps; resume from the newest checkpoint"
                )
            self._user.rejoin(self, channel)
            log.warning("%s: %s has a successor, and goes on", self.caller.name, self.name)
        self._met = self._process

    def succeed(self, address: str) -> None:
        """The owner's successor is at ``address``: open the link there. The owner's process must be dead. No effect on
        a link that is over."""
        with self._lock:
            if self._end is not None:
                return
            self._address = address
        self.open_again()

    def open_again(self) -> None:
        """Open another channel, at once. No effect on a link that is over."""
        with self._lock:
            if self._end is not None:
                return
            channel = self._trying
            os.eventfd_write(self._wake, 1)
        if channel is not None:
            channel.give_up()

    def _forget(self) -> None:
        if self._seen is not None:
            self._seen.close()
            self._seen = None

    def _pause(self, seconds: float) -> None:
        """Wait until the next try, the end of the link, or the death of the owner's process."""
        waiting, seen = select.poll(), self._seen
        waiting.register(self._wake, select.POLLIN)
        if seen is not None and seen.file is not None:
            waiting.register(seen.file, select.POLLIN)
        ready = [file for file, _ in waiting.poll(seconds * 1e3)]
        if self._wake in ready and not self._ended.is_set():
            os.eventfd_read(self._wake)
        if self._process is not None and seen is not None and (seen.is_dead or seen.file in ready):
            self._died(self._process)

    def _died(self, process: ProcessIdentity) -> None:
        """The owner's process is dead: the end, or the time to wait for its successor."""
        if not self._user.succeeds:
            self._stop(StoreError(f"optimizer {self.owner} (pid {process.pid}) has died"))
            return
        self._forget()
        with self._lock:
            self._why = f"its process, pid {process.pid}, has died; a successor is awaited"
        log.warning("%s: optimizer %d (pid %d) has died", self.caller.name, self.owner, process.pid)

    def _stop(self, error: RayZeroError) -> None:
        """The owner will never answer again; the first reason counts."""
        with self._lock:
            self._end = error = self._end or error
            self._open = None
            waiting, self._waiting = self._waiting, []
            channel = self._trying
        if not self._ended.is_set():
            self._ended.set()
            os.eventfd_write(self._wake, 1)
        for wait in waiting:
            fail(wait, error)
        if channel is not None:
            channel.give_up()

    def close(self) -> None:
        """End every call, and every wait for the link. Idempotent."""
        self._closed = True
        self._stop(StoreClosedError(f"{self.caller.name}, {self.name}: the store was closed"))

    def join(self) -> None:
        """Wait for the link's thread, after ``close``."""
        if self._thread is not None:
            self._thread.join()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # ---- calls

    def ask(self, method: str, request: Any, timeout_s: float = QUICK_S, *, repeats: bool = False) -> Future[Any]:
        """Make a unary call, and repeat it until the link lets it through; does not block. The future has the answer or
        fails with the owner's error, with NoAnswerError after ``timeout_s`` seconds over one open link, or with why the
        link is over. It completes in any thread. Nothing ends it while the link is down: the caller does. ``repeats``:
        make the call again in place of a NoAnswerError, because its answer may be lost on the way."""
        return _Ask(self, method, request, timeout_s, repeats=repeats).future

    def describe(self, request: pb.DescribeRequest, timeout_s: float) -> Future[str]:
        """Ask the owner what it is doing; does not block. The future ends within ``timeout_s`` seconds and fails with a
        RayZeroError that says why there is no answer."""
        channel, down = self.channel(), self.down()
        if channel is None:
            return failed(self._end or down or LinkDownError(f"{self.name}: its link opens now"))
        said: Future[str] = Future()

        def answered(call: Any) -> None:
            try:
                settle(said, str(channel.answer(call).text))
            except NoAnswerError:
                fail(said, StallError(f"{self.name} does not answer: its process hangs, or its host cannot be reached"))
            except BrokenLinkError as error:
                self.broke(channel, error)
                fail(said, self.down() or error)
            except RayZeroError as error:
                fail(said, error)

        try:
            channel.start("Describe", request, timeout_s).add_done_callback(answered)
        except BrokenLinkError as error:
            return failed(error)
        return said


class _Ask:
    """A unary call that is repeated over each channel of a link until one lets it through."""

    def __init__(self, link: OwnerLink, method: str, request: Any, timeout_s: float, *, repeats: bool) -> None:
        self.future: Future[Any] = Future()
        self._link, self._method, self._request, self._timeout_s = link, method, request, timeout_s
        self._repeats = repeats
        self._started: list[Any] = []  # the call under way
        started = self._started
        self.future.add_done_callback(lambda _: [call.cancel() for call in started])
        link.when_open().add_done_callback(self._begin)

    def _begin(self, opened: Future[AnyChannel]) -> None:
        if self.future.done():  # the caller has given up
            return
        error = opened.exception()
        if error is not None:
            fail(self.future, error)
            return
        channel = opened.result()
        try:
            call = channel.start(self._method, self._request, self._timeout_s)
        except BrokenLinkError as broken:
            self._again(channel, broken)
            return
        self._started[:] = [call]
        call.add_done_callback(partial(self._answered, channel))

    def _answered(self, channel: AnyChannel, call: Any) -> None:
        if self.future.done():
            return
        try:
            settle(self.future, channel.answer(call))
        except BrokenLinkError as broken:
            self._again(channel, broken)
        except RayZeroError as error:
            if self._repeats and isinstance(error, NoAnswerError):
                self._link.when_open().add_done_callback(self._begin)
            else:
                fail(self.future, error)

    def _again(self, channel: AnyChannel, broken: BrokenLinkError) -> None:
        self._link.broke(channel, broken)
        self._link.when_open(after=channel).add_done_callback(self._begin)


def answers_of(asked: Mapping[OwnerLink, Future[T]], timeout_s: float) -> list[T]:
    """The answers of several owners, in the order of ``asked``; blocks. ``timeout_s``: of each call. Raises the first
    error, or LinkDownError if a link is down all that time."""
    futures.wait(asked.values(), timeout_s + 1.0)
    for link, answer in asked.items():
        if not answer.done() and (down := link.down()) is not None:
            fail(answer, down)
    return [answer.result() for answer in asked.values()]


def say_goodbye(links: Sequence[OwnerLink], reason: str) -> None:
    """Tell all owners that can be reached now that this rank leaves. A failure is only logged: an owner that cannot be
    reached has gone itself, or notices that this rank has."""
    asked = [
        (link, link.ask("Leave", pb.LeaveRequest(rank=link.caller.number, reason=reason), _LEAVE_S))
        for link in links
        if link.channel() is not None
    ]
    futures.wait([answer for _, answer in asked], _LEAVE_S)
    for link, answer in asked:
        if not answer.done() or answer.exception() is not None:
            why = answer.exception() if answer.done() else link.down()
            log.info("%s: %s did not hear the goodbye: %s", link.caller.name, link.name, why)
            answer.cancel()
