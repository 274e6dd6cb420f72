"""Certificates of a run: made for each process, or given in files that are checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from rayzero.config import RunConfig, SecurityConfig
from rayzero.errors import ConfigError
from rayzero.security.authority import LASTS, Authority, issuer
from rayzero.security.credentials import ANY_RANK, OWNER, Credentials

RUN = Authority("x", on_loopback=False)


def names_in(credentials: Credentials) -> list[str]:
    certificate = x509.load_pem_x509_certificate(credentials.certificate)
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return found.value.get_values_for_type(x509.DNSName)


def test_each_process_has_a_certificate_of_its_own_that_only_its_run_signed() -> None:
    issue = issuer("a run", SecurityConfig())
    one, other = issue("optimizer 0", [OWNER]), issue("rank 3", ["rank-3.rayzero"])
    assert one is not None
    assert other is not None
    assert one.authority == other.authority != RUN.issue("x", []).authority
    assert one.key != other.key
    assert (names_in(one), names_in(other)) == ([OWNER], ["rank-3.rayzero"])
    made, authority = map(x509.load_pem_x509_certificate, (one.certificate, one.authority))
    made.verify_directly_issued_by(authority)
    assert made.not_valid_after_utc - made.not_valid_before_utc < LASTS + timedelta(days=1)
    usage = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_key_is_not_shown() -> None:
    assert "PRIVATE" not in repr(RUN.issue("optimizer 0", [OWNER]))


@pytest.mark.parametrize(
    ("tls", "local", "remote"), [("auto", False, True), ("always", True, True), ("never", None, None)]
)
def test_which_connections_are_protected(tls: Any, local: bool | None, remote: bool | None) -> None:
    found = issuer("a run", SecurityConfig(tls=tls))("optimizer 0", [OWNER])
    if found is None:
        assert remote is None
    else:
        assert (found.protects("127.0.0.1:5"), found.protects("10.0.0.1:5")) == (local, remote)


def files(folder: Path, made: Credentials, **others: bytes) -> SecurityConfig:
    contents = {"certificate": made.certificate, "key": made.key, "authority": made.authority} | others
    for name, content in contents.items():
        (folder / f"{name}.pem").write_bytes(content)
    return SecurityConfig(**{name: str(folder / f"{name}.pem") for name in contents})


def test_given_certificates_are_shown_by_every_process(tmp_path: Path) -> None:
    made = RUN.issue("all", [OWNER, ANY_RANK, "something.else"])
    issue = issuer("a run", files(tmp_path, made))
    assert issue("optimizer 0", [OWNER]) == issue("rank 0", ["rank-0.rayzero"]) == made


def signed_by_another(made: Credentials) -> dict[str, bytes]:
    return {"authority": Authority("x", on_loopback=False).issue("x", []).authority}


def key_of_another(made: Credentials) -> dict[str, bytes]:
    return {"key": RUN.issue("x", []).key}


def no_pem(made: Credentials) -> dict[str, bytes]:
    return {"key": b"key"}


def broken_pem(made: Credentials) -> dict[str, bytes]:
    return {"certificate": made.certificate[:200] + made.certificate[300:]}


def unchanged(made: Credentials) -> dict[str, bytes]:
    return {}


BOTH = (OWNER, ANY_RANK)


@pytest.mark.parametrize(
    ("names", "days", "change", "said"),
    [
        (BOTH, 1, signed_by_another, r"security.authority: .* has not signed"),
        (BOTH, 1, key_of_another, r"security.key: .* is not the key of"),
        (BOTH, 1, no_pem, r"security.key: .* is no PEM file"),
        (BOTH, 1, broken_pem, r"^security: .*certificate.pem"),
        (BOTH, -0.01, unchanged, r"security.certificate: .* was valid until .* UTC; renew it"),
        ((OWNER,), 1, unchanged, r"lacks the DNS name rank.rayzero"),
        (("localhost",), 1, unchanged, r"lacks the DNS name owner.rayzero and rank.rayzero"),
    ],
)
def test_files_that_no_process_could_use_are_refused(
    names: Sequence[str],
    days: float,
    change: Callable[[Credentials], dict[str, bytes]],
    said: str,
    tmp_path: Path,
) -> None:
    made = RUN.issue("all", names, timedelta(days=days))
    config = files(tmp_path, made, **change(made))
    with pytest.raises(ConfigError, match=said) as refused:
        issuer("a run", config)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = files(tmp_path, RUN.issue("all", BOTH))
    (tmp_path / "key.pem").unlink()
    with pytest.raises(ConfigError, match=r"security.key: cannot read .*key.pem: No such file"):
        issuer("a run", config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls": "off"}, "tls is 'off' but must be 'auto', 'always' or 'never'"),
        ({"certificate": "a", "key": "b"}, "certificate and key without the rest; pass certificate, key and authority"),
        ({"certificate": "a", "key": "b", "authority": "c", "tls": "never"}, 'tls is "never"'),
        ({"tsl": "auto"}, "did you mean 'tls'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RunConfig(security=settings)
