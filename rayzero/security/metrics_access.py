"""How a run's metrics are protected: as its user's web config says or, on a network, by a certificate of the run's own.

The run's own tools (``rayzero top``, ``rayzero trace``, the plan's check) are let in everywhere by a token, and by a
client's certificate where the web config asks for one.
"""

from __future__ import annotations

import secrets
import ssl
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import time

from cryptography import x509

from rayzero.config.web_config import TlsServerConfig, WebConfig, read_web_config
from rayzero.errors import ConfigError
from rayzero.security.authority import Authority
from rayzero.security.credentials import expiry_warning, read_pem, utc
from rayzero.telemetry.guard import Protection, require_bcrypt
from rayzero.telemetry.scrape import Viewer

_SETTING = "run.telemetry.web_config"
_END = b"-----END CERTIFICATE-----"


class MetricsAccess:
    """The protections that a run's exporters may have, and what opens them to the run's own tools, as they are by now.

    The authorities of its own certificates stay in this process's memory. What exporters show and what tools show is
    signed by different ones, so that neither can pose as the other."""

    def __init__(self, run: str, web_config: str | None) -> None:
        """``web_config``: path of the user's; None: none. Raises ConfigError, naming the file, for what cannot be
        used."""
        self._token = secrets.token_hex(32)
        self._exporters = Authority(run, on_loopback=False)
        self._tools = Authority(f"{run} tools", on_loopback=False)
        self._config = None if web_config is None else _web_config(Path(web_config))
        self._files = self._read()
        self._issue()

    def refresh(self) -> bool:
        """Whether they are newer than before: certificates of the run's own are renewed, those in the user's files are
        read again; the rest of the web config holds from the start. Called once a minute. Raises ConfigError, and stays
        as it was, if the user's cannot be used."""
        before, self._files = self._files, self._read()
        changed = self._exporters.refresh() or self._files != before
        if changed:
            self._issue()
        return changed

    @property
    def warning(self) -> str | None:
        """That the user's certificate may end before the run; None: it lasts long, or there is none."""
        if self._files is None or self._files.certificate is None:
            return None
        ends = x509.load_pem_x509_certificate(self._files.certificate).not_valid_after_utc
        return expiry_warning(f"{_SETTING}: its cert_file", ends, datetime.fromtimestamp(time(), UTC))

    def _read(self) -> Protection | None:
        """What the user asks of clients."""
        return None if self._config is None else _given(self._config, self._token)

    def _issue(self) -> None:
        token, given = self._token, self._files
        shown = self._exporters.issue("metrics", ["metrics.rayzero"])
        self.own = Protection(certificate=shown.certificate, key=shown.key, token=token)
        trusted, client = shown.authority, None
        if given is not None:
            trusted += _first(given.certificate or b"")
        if given is not None and given.requires_client:
            made = self._tools.issue("rayzero", ["viewer.rayzero"])
            given = replace(given, clients=given.clients + b"\n" + made.authority)
            client = (made.certificate + made.key).decode()
        in_clear = given is not None and given.certificate is None
        self.given = given  # as the user's web config says; None: there is none
        self.viewer = Viewer(token=token, trusted=trusted.decode(), client=client, in_clear=in_clear)


def _web_config(path: Path) -> WebConfig:
    config = read_web_config(path)
    if config.basic_auth_users:
        require_bcrypt()
    return config


def _given(config: WebConfig, token: str) -> Protection:
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
    if until <= datetime.fromtimestamp(time(), UTC):
        raise ConfigError(f"{_SETTING}: {tls.cert_file} was valid until {utc(until)}; renew it")
    return made


def _read(name: str, path: str) -> bytes:
    return read_pem(f"{_SETTING}: {name}", Path(path))


def _first(chain: bytes) -> bytes:
    """The server's own certificate: those behind it may sign others."""
    return chain.partition(_END)[0] + _END + b"\n" if _END in chain else b""
