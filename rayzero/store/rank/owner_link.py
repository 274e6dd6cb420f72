"""A rank's gRPC channel to one owner, and the calls over it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

import grpc

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import RayZeroError, StallError, StoreClosedError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire.rpc import (
    CHANNEL_OPTIONS,
    POLL_MARGIN_S,
    STORE_SERVICE,
    TlsFiles,
    from_status,
    life_metadata,
    methods,
    token_metadata,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

QUICK_S = 30.0  # deadline of calls that neither move tensors nor wait for anyone
_LEAVE_S = 5.0  # deadline of Leave
_POLL_S = 60.0  # the longest that an owner may hold a long poll; it answers "ask again" sooner


def _service_config() -> str:
    """grpc's own retry policy for unary calls, all of which may be repeated."""
    unary = [name for name, method in methods(STORE_SERVICE).items() if not method.streams]
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": STORE_SERVICE, "method": name} for name in unary]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})


class Upload(Iterator[bytes]):
    """The messages of one client stream. After ``stop()`` nothing reads the tensors behind them.

    grpc draws messages in its own thread, which may still be running after the call has failed."""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self._lock = threading.Lock()
        self._stopped = False

    def __next__(self) -> bytes:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._messages)

    def stop(self) -> None:
        """Wait until the current message is drawn, then end the stream."""
        with self._lock:
            self._stopped = True


class OwnerLink:
    """A channel to one owner, opened once and kept.

    Knows the owner's address, how to call it and what its failures mean; not units, shards or steps."""

    def __init__(
        self, rank: int, owner: int, address: str, *, token: str, tls: TlsFiles | None, model: int = 0, life: int = 0
    ) -> None:
        """``model``: the number of the prepared model that every call is about. ``life``: how often the rank has died
        and come back."""
        self.owner = owner
        self.name = f"optimizer {owner} at {address}" + (f" for prepared model {model}" if model else "")
        self.rank = rank
        self._metadata = token_metadata(token, model) + life_metadata(rank, life)
        options = (*CHANNEL_OPTIONS, ("grpc.service_config", _service_config()))
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, tls.channel_credentials(), options=options)
        self._calls = {name: method.bind(self._channel) for name, method in methods(STORE_SERVICE).items()}

    def ask(self, method: str, request: Any, timeout_s: float = QUICK_S) -> Any:
        """Make a unary call; blocks. Raises the owner's error."""
        return self._invoke(lambda call: call(request, timeout=timeout_s, metadata=self._metadata), method)

    def start(self, method: str, request: Any, timeout_s: float = QUICK_S) -> Any:
        """Start a unary call. Returns a grpc future for ``answer()``."""
        return self._invoke(lambda call: call.future(request, timeout=timeout_s, metadata=self._metadata), method)

    def answer(self, started: Any) -> Any:
        """The response to a started call; blocks. Raises the owner's error."""
        try:
            return started.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            raise self.error(error) from error

    def describe(self, request: pb.DescribeRequest, timeout_s: float) -> Future[str]:
        """Ask the owner what it is doing; does not block. The future ends within ``timeout_s`` seconds and fails with a
        RayZeroError that says why there is no answer."""
        said: Future[str] = Future()

        def answered(call: Any) -> None:
            try:
                settle(said, str(call.result().text))
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                fail(said, self._silence(error))

        self.start("Describe", request, timeout_s).add_done_callback(answered)
        return said

    def _silence(self, error: Exception) -> RayZeroError:
        if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return StallError(f"{self.name} does not answer: its process hangs, or its host cannot be reached")
        return self.error(error)

    def begin_upload(self, method: str, upload: Upload, timeout_s: float) -> Any:
        """Start a client stream; ``answer()`` waits for its end, ``cancel()`` ends it. Raises the owner's error."""
        return self._invoke(lambda call: call.future(upload, timeout=timeout_s, metadata=self._metadata), method)

    def begin_fetch(self, request: pb.FetchRequest, timeout_s: float | None) -> Any:
        """Start a Fetch; ``messages()`` reads it, ``cancel()`` ends it. Raises the owner's error."""
        return self._invoke(lambda call: call(request, timeout=timeout_s, metadata=self._metadata), "Fetch")

    def messages(self, fetch: Any) -> Iterator[bytes]:
        """The messages of a Fetch. A reader that stops early cancels it. Raises the owner's error."""
        try:
            yield from fetch
        except grpc.RpcError as error:
            raise self.error(error) from error
        finally:
            fetch.cancel()  # no effect on a stream that has ended

    def notices(self, *, quiet: bool = False) -> Any:
        """Start the stream of notices: iterate over it, ``cancel()`` it from another thread. Iteration raises grpc's
        own errors. ``quiet``: only the end of the run, because this rank reads versions in shared memory."""
        request = pb.NoticesRequest(rank=self.rank, quiet=quiet)
        return self._invoke(lambda call: call(request, metadata=self._metadata), "Notices")

    def error(self, error: Exception) -> RayZeroError:
        """The RayZeroError that a failed call raises for this rank."""
        peer = f"rank {self.rank}, {self.name}"
        if isinstance(error, grpc.RpcError):
            return from_status(error, peer)
        return StoreClosedError(f"{peer}: the store was closed")

    def close(self) -> None:
        """End every call and the connection. Idempotent."""
        self._channel.close()

    def _invoke(self, begin: Callable[[Any], Any], method: str) -> Any:
        try:
            return begin(self._calls[method])
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
            raise self.error(error) from error


def say_goodbye(links: Sequence[OwnerLink], reason: str) -> None:
    """Tell all owners at once that this rank leaves. A failure is only logged: an owner that cannot be reached has
    gone itself."""
    started = []
    for link in links:
        try:
            started.append((link, link.start("Leave", pb.LeaveRequest(rank=link.rank, reason=reason), _LEAVE_S)))
        except RayZeroError as error:
            _log_unheard(link, error)
    for link, call in started:
        try:
            link.answer(call)
        except RayZeroError as error:
            _log_unheard(link, error)


def _log_unheard(link: OwnerLink, error: RayZeroError) -> None:
    log.info("rank %d: %s did not hear the goodbye: %s", link.rank, link.name, error)


class LongPoll(Generic[T]):
    """A call that waits for other ranks, repeated until it has an answer or an error, or until its future ends.

    It holds no thread while it waits, and its future completes on the executor it was given. It has no deadline:
    whoever watches the future ends it."""

    def __init__(
        self,
        link: OwnerLink,
        method: str,
        request: Any,
        read: Callable[[Any], T],
        *,
        executor: Executor,
        awaited: str,
    ) -> None:
        """``read``: turns a response that is not ``waiting`` into the result, which errors call ``awaited``."""
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()
        self._link, self._method, self._request, self._read = link, method, request, read
        self._executor, self._awaited = executor, awaited
        self._started: list[Any] = []  # the call under way
        started = self._started
        self.future.add_done_callback(lambda _: [call.cancel() for call in started])
        self._ask()

    def _ask(self) -> None:
        try:
            self._started[:] = [self._link.start(self._method, self._request, _POLL_S + POLL_MARGIN_S)]
            self._started[0].add_done_callback(self._hand_over)
        except RayZeroError as error:
            fail(self.future, error)

    def _hand_over(self, started: Any) -> None:
        """Runs in grpc's thread, which must not block."""
        try:
            self._executor.submit(self._answered, started)
        except RuntimeError:  # the executor is shut down
            fail(self.future, StoreClosedError(f"the store was closed while waiting for {self._awaited}"))

    def _answered(self, started: Any) -> None:
        if self.future.done():  # whoever waited has given up
            return
        try:
            if _gave_no_answer(started):
                self._ask()
                return
            response = self._link.answer(started)
            if response.HasField("waiting"):
                self._ask()
            else:
                settle(self.future, self._read(response))
        except Exception as error:  # whatever it is, the future raises it
            fail(self.future, error)


def _gave_no_answer(call: Any) -> bool:
    """Whether the call's own deadline ended it: an owner that still runs answers before that."""
    return bool(call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not (call.trailing_metadata() or ()))
