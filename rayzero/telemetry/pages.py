"""What a process shows over HTTP, and who may read it: by a certificate, a password, or the token of the run's tools.

Apart from the server (``http.py``), so that a process that serves nothing does not import aiohttp.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import importlib
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from rayzero.errors import ConfigError

REST = 9  # a wrong password is followed by a rest, as many times as long as its comparison: guesses take 1/10 of a core

Refused = Callable[[str, str, str], None]  # reason, client, why: see ``names.REFUSED``

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


@dataclass(frozen=True, slots=True)
class Page:
    """The page at one path."""

    content_type: str
    make: Callable[[], bytes]  # must be quick and not wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What an exporter asks of its clients. Travels to every process of a run."""

    certificate: bytes | None = None  # PEM, perhaps with its chain; None: connections are plain
    key: bytes | None = field(default=None, repr=False)  # PEM
    clients: bytes = b""  # PEM: authorities of clients' certificates; empty: clients are asked for none
    requires_client: bool = False  # whether a client without a certificate is cut
    versions: tuple[str, str] = ("TLS12", "TLS13")
    users: Mapping[str, str] = field(default_factory=dict)  # name -> bcrypt hash of the password
    token: str | None = field(default=None, repr=False)  # the run's own tools have it; None: nobody is asked who it is

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"

    def context(self) -> ssl.SSLContext | None:
        """For servers; None: no TLS. Raises ValueError, and ssl.SSLError (an OSError), for what cannot be used."""
        if self.certificate is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version, context.maximum_version = (_VERSIONS[name] for name in self.versions)
        load_pair(context, self.certificate + b"\n" + self.key)
        if self.clients:
            context.load_verify_locations(cadata=self.clients.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED if self.requires_client else ssl.CERT_OPTIONAL
        return context


def load_pair(context: ssl.SSLContext, pem: bytes) -> None:
    """Let a context show a certificate. ``pem``: with its key. Python only takes files, and this one is in memory.
    Raises ssl.SSLError or ValueError if they do not fit, or the key has a password."""
    handle = os.memfd_create("rayzero-certificate", os.MFD_CLOEXEC)
    try:
        os.write(handle, pem)
        context.load_cert_chain(f"/proc/self/fd/{handle}", password=lambda: b"")
    finally:
        os.close(handle)


def require_bcrypt() -> Any:
    """The package that compares passwords. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("bcrypt")
    except ImportError as error:
        raise ConfigError(
            "run.telemetry.web_config has basic_auth_users, which needs the package bcrypt on every host; "
            "pip install 'rayzero[metrics]'"
        ) from error


class Guard:
    """Answers whether a request may be answered; knows nothing of pages.

    A password that was right is remembered, as a salted digest: comparing it takes some 50 ms, and Prometheus asks each
    second. Wrong ones are compared one after the other in a thread of their own, with rests."""

    def __init__(self, protection: Protection) -> None:
        """Raises ConfigError if passwords cannot be compared here."""
        self.tls = protection.context()
        self._token = None if protection.token is None else f"Bearer {protection.token}".encode()
        self._users = dict(protection.users)
        self._bcrypt = require_bcrypt() if self._users else None
        self._salt, self._right = os.urandom(16), set[bytes]()  # digests of names and passwords
        self._ended = threading.Event()
        self.comparing = ThreadPoolExecutor(1, "rayzero-passwords")

    def renew(self, protection: Protection) -> None:
        """Show and believe these certificates from the next handshake on; all else stays. Any thread may call it."""
        self.tls = protection.context()

    def admits(self, authorization: bytes) -> bool | None:
        """Whether a request with this Authorization header (empty: none) may be answered; None: ``compare`` says."""
        if self._token is None or hmac.compare_digest(authorization, self._token):
            return True
        shown = _password(authorization) if self._users else None
        if shown is None:
            return False
        return True if self._digest(shown) in self._right else None

    def compare(self, authorization: bytes) -> bool:
        """Whether the password in a header is its user's; slow. Runs in ``comparing``."""
        shown = _password(authorization)
        if shown is None or self._bcrypt is None:
            return False
        began = time.monotonic()
        name, _, password = shown.partition(b":")
        known = self._users.get(name.decode(errors="replace"))
        against = known or next(iter(self._users.values()))  # an unknown name takes as long as a wrong password
        right = bool(self._bcrypt.checkpw(password[:72], against.encode())) and known is not None  # bcrypt reads 72
        if right:
            self._right.add(self._digest(shown))
        else:
            self._ended.wait(REST * (time.monotonic() - began))
        return right

    def _digest(self, shown: bytes) -> bytes:
        return sha256(self._salt + shown).digest()

    def close(self) -> None:
        """Compare nothing more. Idempotent."""
        self._ended.set()
        self.comparing.shutdown(wait=False, cancel_futures=True)


def _password(said: bytes) -> bytes | None:
    """The name and password, with a colon between them, of a header's value; None: there are none."""
    kind, _, encoded = said.partition(b" ")
    if kind.lower() != b"basic":
        return None
    try:
        shown = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        return None
    return shown if b":" in shown and b"\0" not in shown else None
