"""How a run's metrics are protected: as its user's web config says or, on a network, by a certificate of the run's own.

The run's own tools (``rayzero top``, ``rayzero trace``, the plan's check) are let in everywhere by a token, and by a
client's certificate where the web config asks for one. A web config is a file as the ``--web.config.file`` of
Prometheus' own exporters says it.
"""

from __future__ import annotations

import difflib
import re
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any, Literal, Self

from cryptography import x509
from pydantic import Field, field_validator, model_validator

from rayzero.config.base import ConfigModel
from rayzero.config.text import load_yaml
from rayzero.errors import ConfigError
from rayzero.files import read_text
from rayzero.security.authority import Authority
from rayzero.security.credentials import expiry_warning, read_pem, utc
from rayzero.telemetry.pages import Protection, require_bcrypt
from rayzero.telemetry.scrape import Viewer

MOST_COST = 14  # of a bcrypt hash: a comparison takes about a second

_SETTING = "run.telemetry.web_config"
_END = b"-----END CERTIFICATE-----"
_MOST = 1 << 20  # bytes of the file

_HASH = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_LEFT_OUT = (  # settings of the format that exporters of a run do not have
    "http_server_config", "cipher_suites", "curve_preferences", "prefer_server_cipher_suites", "client_allowed_sans",
    "cert", "key", "client_ca",
)  # fmt: skip


class TlsServerConfig(ConfigModel):
    """Says how connections to exporters are encrypted. Paths are relative to the file that names them."""

    cert_file: str
    """PEM file of the certificate that every exporter shows, perhaps with its chain."""

    key_file: str
    """PEM file of the certificate's private key, without a password."""

    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    """Whether clients must have certificates of client_ca_file."""

    client_ca_file: str | None = None
    """PEM file of the authorities whose certificates clients may show."""

    min_version: Literal["TLS12", "TLS13"] = "TLS12"
    """The oldest TLS that is spoken."""

    max_version: Literal["TLS12", "TLS13"] = "TLS13"
    """The newest TLS that is spoken."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.client_ca_file is None and self.client_auth_type != "NoClientCert":
            raise ValueError(f"client_auth_type is {self.client_auth_type} without client_ca_file; add one")
        if self.client_ca_file is not None and self.client_auth_type == "NoClientCert":
            raise ValueError(
                f"client_ca_file is {self.client_ca_file!r}, but nobody is asked for a certificate; set "
                "client_auth_type: RequireAndVerifyClientCert"
            )
        if self.min_version > self.max_version:
            raise ValueError(f"min_version is {self.min_version}, above max_version, {self.max_version}; swap them")
        return self


class WebConfig(ConfigModel):
    """Says who may read the metrics of a run's processes."""

    tls_server_config: TlsServerConfig | None = None
    """Encryption, and certificates of clients; null: connections are plain."""

    basic_auth_users: dict[str, str] = Field(default_factory=dict)
    """Names of users and bcrypt hashes of their passwords; none: any client that reaches an exporter may read it."""

    @model_validator(mode="before")
    @classmethod
    def _only_what_there_is(cls, settings: Any) -> Any:
        tls = settings.get("tls_server_config") if isinstance(settings, Mapping) else None
        for name in (*(settings if isinstance(settings, Mapping) else ()), *(tls if isinstance(tls, Mapping) else ())):
            if name in _LEFT_OUT:
                raise ConfigError(f"{name} is not supported by the exporters of a run; take it out")
        for name in settings if isinstance(settings, Mapping) else ():  # its value may have passwords: not repeated
            if name not in cls.model_fields:
                near = difflib.get_close_matches(name, cls.model_fields, n=1) or cls.model_fields
                raise ConfigError(f"unknown setting {name!r}; there is {' and '.join(near)}")
        return settings

    @field_validator("basic_auth_users", mode="before")
    @classmethod
    def _hashed(cls, users: object) -> object:
        if not isinstance(users, Mapping):
            raise ConfigError("must be a mapping of users' names to bcrypt hashes of their passwords")
        for name, said in users.items():  # what is no hash may be a password: it is not repeated
            if not isinstance(name, str) or not name or ":" in name:
                raise ConfigError(f"{name!r} cannot be a user's name in basic authentication; take text without colon")
            found = _HASH.fullmatch(said) if isinstance(said, str) else None
            if found is None:
                raise ConfigError(f"the password of {name!r} is no bcrypt hash; make one with htpasswd -nBC 10 {name}")
            if not 4 <= int(found[1]) <= MOST_COST:
                raise ConfigError(f"the hash of {name!r} has cost {int(found[1])}, but may have 4 to {MOST_COST}")
        return users

    @model_validator(mode="after")
    def _protects(self) -> Self:
        if self.tls_server_config is None and not self.basic_auth_users:
            raise ValueError("has neither tls_server_config nor basic_auth_users, and protects nothing; add one")
        return self


def read_web_config(path: Path) -> WebConfig:
    """The settings in a file, with all paths made whole. Raises ConfigError, naming the file."""
    try:
        text = read_text(path, at_most=_MOST)
    except (OSError, ValueError) as error:
        why = (error.strerror or error) if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"run.telemetry.web_config: cannot read {path}: {why}") from error
    try:
        settings = load_yaml(text, source=str(path))
    except ConfigError as error:  # it names the file
        raise ConfigError(f"run.telemetry.web_config: {error}") from error
    try:
        found = WebConfig.from_mapping(settings)
    except ConfigError as error:
        raise ConfigError(f"run.telemetry.web_config: {path}: {error}") from error
    tls = found.tls_server_config
    if tls is None:
        return found
    files = {name: getattr(tls, name) for name in ("cert_file", "key_file", "client_ca_file")}
    whole = {name: str(path.parent / file) for name, file in files.items() if file is not None}
    return found.replace(tls_server_config=tls.replace(**whole))


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
