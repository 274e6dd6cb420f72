"""``WebConfig``: who may read a run's metrics, as the ``--web.config.file`` of Prometheus' own exporters says it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rayzero.config.base import ConfigModel
from rayzero.config.yaml_text import load_yaml
from rayzero.errors import ConfigError
from rayzero.files import read_text

MOST_COST = 14  # of a bcrypt hash: a comparison takes about a second

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
    """Names of users and bcrypt hashes of their passwords; none: whoever reaches an exporter may read it."""

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
