"""Where the processes of a run have their certificates from: the run's own authority, whose key stays in the memory of
the process that made it, or files of its user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import time
from typing import Protocol, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rayzero.config import SecurityConfig
from rayzero.errors import ConfigError
from rayzero.security.credentials import ANY_RANK, OWNER, Credentials, expiry_warning, read_pem, utc

LASTS = timedelta(hours=24)  # what a process shows
RENEW_EVERY = LASTS / 3  # each has two thirds of its life left by then, so a renewal that fails can be tried for hours
_SKEW = timedelta(hours=1)  # of the hosts' clocks
_NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280's date of what ends with its use


class Authority:
    """Makes the certificates of a run's processes, with ECDSA keys on P-256 (RFC 5280, RFC 8422)."""

    def __init__(self, run: str, *, on_loopback: bool) -> None:
        """``on_loopback``: whether connections within a host are protected too."""
        self._on_loopback, self._renewed = on_loopback, _now()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(f"run {run}"[:64])  # RFC 5280's bound of a common name
        public = self._key.public_key()
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        self._certificate = (
            self._begin(self._name, public, _NEVER)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def refresh(self) -> bool:
        """Whether it is time to issue new certificates to everybody. True at most once in ``RENEW_EVERY``, and when the
        clock was set back."""
        now = _now()
        due = not timedelta(0) <= now - self._renewed < RENEW_EVERY
        self._renewed = now if due else self._renewed
        return due

    warning = None  # what it issues does not end before the run: it renews it

    def issue(self, who: str, names: Sequence[str], lasts: timedelta | None = None) -> Credentials:
        """Credentials of one process. ``who``: for people. ``names``: what it may do, see [Note: names in
        certificates]. ``lasts``: None: ``LASTS``."""
        key = ec.generate_private_key(ec.SECP256R1())
        ends = _now() + (lasts or LASTS)
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            self._begin(_subject(who[:64]), key.public_key(), ends)
            .add_extension(x509.SubjectAlternativeName(list(map(x509.DNSName, names))), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(both, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Credentials(
            certificate=certificate.public_bytes(Encoding.PEM),
            key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            authority=self._certificate.public_bytes(Encoding.PEM),
            ends=ends,
            on_loopback=self._on_loopback,
        )

    def _begin(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, ends: datetime) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_now() - _SKEW)
            .not_valid_after(ends)
        )


def _now() -> datetime:
    return datetime.fromtimestamp(time(), UTC)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


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
