"""What processes of a run show, to whom, and when there is something newer; without processes."""

from __future__ import annotations

from datetime import timedelta

import pytest
from cryptography import x509

from rayzero.cluster.files.key_files import FollowerKey
from rayzero.cluster.roster import Certificates
from rayzero.config import SecurityConfig
from rayzero.security.credentials import ANY_RANK, FOLLOWER, OWNER, Credentials, follower_token, name_of_rank
from rayzero.security.metrics_access import MetricsAccess
from rayzero.telemetry.pages import Protection
from rayzero.telemetry.scrape import Viewer

GIVEN, OWN = Protection(token="given"), Protection(token="own")


@pytest.mark.parametrize(
    ("host", "bind", "given", "expected"),
    [
        ("127.0.0.1", "auto", None, None),
        ("10.0.0.1", "auto", None, OWN),
        ("fd00::1", "auto", None, OWN),
        ("10.0.0.1", "node", None, None),
        ("127.0.0.1", "loopback", None, None),
        ("127.0.0.1", "auto", GIVEN, GIVEN),
        ("10.0.0.1", "node", GIVEN, GIVEN),
        ("127.0.0.1", "loopback", GIVEN, GIVEN),
    ],
)
def test_what_crosses_a_network_is_open_only_by_a_word(
    host: str, bind: str, given: Protection | None, expected: Protection | None
) -> None:
    access = MetricsAccess("demo", None)
    access.given, access.own = given, OWN
    assert Certificates("demo", SecurityConfig(tls="never"), access).of_exporter(host, bind) is expected


def names_in(shown: Credentials | None) -> list[str]:
    assert shown is not None
    found = x509.load_pem_x509_certificates(shown.certificate)[0].extensions
    return found.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)


def test_an_owner_shows_that_it_is_one_and_a_rank_shows_which_it_is() -> None:
    run = Certificates("demo", SecurityConfig())
    assert names_in(run.of_owner(1)) == [OWNER]
    assert names_in(run.of_rank(3)) == [name_of_rank(3)]
    assert names_in(run.of_rank(None)) == [ANY_RANK]
    assert names_in(run.of_follower().tls) == [FOLLOWER]
    assert run.of_follower().token == follower_token(run.token) != run.token


def test_without_tls_nobody_shows_anything_but_the_token() -> None:
    run = Certificates("demo", SecurityConfig(tls="never"))
    assert (run.of_owner(0), run.of_rank(0), run.of_rank(None)) == (None, None, None)
    assert run.of_follower() == FollowerKey(token=follower_token(run.token))
    assert (run.refresh(), run.warnings) == (False, [])
    assert len(run.token) == 64
    assert run.token != Certificates("demo", SecurityConfig(tls="never")).token


def test_without_access_metrics_are_for_everybody() -> None:
    run = Certificates("demo", SecurityConfig())
    assert run.of_exporter("10.0.0.1", "auto") is None
    assert run.viewer == Viewer()


@pytest.mark.parametrize("late", [["issuer"], ["access"], ["issuer", "access"], []])
def test_one_that_is_old_is_enough_for_something_newer(late: list[str]) -> None:
    access = MetricsAccess("demo", None)
    run = Certificates("demo", SecurityConfig(), access)
    authorities = {"issuer": run._issuer, "access": access._exporters}
    before = run.of_exporter("10.0.0.1", "auto"), run.viewer
    assert before == (access.own, access.viewer)
    assert not run.refresh()
    for who in late:
        authorities[who]._renewed -= timedelta(hours=9)
    assert run.refresh() == bool(late)
    after = run.of_exporter("10.0.0.1", "auto"), run.viewer
    assert (after != before) == ("access" in late)
    assert not run.refresh(), "both are new now"
