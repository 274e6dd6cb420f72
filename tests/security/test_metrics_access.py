"""Web configs: what they may say, and one clear line for what they may not."""

from __future__ import annotations

import datetime
import os
import re
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from telemetry.web_configs import HASH, TestAuthority, written

from rayzero.cluster.files.key_files import VIEWER_FILE, read_viewer, viewable, write_key
from rayzero.config import RunConfig, TelemetryConfig
from rayzero.errors import ConfigError
from rayzero.security.metrics_access import MetricsAccess
from rayzero.telemetry.scrape import Viewer

TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    """Its server.pem and server.key are there."""
    made = TestAuthority(tmp_path)
    made.issue("server")
    return made


@pytest.mark.promise("refused", "alerts")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "WebConfig: has neither tls_server_config nor basic_auth_users, and protects nothing; add one"),
        ("[]", "must be a mapping of setting names to values"),
        ("a: [", "not valid YAML"),
        ("basic_auth_user: {a: hunter2}", "unknown setting 'basic_auth_user'; there is basic_auth_users"),
        ("x: hunter2", "unknown setting 'x'; there is tls_server_config and basic_auth_users"),
        ("http_server_config: {http2: true}", "http_server_config is not supported by the exporters of a run; take it"),
        (TLS + "  cipher_suites: [x]", "cipher_suites is not supported"),
        (TLS + "  client_allowed_sans: [x]", "client_allowed_sans is not supported"),
        ("basic_auth_users: {a: hunter2}", "the password of 'a' is no bcrypt hash; make one with htpasswd -nBC 10 a"),
        ("basic_auth_users: {a: 4771}", "the password of 'a' is no bcrypt hash; make one with htpasswd -nBC 10 a"),
        ("basic_auth_users: [a, hunter2]", "basic_auth_users: must be a mapping of users' names to bcrypt hashes"),
        ("basic_auth_users:", "basic_auth_users: must be a mapping of users' names to bcrypt hashes"),
        (f"basic_auth_users: {{7: {HASH}}}", "7 cannot be a user's name in basic authentication; take text"),
        (f"basic_auth_users: {{'a:b': {HASH}}}", "'a:b' cannot be a user's name in basic authentication"),
        (f"basic_auth_users: {{a: {HASH.replace('$04$', '$15$')}}}", "has cost 15, but may have 4 to 14"),
        ("tls_server_config: {cert_file: x}", "TlsServerConfig: key_file is missing"),
        (TLS + "  client_auth_type: RequestClientCert", "client_auth_type is 'RequestClientCert' but must be"),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert", "without client_ca_file; add one"),
        (TLS + "  client_ca_file: authority.pem", "but nobody is asked for a certificate"),
        (TLS + "  min_version: TLS10", "min_version is 'TLS10' but must be 'TLS12' or 'TLS13'"),
        (TLS + "  min_version: TLS13\n  max_version: TLS12", "min_version is TLS13, above max_version, TLS12; swap"),
        (TLS.replace("server.pem", "none.pem"), "cert_file: cannot read"),
        (TLS.replace("server.key", "web.yaml"), "web.yaml is no PEM file"),
        (TLS.replace("server.key", "other.key"), "key values mismatch"),
        (TLS.replace("server.key", "locked.key"), "without password"),
        (TLS.replace("server.", "old."), "was valid until"),
        (
            TLS + "  client_ca_file: server.key\n  client_auth_type: RequireAndVerifyClientCert",
            "cadata does not contain a certificate",
        ),
    ],
)
def test_what_a_web_config_may_not_say_is_one_line(
    text: str, said: str, tmp_path: Path, authority: TestAuthority
) -> None:
    authority.issue("other")
    authority.issue("old", datetime.timedelta(seconds=-1))
    key = load_pem_private_key((tmp_path / "server.key").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    (tmp_path / "locked.key").write_bytes(locked)
    with pytest.raises(ConfigError) as refused:
        MetricsAccess("demo", written(tmp_path, text))
    assert said in str(refused.value)
    assert str(refused.value).startswith("run.telemetry.web_config: ")
    assert "\n" not in str(refused.value)
    assert not {"hunter2", "4771"} & set(re.findall(r"\w+", str(refused.value))), "it may be somebody's password"


def test_a_missing_web_config_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^run.telemetry.web_config: cannot read /nowhere/web.yaml: No such file"):
        MetricsAccess("demo", "/nowhere/web.yaml")
    for path, said in ((Path("/dev/zero"), "it is a device, not a regular file"), (Path("/"), "it is a folder, not a")):
        with pytest.raises(ConfigError, match=rf"^run.telemetry.web_config: cannot read {path}: {said}"):
            MetricsAccess("demo", str(path))
    with pytest.raises(ConfigError, match="web_config needs enabled: true"):
        TelemetryConfig(web_config="x", enabled=False)
    with pytest.raises(ConfigError, match="web_config is '' but must not be empty"):
        RunConfig(telemetry={"web_config": ""})


def test_paths_are_relative_to_the_file(
    tmp_path: Path, authority: TestAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    made = MetricsAccess("demo", written(tmp_path, TLS))
    assert made.given.certificate == (tmp_path / "server.pem").read_bytes()
    assert made.given.token is None, "TLS alone asks nobody who it is"


def test_an_authority_behind_the_servers_certificate_is_not_what_tools_trust(
    tmp_path: Path, authority: TestAuthority
) -> None:
    chain = (tmp_path / "server.pem").read_text() + authority.file.read_text()
    (tmp_path / "server.pem").write_text(chain)
    made = MetricsAccess("demo", written(tmp_path, TLS))
    assert authority.file.read_text().strip() not in made.viewer.trusted


# ---- what opens them to the run's own tools


def test_the_viewer_lies_in_the_runs_folder_for_its_user_alone_while_it_runs(tmp_path: Path) -> None:
    viewer = MetricsAccess("demo", None).viewer
    assert read_viewer(tmp_path) == Viewer()
    (tmp_path / VIEWER_FILE).touch(0o666)  # a killed run's
    with viewable(tmp_path, viewer):
        assert stat.S_IMODE(os.stat(tmp_path / VIEWER_FILE).st_mode) == 0o600
        assert read_viewer(tmp_path) == viewer
        newer = MetricsAccess("demo", None).viewer
        write_key(tmp_path, VIEWER_FILE, newer)
        assert stat.S_IMODE(os.stat(tmp_path / VIEWER_FILE).st_mode) == 0o600
        assert read_viewer(tmp_path) == newer
    assert list(tmp_path.iterdir()) == []
    with viewable(tmp_path, None):
        assert not (tmp_path / VIEWER_FILE).exists()


@pytest.mark.parametrize("content", ["", "[]", "{}x", '{"token": 1}'])
def test_a_damaged_viewer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / VIEWER_FILE).write_text(content)
    with pytest.raises(ConfigError, match=r"\.metrics-viewer\.json is not a key to a run's metrics: .*; delete it"):
        read_viewer(tmp_path)
    (tmp_path / VIEWER_FILE).unlink()
    (tmp_path / VIEWER_FILE).symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match=r"cannot read .*it is a link"):
        read_viewer(tmp_path)


def test_a_folder_that_takes_no_viewer_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"cannot write .*choose another run.storage_path"),
        viewable(tmp_path / "none", Viewer()),
    ):
        pass
