"""The certificate authority of one run. Its key stays in the memory of the process that made it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rayzero.config import SecurityConfig
from rayzero.errors import ConfigError
from rayzero.security.credentials import ANY_RANK, OWNER, Credentials, read_credentials

Issuer = Callable[[str, Sequence[str]], "Credentials | None"]  # (who, names) -> ...; see ``Authority.issue``
LASTS = timedelta(days=90)  # longer than a run; nobody trusts the authority once its run is over
_SKEW = timedelta(hours=1)  # of the hosts' clocks


class Authority:
    """Makes the certificates of a run's processes, with ECDSA keys on P-256 (RFC 5280, RFC 8422)."""

    def __init__(self, run: str, *, on_loopback: bool) -> None:
        """``on_loopback``: whether connections within a host are protected too."""
        self._on_loopback = on_loopback
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(f"run {run}"[:64])  # RFC 5280's bound of a common name
        public = self._key.public_key()
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        self._certificate = (
            self._begin(self._name, public, LASTS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, who: str, names: Sequence[str], lasts: timedelta = LASTS) -> Credentials:
        """Credentials of one process. ``who``: for people. ``names``: what it may do, see [Note: names in
        certificates]."""
        key = ec.generate_private_key(ec.SECP256R1())
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            self._begin(_subject(who[:64]), key.public_key(), lasts)
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
            on_loopback=self._on_loopback,
        )

    def _begin(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, lasts: timedelta) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + lasts)
        )


def issuer(run: str, config: SecurityConfig) -> Issuer:
    """What gives each process of a run its credentials. Raises ConfigError if given ones cannot be used."""
    on_loopback = config.tls == "always"
    if config.tls == "never":
        return lambda who, names: None
    if config.certificate is None or config.key is None or config.authority is None:
        return Authority(run, on_loopback=on_loopback).issue
    given = read_credentials(*map(Path, (config.certificate, config.key, config.authority)), on_loopback=on_loopback)
    _check(given, config)
    return lambda who, names: given


def _check(given: Credentials, config: SecurityConfig) -> None:
    """Raise ConfigError, naming the file, for what every process would refuse."""
    try:
        certificate = x509.load_pem_x509_certificate(given.certificate)
        authority = x509.load_pem_x509_certificate(given.authority)
        key = load_pem_private_key(given.key, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"security: {config.certificate}, {config.key} or {config.authority}: {error}") from error
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"security.key: {config.key} is not the key of {config.certificate}; pass the one that is")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        ended = f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise ConfigError(f"security.certificate: {config.certificate} was valid until {ended}; renew it")
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = set(found.value.get_values_for_type(x509.DNSName))
    except x509.ExtensionNotFound:
        names = set()
    if missing := [name for name in (OWNER, ANY_RANK) if name not in names]:
        raise ConfigError(
            f"security.certificate: {config.certificate} lacks the DNS name {' and '.join(missing)}; every process of "
            "the run shows it, so it needs both"
        )
    if len(given.certificate.split(b"BEGIN CERTIFICATE")) == 2:  # no chain
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise ConfigError(
                f"security.authority: {config.authority} has not signed {config.certificate}; pass the one that has, "
                "or put the chain into the certificate's file"
            ) from error


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
