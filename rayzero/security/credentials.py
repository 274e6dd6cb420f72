"""What a process of a run shows to others, and wants to see of them: mutual TLS with roles in the certificates.

[Note: names in certificates] A certificate has DNS names. ``owner.rayzero`` serves shards, and may ask for what owners
ask of each other and, as a rank, for what that asks. ``rank-3.rayzero`` may ask for what rank 3 asks of owners,
``rank.rayzero`` for what any rank does, ``follower.rayzero`` for what is published. A client talks only to a server
that is an owner, whatever its address: so a rank cannot pose as an owner, and an owner may move to another host without
another certificate.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rayzero.errors import ConfigError, HandshakeError
from rayzero.files import open_regular
from rayzero.security.clients import is_loopback

OWNER = "owner.rayzero"
ANY_RANK = "rank.rayzero"
FOLLOWER = "follower.rayzero"
SAID_BEFORE = timedelta(days=30)  # the end of a certificate of the user's: a run may last as long

_MOST_PEM = 1 << 20  # bytes; the authorities of all browsers take 300,000


def name_of_rank(rank: int) -> str:
    """The name in the certificate of one rank."""
    return f"rank-{rank}.rayzero"


def follower_token(token: str) -> str:
    """What followers of a run show in place of its token, which cannot be found from this one."""
    return hmac.new(token.encode(), b"follower", hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """One process's certificate and key, and the authority that it believes. All are PEM."""

    certificate: bytes  # with the chain up to the authority's own, if there is one
    key: bytes = field(repr=False)
    authority: bytes
    ends: datetime  # nobody opens a connection with them from then on
    on_loopback: bool = False  # whether connections within a host are protected too

    def protects(self, address: str) -> bool:
        """Whether connections to ``address``, or to a server that listens there, use TLS. A port may follow the
        host."""
        return self.on_loopback or not is_loopback(address)

    @property
    def have_ended(self) -> bool:
        """Whether they are of no use any more, by this host's clock."""
        return self.ends <= datetime.now(UTC)


class Identity:
    """What this process shows to others, and wants to see of them: its newest credentials.

    Connections read them when they are opened. One that is open lives on, also beyond the end of the certificates that
    it was opened with: TLS looks at them once. Thread-safe."""

    def __init__(self, first: Credentials) -> None:
        self.now = first

    def renew(self, newer: Credentials) -> None:
        """Show these from now on."""
        self.now = newer

    def protects(self, address: str) -> bool:
        return self.now.protects(address)


def identity_of(credentials: Credentials | None) -> Identity | None:
    """None: connections are plain."""
    return None if credentials is None else Identity(credentials)


def expiry_warning(what: str, ends: datetime, now: datetime) -> str | None:
    """That a certificate of the user's may end before the run does; None: it lasts long. ``what``: setting and file."""
    if ends - now > SAID_BEFORE:
        return None
    return (
        f"{what} is valid until {utc(ends)}; afterwards no connection can be opened. Put a new one in its place before "
        "that: the run takes it within some minutes"
    )


def utc(when: datetime) -> str:
    """For messages."""
    return f"{when:%Y-%m-%d %H:%M} UTC"


def read_pem(setting: str, path: Path) -> bytes:
    """The content of a PEM file that a setting names. Raises ConfigError if it cannot be read or is not PEM."""
    try:
        with open_regular(path) as file:  # the driver reads it again each minute: it must never wait
            content = file.read(_MOST_PEM + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    if len(content) > _MOST_PEM:
        raise ConfigError(f"{setting}: {path} has more than {_MOST_PEM:,} bytes; pass a PEM file")
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{setting}: {path} is no PEM file; convert it, or pass another one")
    return content


def names_shown(auth: Mapping[str, Iterable[bytes]]) -> frozenset[str] | None:
    """The names in the certificate of a caller, from grpc's authentication context; None: the connection has no
    TLS."""
    if b"ssl" not in auth.get("transport_security_type", ()):
        return None
    return frozenset(name.decode(errors="replace") for name in auth.get("x509_subject_alternative_name", ()))


def require_role(names: frozenset[str], method: str, *, of_owners: bool, rank: int | None) -> None:
    """Raise HandshakeError unless a caller whose certificate has ``names`` may call ``method``. ``of_owners``: only
    owners call it. ``rank``: which rank the caller says that it is, if any.

    An owner may call as any rank that it names, as it does for those of its host (store/owner/entrances/pipes.py).
    That gives it nothing: it may tell every other owner to apply a decision or to overwrite values, which is more than
    a rank can do, and it holds states and the gradients of its host's ranks."""
    of_ranks = {ANY_RANK} if rank is None else {ANY_RANK, name_of_rank(rank), OWNER}
    allowed = {OWNER} if of_owners else of_ranks
    if not names & allowed:
        shown = ", ".join(sorted(names)) or "no name"
        said = "" if rank is None or of_owners else f" by rank {rank}"
        raise HandshakeError(
            f"{method} was called{said} with a certificate of {shown}; it takes one of {' or '.join(sorted(allowed))}"
        )
