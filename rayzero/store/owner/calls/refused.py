"""What a caller with the run's token is refused for."""

from __future__ import annotations

from rayzero.errors import HandshakeError, StoreError, TransferError

__all__ = ["SlowBodyError", "TooManyCallsError", "WrongSenderError", "reason_to_refuse"]


class TooManyCallsError(StoreError):
    """A caller has more calls than it may have."""


class SlowBodyError(TransferError):
    """A message's bytes do not come."""


class WrongSenderError(HandshakeError):
    """A caller sends or uses what only another one may."""


_REASONS: dict[type[Exception], str] = {TooManyCallsError: "limit", SlowBodyError: "slow", WrongSenderError: "role"}


def reason_to_refuse(error: Exception) -> str | None:
    """The reason under which a refusal is counted; None: the error is no refusal."""
    return _REASONS.get(type(error))
