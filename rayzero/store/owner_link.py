"""One owner as a rank reaches it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

import grpc

from rayzero.errors import RayZeroError, StallError, StoreClosedError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.rpc import (
    CHANNEL_OPTIONS,
    POLL_MARGIN_S,
    STORE_SERVICE,
    TlsFiles,
    from_status,
    methods,
    token_metadata,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

QUICK_S = 30.0  # deadline of calls that neither move tensors nor wait for anyone
_LEAVE_S = 5.0  # deadline of saying goodbye
_POLL_S = 60.0  # at most this long is one long poll held; owners answer "ask again" sooner


def _service_config() -> str:
    """grpc's own retries, for unary calls: all of them may be repeated."""
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
    """The messages of one client stream. After ``stop()`` the tensors behind them are read no more.

    grpc draws messages in a thread of its own, which may still be at work when the call has failed."""

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
        """Wait for the message being drawn, then give no more."""
        with self._lock:
            self._stopped = True


class OwnerLink:
    """A channel to one owner, opened once and kept.

    Knows the owner's address, how to call it and what its failures mean; not units, shards or steps."""

    def __init__(
        self, rank: int, owner: int, address: str, *, token: str, tls: TlsFiles | None, model: int = 0
    ) -> None:
        """``model``: the number of the prepared model that every call is about."""
        self.owner = owner
        self.name = f"optimizer {owner} at {address}" + (f" for prepared model {model}" if model else "")
        self.rank = rank
        self._metadata = token_metadata(token, model)
        options = (*CHANNEL_OPTIONS, ("grpc.service_config", _service_config()))
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, tls.channel_credentials(), options=options)
        self._calls = {name: method.bind(self._channel) for name, method in methods(STORE_SERVICE).items()}

    def ask(self, method: str, request: Any, timeout_s: float = QUICK_S) -> Any:
        """A unary call; blocks. Raises the owner's error."""
        return self._invoke(lambda call: call(request, timeout=timeout_s, metadata=self._metadata), method)

    def start(self, method: str, request: Any, timeout_s: float = QUICK_S) -> Any:
        """A unary call as a grpc future; ``answer()`` reads it."""
        return self._invoke(lambda call: call.future(request, timeout=timeout_s, metadata=self._metadata), method)

    def answer(self, started: Any) -> Any:
        """What came of a started call; blocks until it is there. Raises the owner's error."""
        try:
            return started.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            raise self.error(error) from error

    def upload(self, method: str, upload: Upload, timeout_s: float) -> None:
        """A client stream; blocks until the owner has everything. Raises the owner's error."""
        try:
            self._invoke(lambda call: call(upload, timeout=timeout_s, metadata=self._metadata), method)
        finally:
            upload.stop()

    def begin_fetch(self, request: pb.FetchRequest, timeout_s: float | None) -> Any:
        """A Fetch that is asked for; ``messages()`` reads it, ``cancel()`` ends it. Raises the owner's error."""
        return self._invoke(lambda call: call(request, timeout=timeout_s, metadata=self._metadata), "Fetch")

    def messages(self, fetch: Any) -> Iterator[bytes]:
        """The messages of a Fetch; a reader that gives up ends it. Raises the owner's error."""
        try:
            yield from fetch
        except grpc.RpcError as error:
            raise self.error(error) from error
        finally:
            fetch.cancel()  # no effect on a stream that has ended

    def notices(self, *, quiet: bool = False) -> Any:
        """The stream of notices: iterate it, ``cancel()`` it from another thread. Raises grpc's own errors."""
        request = pb.NoticesRequest(rank=self.rank, quiet=quiet)
        return self._invoke(lambda call: call(request, metadata=self._metadata), "Notices")

    def error(self, error: Exception) -> RayZeroError:
        """What a failed call means to this rank."""
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
    """Tell all owners at once that this rank leaves; one that does not hear it is gone itself, which is logged."""
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
    """A call that waits for others: asked again until there is an answer, an error, or no patience left.

    Holds no thread while it waits. Its future completes on the executor it was given."""

    def __init__(
        self,
        link: OwnerLink,
        method: str,
        request: Any,
        read: Callable[[Any], T],
        *,
        executor: Executor,
        patience_s: float,
        awaited: str,
        clock: Callable[[], float],
    ) -> None:
        """``read`` makes the result of a response without ``waiting``; ``awaited`` names it for stall errors."""
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()
        self._link, self._method, self._request, self._read = link, method, request, read
        self._executor, self._patience_s, self._awaited, self._clock = executor, patience_s, awaited, clock
        self._began = self._since = clock()  # since: when the reason for waiting last changed
        self._reason: str | None = None
        self._ask()

    def _ask(self) -> None:
        patience_s = max(0.0, self._patience_s - (self._clock() - self._since))
        try:
            started = self._link.start(self._method, self._request, min(patience_s, _POLL_S) + POLL_MARGIN_S)
            started.add_done_callback(self._hand_over)
        except RayZeroError as error:
            self.future.set_exception(error)

    def _hand_over(self, started: Any) -> None:
        """On grpc's thread, which must not be held."""
        try:
            self._executor.submit(self._answered, started)
        except RuntimeError:  # the executor is shut down
            self.future.set_exception(StoreClosedError(f"the store was closed while waiting for {self._awaited}"))

    def _answered(self, started: Any) -> None:
        try:
            response = self._link.answer(started)
            if response.HasField("waiting"):
                self._wait_on(response.waiting.on)
            else:
                self.future.set_result(self._read(response))
        except Exception as error:  # whatever it is, the future raises it
            self.future.set_exception(error)

    def _wait_on(self, reason: str) -> None:
        """Ask again, unless nothing has changed for too long."""
        now = self._clock()
        if self._reason not in (None, reason):
            self._since = now
        self._reason = reason
        if now - self._since >= self._patience_s:
            waited = f"{now - self._began:.3g} s"
            raise StallError(f"rank {self._link.rank} waits {waited} for {self._awaited}: {reason}")
        self._ask()
