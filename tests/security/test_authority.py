"""Certificates of a run: made for each process, or given in files that are checked before anything starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from clock import Clock
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from rayzero.config import RunConfig, SecurityConfig
from rayzero.errors import ConfigError
from rayzero.security.authority import LASTS, RENEW_EVERY, Authority, GivenFiles, Issuer, issuer
from rayzero.security.credentials import ANY_RANK, OWNER, SAID_BEFORE, Credentials

RUN = Authority("x", on_loopback=False)


def issuer_of(config: SecurityConfig) -> Issuer:
    found = issuer("a run", config)
    assert found is not None
    return found


def names_in(credentials: Credentials) -> list[str]:
    certificate = x509.load_pem_x509_certificate(credentials.certificate)
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return found.value.get_values_for_type(x509.DNSName)


def test_each_process_has_a_certificate_of_its_own_that_only_its_run_signed() -> None:
    run = issuer_of(SecurityConfig())
    one, other = run.issue("optimizer 0", [OWNER]), run.issue("rank 3", ["rank-3.rayzero"])
    assert one.authority == other.authority != RUN.issue("x", []).authority
    assert one.key != other.key
    assert (names_in(one), names_in(other)) == ([OWNER], ["rank-3.rayzero"])
    made, authority = map(x509.load_pem_x509_certificate, (one.certificate, one.authority))
    made.verify_directly_issued_by(authority)
    assert made.not_valid_after_utc - made.not_valid_before_utc <= LASTS + timedelta(hours=1)
    usage = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_certificates_are_renewed_three_times_in_their_life_and_the_authority_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rayzero.security.authority.time", clock := Clock())
    run = Authority("x", on_loopback=False)
    first = run.issue("optimizer 0", [OWNER])
    assert first.ends.timestamp() == clock.now + LASTS.total_seconds()
    assert not run.refresh()
    clock.now += RENEW_EVERY.total_seconds()
    assert (run.refresh(), run.refresh()) == (True, False)
    newer = run.issue("optimizer 0", [OWNER])
    assert newer.ends - first.ends == RENEW_EVERY
    assert newer.ends.timestamp() - clock.now == LASTS.total_seconds() == 3 * RENEW_EVERY.total_seconds()
    assert (newer.authority, newer.key != first.key) == (first.authority, True)
    assert x509.load_pem_x509_certificate(first.authority).not_valid_after_utc.year == 9999
    clock.now -= 1.0
    assert run.refresh(), "the clock was set back: who knows how long certificates last by it"


def test_a_key_is_not_shown() -> None:
    assert "PRIVATE" not in repr(RUN.issue("optimizer 0", [OWNER]))


@pytest.mark.parametrize(
    ("tls", "local", "remote"), [("auto", False, True), ("always", True, True), ("never", None, None)]
)
def test_which_connections_are_protected(tls: Any, local: bool | None, remote: bool | None) -> None:
    run = issuer("a run", SecurityConfig(tls=tls))
    if run is None:
        assert remote is None
    else:
        found = run.issue("optimizer 0", [OWNER])
        assert (found.protects("127.0.0.1:5"), found.protects("10.0.0.1:5")) == (local, remote)


def files(folder: Path, made: Credentials, **others: bytes) -> SecurityConfig:
    contents = {"certificate": made.certificate, "key": made.key, "authority": made.authority} | others
    for name, content in contents.items():
        (folder / f"{name}.pem").write_bytes(content)
    return SecurityConfig(**{name: str(folder / f"{name}.pem") for name in contents})


def test_given_certificates_are_shown_by_every_process(tmp_path: Path) -> None:
    made = RUN.issue("all", [OWNER, ANY_RANK, "something.else"])
    run = issuer_of(files(tmp_path, made))
    found = run.issue("optimizer 0", [OWNER])
    assert found == run.issue("rank 0", ["rank-0.rayzero"])
    assert (found.certificate, found.key, found.authority) == (made.certificate, made.key, made.authority)
    assert found.ends == made.ends.replace(microsecond=0)


def test_given_files_that_are_replaced_are_what_processes_get_next(tmp_path: Path) -> None:
    old, new = RUN.issue("all", BOTH), RUN.issue("all", BOTH, timedelta(days=100))
    run = issuer_of(files(tmp_path, old))
    assert not run.refresh()
    (tmp_path / "certificate.pem").write_bytes(new.certificate)
    with pytest.raises(ConfigError, match=r"key.pem is not the key of .*; what the run has ends at 2\d\d\d-"):
        run.refresh()
    assert run.issue("rank 0", []).certificate == old.certificate
    (tmp_path / "key.pem").write_bytes(new.key)
    assert (run.refresh(), run.refresh()) == (True, False)
    assert run.issue("rank 0", []).certificate == new.certificate


def test_given_files_that_may_end_before_the_run_are_named_and_refused_once_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, clock = RUN.issue("all", BOTH, SAID_BEFORE + timedelta(days=1)), Clock()
    clock.now = time.time()
    monkeypatch.setattr("rayzero.security.authority.time", clock)
    run = GivenFiles(files(tmp_path, made))
    assert run.warning is None
    clock.now += timedelta(days=2).total_seconds()
    assert run.warning is not None
    assert f"certificate.pem is valid until {made.ends:%Y-%m-%d %H:%M} UTC; afterwards no connection" in run.warning
    clock.now = made.ends.timestamp() + 1
    with pytest.raises(ConfigError, match=r"certificate.pem was valid until .*; renew it"):
        run.refresh()


def test_of_a_chain_the_first_that_ends_counts(tmp_path: Path) -> None:
    made, short = RUN.issue("all", BOTH), RUN.issue("all", BOTH, timedelta(minutes=5))
    config = files(tmp_path, made, certificate=made.certificate + short.certificate)
    assert issuer_of(config).issue("x", []).ends == short.ends.replace(microsecond=0)
    gone = RUN.issue("all", BOTH, timedelta(seconds=-5))
    config = files(tmp_path, made, certificate=made.certificate + gone.certificate)
    with pytest.raises(ConfigError, match=r"what has signed .*certificate.pem was valid until"):
        issuer_of(config)


CHANGES: dict[str, Callable[[Credentials], dict[str, bytes]]] = {
    "signed by another": lambda made: {"authority": Authority("x", on_loopback=False).issue("x", []).authority},
    "key of another": lambda made: {"key": RUN.issue("x", []).key},
    "no PEM": lambda made: {"key": b"key"},
    "broken PEM": lambda made: {"certificate": made.certificate[:200] + made.certificate[300:]},
    "certificate as key": lambda made: {"key": made.certificate},
    "unchanged": lambda made: {},
}
BOTH = (OWNER, ANY_RANK)


@pytest.mark.parametrize(
    ("names", "days", "change", "said"),
    [
        (BOTH, 1, "signed by another", r"security.authority: .* has not signed"),
        (BOTH, 1, "key of another", r"security.key: .* is not the key of"),
        (BOTH, 1, "no PEM", r"security.key: .* is no PEM file"),
        (BOTH, 1, "broken PEM", r"^run.security.certificate: .*certificate.pem has no certificate in PEM"),
        (BOTH, 1, "certificate as key", r"^run.security.key: .*key.pem has no private key in PEM without a password"),
        (BOTH, -0.01, "unchanged", r"security.certificate: .* was valid until .* UTC; renew it"),
        ((OWNER,), 1, "unchanged", r"lacks the DNS name rank.rayzero"),
        (("localhost",), 1, "unchanged", r"lacks the DNS names owner.rayzero and rank.rayzero"),
    ],
)
def test_files_that_no_process_could_use_are_refused(
    names: Sequence[str],
    days: float,
    change: str,
    said: str,
    tmp_path: Path,
) -> None:
    made = RUN.issue("all", names, timedelta(days=days))
    config = files(tmp_path, made, **CHANGES[change](made))
    with pytest.raises(ConfigError, match=said) as refused:
        issuer("a run", config)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = files(tmp_path, RUN.issue("all", BOTH))
    (tmp_path / "key.pem").unlink()
    with pytest.raises(ConfigError, match=r"security.key: cannot read .*key.pem: No such file"):
        issuer("a run", config)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["FIFO", "device", "folder", "large"])
def test_a_file_that_is_none_is_named_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    """The run looks at the files again each minute: opening a FIFO would stop it."""
    config = files(tmp_path, RUN.issue("all", BOTH))
    key = tmp_path / "key.pem"
    key.unlink()
    match kind:
        case "FIFO":
            os.mkfifo(key)
        case "device":
            key.symlink_to("/dev/zero")
        case "folder":
            key.mkdir()
        case _:
            key.write_bytes(b"-----BEGIN " + bytes(1 << 20))
    said = r"has more than 1,048,576 bytes" if kind == "large" else rf"it is a {kind}, not a regular file"
    with pytest.raises(ConfigError, match=rf"^run.security.key: .*key.pem:? {said}"):
        issuer("a run", config)


@pytest.mark.promise("refused", "tls")
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
