"""The certificate authority of one run. Its key stays in the memory of the process that made it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from time import time

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rayzero.security.credentials import Credentials

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
