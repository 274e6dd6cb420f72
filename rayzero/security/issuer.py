"""Where the processes of a run have their certificates from: the run's own authority, or files of its user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Protocol, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from rayzero.config import SecurityConfig
from rayzero.errors import ConfigError
from rayzero.security.authority import Authority
from rayzero.security.credentials import ANY_RANK, OWNER, Credentials, expiry_warning, read_pem, utc

Parsed = TypeVar("Parsed")


class Issuer(Protocol):
    """Gives each process of a run its credentials, and says when everybody needs newer ones."""

    def issue(self, who: str, names: Sequence[str]) -> Credentials:
        """See ``Authority.issue``."""

    def refresh(self) -> bool:
        """Whether what is issued from now on is newer than what processes have. Called once a minute."""

    @property
    def warning(self) -> str | None:
        """That certificates may end before the run; None: they do not."""


class GivenFiles:
    """An issuer that gives everybody the certificate in a user's files, as they are by now."""

    def __init__(self, config: SecurityConfig) -> None:
        """Raises ConfigError, naming the file, for what every process would refuse."""
        self._config = config
        self._given = self._read()

    def issue(self, who: str, names: Sequence[str]) -> Credentials:
        """The same for everybody."""
        return self._given

    def refresh(self) -> bool:
        """Whether the files have changed. Raises ConfigError, and issues what it had before, if they cannot be used."""
        try:
            found = self._read()
        except ConfigError as error:
            raise ConfigError(f"{error}; what the run has ends at {utc(self._given.ends)}") from error
        changed, self._given = found != self._given, found
        return changed

    @property
    def warning(self) -> str | None:
        """That they may end before the run; None: they last long."""
        return expiry_warning(f"run.security.certificate: {self._config.certificate}", self._given.ends, self._now())

    def _now(self) -> datetime:
        return datetime.fromtimestamp(time(), UTC)

    def _read(self) -> Credentials:
        config = self._config
        paths = {"certificate": config.certificate, "key": config.key, "authority": config.authority}
        pem = {name: read_pem(f"run.security.{name}", Path(str(path))) for name, path in paths.items()}
        chain = _parse("certificate", paths, pem, x509.load_pem_x509_certificates, "certificate in PEM")
        believed = _parse("authority", paths, pem, x509.load_pem_x509_certificates, "certificate in PEM")
        key = _parse("key", paths, pem, _load_key, "private key in PEM without a password")
        counting = chain + (believed if len(believed) == 1 else [])  # of several, the verifier chooses one
        ends = min(each.not_valid_after_utc for each in counting)
        _check(chain, key.public_key(), believed, config)
        if ends <= self._now():
            signer = f"what has signed {config.certificate}"
            which = config.certificate if chain[0].not_valid_after_utc == ends else signer
            raise ConfigError(f"run.security.certificate: {which} was valid until {utc(ends)}; renew it")
        return Credentials(**pem, ends=ends, on_loopback=config.tls == "always")


def _load_key(pem: bytes) -> PrivateKeyTypes:
    return load_pem_private_key(pem, None)


def _parse(
    name: str, paths: Mapping[str, str | None], pem: Mapping[str, bytes], load: Callable[[bytes], Parsed], what: str
) -> Parsed:
    """What is in the file of a setting. Raises ConfigError, naming both, if that is not ``what``."""
    try:
        return load(pem[name])
    except (ValueError, TypeError) as error:  # TypeError: a password would be needed
        raise ConfigError(f"run.security.{name}: {paths[name]} has no {what}; pass the file that has one") from error


def issuer(run: str, config: SecurityConfig) -> Issuer | None:
    """What gives each process of a run its credentials; None: connections are plain. Raises ConfigError
    if given ones cannot be used."""
    if config.tls == "never":
        return None
    if config.certificate is None:
        return Authority(run, on_loopback=config.tls == "always")
    return GivenFiles(config)


def _check(
    chain: Sequence[x509.Certificate], key: object, believed: Sequence[x509.Certificate], config: SecurityConfig
) -> None:
    """Raise ConfigError, naming the file, for what every process would refuse. ``key``: the public part of the given
    one."""
    certificate = chain[0]
    if key != certificate.public_key():
        raise ConfigError(
            f"run.security.key: {config.key} is not the key of {config.certificate}; pass the one that is"
        )
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = set(found.value.get_values_for_type(x509.DNSName))
    except x509.ExtensionNotFound:
        names = set()
    if missing := [name for name in (OWNER, ANY_RANK) if name not in names]:
        lacks = f"lacks the DNS name{'s' * (len(missing) - 1)} {' and '.join(missing)}"
        raise ConfigError(
            f"run.security.certificate: {config.certificate} {lacks}; every process of the run shows it, so it needs "
            f"{OWNER} and {ANY_RANK}"
        )
    if len(chain) == 1 and not any(_has_signed(authority, certificate) for authority in believed):
        raise ConfigError(
            f"run.security.authority: {config.authority} has not signed {config.certificate}; pass the one that has, "
            "or put the chain into the certificate's file"
        )


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
