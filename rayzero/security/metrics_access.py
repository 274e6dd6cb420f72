"""How a run's metrics are protected: as its user's web config says or, on a network, by a certificate of the run's own.

The run's own tools (``rayzero top``, ``rayzero trace``, the plan's check) are let in everywhere by a token, and by a
client's certificate where the web config asks for one.
"""

from __future__ import annotations

import secrets
import ssl
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from rayzero.config.web_config import TlsServerConfig, read_web_config
from rayzero.errors import ConfigError
from rayzero.security.authority import Authority
from rayzero.security.credentials import read_pem
from rayzero.telemetry.guard import Protection, require_bcrypt
from rayzero.telemetry.scrape import Viewer

_SETTING = "run.telemetry.web_config"
_END = b"-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAccess:
    """The protections that a run's exporters may have, and what opens them to the run's own tools."""

    given: Protection | None  # as the user's web config says; None: there is none
    own: Protection  # TLS with a certificate of the run, for whoever has its token
    viewer: Viewer


def metrics_access(run: str, web_config: str | None) -> MetricsAccess:
    """Make a run's protections. ``web_config``: path of the user's; None: none. Raises ConfigError, naming the file,
    for what cannot be used."""
    token = secrets.token_hex(32)
    shown = Authority(run, on_loopback=False).issue("metrics", ["metrics.rayzero"])
    own = Protection(certificate=shown.certificate, key=shown.key, token=token)
    if web_config is None:
        return MetricsAccess(given=None, own=own, viewer=Viewer(token=token, trusted=shown.certificate.decode()))
    given = _given(Path(web_config), token)
    trusted = shown.certificate + _first(given.certificate or b"")
    client = None
    if given.requires_client:
        made = Authority(f"{run} tools", on_loopback=False).issue("rayzero", ["viewer.rayzero"])
        given = replace(given, clients=given.clients + b"\n" + made.authority)
        client = (made.certificate + made.key).decode()
    viewer = Viewer(token=token, trusted=trusted.decode(), client=client, in_clear=given.certificate is None)
    return MetricsAccess(given=given, own=own, viewer=viewer)


def _given(path: Path, token: str) -> Protection:
    config = read_web_config(path)
    if config.basic_auth_users:
        require_bcrypt()
    asks = Protection(users=config.basic_auth_users, token=token if config.basic_auth_users else None)
    return asks if config.tls_server_config is None else _encrypted(asks, config.tls_server_config)


def _encrypted(asks: Protection, tls: TlsServerConfig) -> Protection:
    certificate, key = _read("cert_file", tls.cert_file), _read("key_file", tls.key_file)
    made = replace(
        asks,
        certificate=certificate,
        key=key,
        clients=b"" if tls.client_ca_file is None else _read("client_ca_file", tls.client_ca_file),
        requires_client=tls.client_auth_type == "RequireAndVerifyClientCert",
        versions=(tls.min_version, tls.max_version),
    )
    try:
        made.context()
        until = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except (ssl.SSLError, ValueError) as error:
        files = ", ".join(file for file in (tls.cert_file, tls.key_file, tls.client_ca_file) if file is not None)
        raise ConfigError(f"{_SETTING}: {files}: {error}; pass a certificate and its key, without password") from error
    if until <= datetime.now(UTC):
        raise ConfigError(f"{_SETTING}: {tls.cert_file} was valid until {until:%Y-%m-%d %H:%M} UTC; renew it")
    return made


def _read(name: str, path: str) -> bytes:
    return read_pem(f"{_SETTING}: {name}", Path(path))


def _first(chain: bytes) -> bytes:
    """The server's own certificate: those behind it may sign others."""
    return chain.partition(_END)[0] + _END + b"\n" if _END in chain else b""
