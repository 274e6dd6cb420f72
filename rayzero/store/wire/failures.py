"""Errors as messages, where they are not the status of a call: in shared memory, and inside other messages."""

from __future__ import annotations

from rayzero import errors
from rayzero.errors import RayZeroError, StoreError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb

MAX_MESSAGE_CHARS = 8192  # of an error's text; the metadata of a call is no place for more

_BY_NAME = {
    cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RayZeroError)
}


def named_error(name: str, message: str) -> RayZeroError:
    """A RayZeroError by class name; an unknown name gives a ``StoreError`` that contains it."""
    if name in _BY_NAME:
        return _BY_NAME[name](message)
    return StoreError(f"{name}: {message}")


def to_failure(error: RayZeroError) -> pb.Failure:
    """An error as a message."""
    return pb.Failure(error=type(error).__name__, message=str(error)[:MAX_MESSAGE_CHARS])


def failure_within(error: RayZeroError, most_bytes: int) -> bytes:
    """An error as a message of so many bytes at most: its text may be cut."""
    failure = to_failure(error)
    over = failure.ByteSize() - most_bytes
    if over > 0:
        text = failure.message.encode()
        failure.message = text[: max(0, len(text) - over)].decode(errors="ignore")
    return bytes(failure.SerializeToString())


def from_failure(failure: pb.Failure) -> RayZeroError:
    """The inverse of :func:`to_failure`."""
    return named_error(failure.error, failure.message)
