"""Protected exporters: who may read them, what strangers cost, and that a real Prometheus and our own tools get in."""

from __future__ import annotations

import base64
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from clock import Clock
from cluster.ray_cluster import free_port

from rayzero.cluster.processes.process_exporter import Exporter
from rayzero.errors import ConfigError
from rayzero.security.authority import LASTS
from rayzero.security.metrics_access import MetricsAccess
from rayzero.telemetry import http as server
from rayzero.telemetry.metric import Role
from rayzero.telemetry.names import STEP
from rayzero.telemetry.pages import Guard, Page, Protection
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.telemetry.scrape import Target, Viewer, discover, scrape, service_discovery
from tests.support.waiting import until

from .web_configs import HASH, TestAuthority, written

HOST = "127.0.0.1"
USERS = f"basic_auth_users:\n  reader: {HASH}\n"
LARGE = Page("text/plain", lambda: bytes(4 << 20))
CUT = "(?i)certificate|unknown.ca|version|reset|eof|closed connection|aborted"  # as the moment of the cut has it
Open = Callable[[Protection | None], Exporter]


refused: Counter[str] = Counter()  # by reason, in this test


def note(reason: str, client: str, why: str) -> None:
    refused[reason] += 1
    assert (client, bool(why)) == (HOST, True)


@pytest.fixture
def serve() -> Iterator[Open]:
    """Exporters until the test ends."""
    with ExitStack() as stack:
        refused.clear()

        def begin(protection: Protection | None) -> Exporter:
            recorder = MemoryRecorder()
            recorder.set(STEP, 7)
            pages = {"/large": LARGE}
            made = Exporter(recorder, Role.RANK, host=HOST, pages=pages, protection=protection, refused=note)
            stack.callback(made.close)
            return made

        yield begin


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path)


def tls_text(authority: TestAuthority, more: str = "") -> str:
    certificate, key = authority.issue("server")
    return f"tls_server_config:\n  cert_file: {certificate.name}\n  key_file: {key.name}\n{more}"


def asks_for_clients(authority: TestAuthority, kind: str = "RequireAndVerifyClientCert") -> str:
    return tls_text(authority, f"  client_ca_file: {authority.file.name}\n  client_auth_type: {kind}\n")


def access(folder: Path, text: str) -> MetricsAccess:
    return MetricsAccess("demo", written(folder, text))


def status(address: str, shown: str | None = None, tls: ssl.SSLContext | None = None) -> int:
    """The status of a request for metrics. Raises OSError if the connection is cut."""
    headers = {} if shown is None else {"Authorization": shown}
    kind = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
    more = {} if tls is None else {"context": tls}
    with closing(kind(address, timeout=20, **more)) as connection:
        connection.request("GET", "/metrics", headers=headers)
        with connection.getresponse() as answer:
            answer.read()
            return answer.status


def connect(exporter: Exporter) -> socket.socket:
    host, _, port = exporter.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def trusting(authority: TestAuthority, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.file))
    if pair is not None:
        context.load_cert_chain(*pair)
    return context


def target(exporter: Exporter, protection: Protection) -> Target:
    return Target(address=exporter.address, run="demo", role=Role.RANK, node=HOST, index=0, scheme=protection.scheme)


def step_seen(exporter: Exporter, protection: Protection, viewer: Viewer) -> float | str | None:
    (one,) = scrape([target(exporter, protection)], timeout_s=20, viewer=viewer).processes
    return one.error if one.series is None else one.series.get(STEP)


# ---- passwords


@pytest.mark.promise("safe", "alerts")
def test_only_the_right_password_is_answered(serve: Open, tmp_path: Path) -> None:
    made = access(tmp_path, USERS)
    exporter = serve(made.given)
    wrong = [None, basic("reader", "secre"), basic("other", "secret"), basic("reader", ""), "Basic %%%", "Bearer x"]
    assert [status(exporter.address, shown) for shown in wrong] == [401] * len(wrong)
    assert refused == {"password": len(wrong)}
    assert status(exporter.address, basic("reader", "secret")) == 200
    assert step_seen(exporter, made.given, made.viewer) == 7
    assert "401" in str(step_seen(exporter, made.given, replace(made.viewer, token="x")))
    assert "401" in str(step_seen(exporter, made.given, Viewer()))


def test_a_right_password_is_compared_once(serve: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    plain = Guard.compare
    monkeypatch.setattr(Guard, "compare", lambda self, head: compared.append(1) or plain(self, head))
    exporter = serve(access(tmp_path, USERS).given)
    assert [status(exporter.address, basic("reader", "secret")) for _ in range(5)] == [200] * 5
    assert len(compared) == 1


def test_requests_behind_one_whose_password_is_compared_are_answered_in_order(serve: Open, tmp_path: Path) -> None:
    exporter = serve(access(tmp_path, USERS).given)
    head = f" HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: {basic('reader', 'secret')}\r\n\r\n".encode()
    with connect(exporter) as connection:
        connection.sendall(b"GET /metrics" + head + b"GET /nothing" + head)
        found = b""
        while found.count(b"HTTP/1.1 ") < 2:
            found += connection.recv(1 << 16)
    assert found.index(b"200 OK") < found.index(b"404 Not Found")


def test_guesses_hinder_no_reader_and_take_little_of_a_core(serve: Open, tmp_path: Path) -> None:
    made = access(tmp_path, USERS.replace("$04$", "$10$"))  # a comparison takes some 50 ms
    exporter = serve(made.given)
    with ExitStack() as stack:
        for n in range(40):
            guessing = stack.enter_context(connect(exporter))
            head = f"GET /metrics HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: {basic('reader', f'guess {n}')}\r\n\r\n"
            guessing.sendall(head.encode())
        began, used = time.monotonic(), time.process_time()
        while time.monotonic() - began < 3:
            assert step_seen(exporter, made.given, made.viewer) == 7
            time.sleep(0.1)
        assert time.process_time() - used < 1.5, "half a core, our own scrapes included"


def test_passwords_are_refused_by_name_where_bcrypt_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = access(tmp_path, USERS)
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    with pytest.raises(ConfigError, match=r"needs the package bcrypt on every host; pip install 'rayzero\[metrics\]'"):
        access(tmp_path, USERS)
    with pytest.raises(ConfigError, match="needs the package bcrypt"):
        Guard(made.given)


# ---- TLS


def test_pages_travel_over_tls_whole(serve: Open, tmp_path: Path, authority: TestAuthority) -> None:
    made = access(tmp_path, tls_text(authority))
    exporter = serve(made.given)
    assert status(exporter.address, tls=trusting(authority)) == 200
    with urlopen(f"https://{exporter.address}/large", timeout=20, context=trusting(authority)) as answer:
        assert answer.read() == bytes(4 << 20)
    assert step_seen(exporter, made.given, made.viewer) == 7
    with pytest.raises(OSError, match=CUT):
        status(exporter.address)  # plain HTTP
    assert str(step_seen(exporter, made.given, replace(made.viewer, trusted=""))).startswith("TLS: unable to get local")


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
    serve: Open, tmp_path: Path, authority: TestAuthority
) -> None:
    exporter = serve(access(tmp_path, tls_text(authority)).given)
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trusting(authority).wrap_bio(received, sent, server_hostname=HOST)
    with connect(exporter) as connection:

        def until_done(step: Callable[[], object]) -> object:
            while True:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    if sent.pending:
                        connection.sendall(sent.read())
                    received.write(connection.recv(1 << 16))

        until_done(tls.do_handshake)
        tls.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.sendall(sent.read())  # the handshake's last message and the request, in one piece
        assert b"200 OK" in until_done(lambda: tls.read(1 << 10))


def test_an_exporter_at_an_ipv6_address_is_found_and_read_over_tls() -> None:
    made = MetricsAccess("demo", None)
    found: list[Target] = []
    pages = {"/sd": Page("application/json", lambda: service_discovery(found))}
    with closing(Exporter(MemoryRecorder(), Role.RANK, host="::1", pages=pages, protection=made.own)) as exporter:
        assert exporter.address.startswith("[::1]:")
        found.append(replace(target(exporter, made.own), node="fd00::1"))
        assert discover(found[0].url("/sd"), timeout_s=20, viewer=made.viewer) == tuple(found)
        (one,) = scrape(found, timeout_s=20, viewer=made.viewer).processes
        assert one.error is None


def test_clients_without_a_certificate_of_the_authority_are_cut(
    serve: Open, tmp_path: Path, authority: TestAuthority
) -> None:
    made = access(tmp_path, asks_for_clients(authority))
    (tmp_path / "other").mkdir()
    stranger = TestAuthority(tmp_path / "other", "stranger").issue("client")
    exporter = serve(made.given)
    assert status(exporter.address, tls=trusting(authority, authority.issue("client"))) == 200
    for pair in (None, stranger):
        with pytest.raises(OSError, match=CUT):
            status(exporter.address, tls=trusting(authority, pair))
    assert step_seen(exporter, made.given, made.viewer) == 7
    assert isinstance(step_seen(exporter, made.given, replace(made.viewer, client=None)), str)


def test_a_certificate_is_asked_for_but_not_required(serve: Open, tmp_path: Path, authority: TestAuthority) -> None:
    exporter = serve(access(tmp_path, asks_for_clients(authority, "VerifyClientCertIfGiven")).given)
    (tmp_path / "other").mkdir()
    stranger = TestAuthority(tmp_path / "other", "stranger").issue("client")
    assert status(exporter.address, tls=trusting(authority)) == 200
    with pytest.raises(OSError, match=CUT):
        status(exporter.address, tls=trusting(authority, stranger))


def test_an_older_tls_than_the_least_is_cut(serve: Open, tmp_path: Path, authority: TestAuthority) -> None:
    exporter = serve(access(tmp_path, tls_text(authority, "  min_version: TLS13\n")).given)
    old = trusting(authority)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError, match=CUT):
        status(exporter.address, tls=old)
    assert status(exporter.address, tls=trusting(authority)) == 200


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes.fromhex("160301020001fc0303") + bytes(40)])
def test_clients_that_end_no_handshake_are_cut_and_hinder_nobody(
    said: bytes, serve: Open, tmp_path: Path, authority: TestAuthority
) -> None:
    exporter = serve(access(tmp_path, tls_text(authority)).given)
    with ExitStack() as stack:
        hanging = [stack.enter_context(connect(exporter)) for _ in range(200)]
        for connection in hanging:
            with suppress(OSError):  # cut already: only so many are kept
                connection.sendall(said)
        assert status(exporter.address, tls=trusting(authority)) == 200
        for connection in hanging:
            with suppress(ConnectionError):
                while connection.recv(1 << 10):
                    pass  # at most an alert
    until(lambda: refused["handshake"] + refused["limit"] >= 200)  # a client may see the end before it is counted
    assert refused["handshake"] + refused["limit"] == 200


def test_one_that_asks_over_tls_and_never_reads_is_cut(
    serve: Open, tmp_path: Path, authority: TestAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WRITE_S", 0.1)
    exporter = serve(access(tmp_path, tls_text(authority)).given)
    plain = connect(exporter)
    with trusting(authority).wrap_socket(plain, server_hostname=HOST) as still:
        still.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: refused == {"slow": 1})  # we do not read
        found = 0
        with suppress(OSError):
            while more := still.recv(1 << 20):
                found += len(more)
        assert found < 4 << 20


def test_closing_ends_handshakes_and_comparisons(
    tmp_path: Path, authority: TestAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 600.0)
    made = access(tmp_path, tls_text(authority) + USERS.replace("$04$", "$10$"))
    exporter = Exporter(MemoryRecorder(), Role.RANK, host=HOST, protection=made.given)
    with connect(exporter) as hanging:
        plain = connect(exporter)
        with trusting(authority).wrap_socket(plain, server_hostname=HOST) as guessing:
            guessing.sendall(
                f"GET /metrics HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: {basic('reader', 'guess')}\r\n\r\n".encode()
            )
            time.sleep(0.2)
            began = time.monotonic()
            exporter.close()
            assert time.monotonic() - began < 60
        with suppress(ConnectionResetError):
            assert hanging.recv(1) == b""


def test_the_runs_own_protection_lets_its_tools_in_and_nobody_else(serve: Open) -> None:
    made, other = MetricsAccess("demo", None), MetricsAccess("demo", None)
    assert made.given is None
    exporter = serve(made.own)
    assert step_seen(exporter, made.own, made.viewer) == 7
    assert "TLS" in str(step_seen(exporter, made.own, other.viewer)), "another run's"
    assert "401" in str(step_seen(exporter, made.own, replace(made.viewer, token=other.viewer.token)))
    assert made.viewer.token not in repr(made)
    assert "PRIVATE" not in repr(made)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What a run takes for the time, when it makes certificates and when it reads them."""
    clock = Clock()
    clock.now = time.time()
    for module in ("authority", "metrics_access"):
        monkeypatch.setattr(f"rayzero.security.{module}.time", clock)
    return clock


def test_new_certificates_are_shown_from_the_next_connection_on(serve: Open, clock: Clock) -> None:
    """What has a page before keeps its connection; what was shown before is no good any more."""
    clock.now -= LASTS.total_seconds()
    made = MetricsAccess("demo", None)
    exporter, old = serve(made.own), made.viewer
    assert "expired" in str(step_seen(exporter, made.own, old))
    clock.now = time.time()
    assert made.refresh()
    exporter.renew(made.own)
    assert step_seen(exporter, made.own, made.viewer) == step_seen(exporter, made.own, old) == 7


def test_files_that_are_replaced_and_the_tools_own_certificate_are_taken_over(
    serve: Open, tmp_path: Path, authority: TestAuthority, clock: Clock
) -> None:
    clock.now -= LASTS.total_seconds()
    made = MetricsAccess("demo", written(tmp_path, asks_for_clients(authority) + USERS))
    exporter = serve(made.given)
    assert isinstance(step_seen(exporter, made.given, made.viewer), str), "the tools' has ended"
    clock.now = time.time()
    assert "cert_file is valid until" in str(made.warning), "it lasts a day"
    kept = http.client.HTTPSConnection(
        exporter.address, timeout=20, context=trusting(authority, authority.issue("client"))
    )
    assert answer(kept) == 200
    newer, _ = authority.issue("server")
    assert made.refresh()
    exporter.renew(made.given)
    assert made.given.certificate == newer.read_bytes()
    assert step_seen(exporter, made.given, made.viewer) == 7
    assert answer(kept) == 200
    kept.close()
    (tmp_path / "server.key").write_bytes(b"")
    before = made.given
    with pytest.raises(ConfigError, match=r"server.key is no PEM file"):
        made.refresh()
    assert made.given is before


def answer(connection: http.client.HTTPSConnection) -> int:
    connection.request("GET", "/metrics", headers={"Authorization": basic("reader", "secret")})
    with connection.getresponse() as told:
        told.read()
        return told.status


def test_the_token_is_not_sent_in_clear_unless_passwords_are(serve: Open, tmp_path: Path) -> None:
    assert MetricsAccess("demo", None).viewer.header("http") == ""
    assert "Bearer" in access(tmp_path, USERS).viewer.header("http")


# ---- a real Prometheus


def test_prometheus_finds_and_scrapes_protected_exporters(
    tmp_path: Path, authority: TestAuthority, serve: Open
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    made = access(tmp_path, asks_for_clients(authority) + USERS)
    exporters = [serve(made.given), serve(made.given)]
    groups = service_discovery([target(exporters[0], made.given)])
    (tmp_path / "targets.json").write_bytes(groups)
    listed = Page("application/json", lambda: service_discovery([target(exporters[1], made.given)]))
    lists = Exporter(MemoryRecorder(), Role.COORDINATOR, host=HOST, pages={"/sd": listed}, protection=made.given)
    certificate, key = authority.issue("prometheus")
    shown = {
        "tls_config": {"ca_file": str(authority.file), "cert_file": str(certificate), "key_file": str(key)},
        "basic_auth": {"username": "reader", "password": "secret"},
    }
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {"job_name": "by file", "file_sd_configs": [{"files": ["targets.json"]}], **shown},
            {"job_name": "by http", "http_sd_configs": [{"url": f"https://{lists.address}/sd", **shown}], **shown},
            {"job_name": "stranger", "file_sd_configs": [{"files": ["targets.json"]}],
             "tls_config": {"ca_file": str(authority.file)}},
        ],
    }  # fmt: skip
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    try:
        with prometheus(tmp_path) as ask:
            until = time.monotonic() + 60
            while (found := ask("up")) != {"by file": "1", "by http": "1", "stranger": "0"}:
                assert time.monotonic() < until, found
                time.sleep(0.3)
            assert {job: value for job, value in ask("rayzero_step").items()} == {"by file": "7", "by http": "7"}
    finally:
        lists.close()


class prometheus:
    """Runs Prometheus in a folder; gives the values of a query by job."""

    def __init__(self, folder: Path) -> None:
        self._address = f"{HOST}:{free_port()}"
        command = ["prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=tsdb"]
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address={self._address}"],
            cwd=folder, stdout=self._log, stderr=subprocess.STDOUT, env=os.environ | {"GOMAXPROCS": "1"},
        )  # fmt: skip

    def __enter__(self) -> Callable[[str], dict[str, str]]:
        return self._ask

    def _ask(self, query: str) -> dict[str, str]:
        try:
            with urlopen(f"http://{self._address}/api/v1/query?query={query}", timeout=20) as answer:
                found = yaml.safe_load(answer.read())["data"]["result"]
        except OSError:  # it is starting
            assert self._process.poll() is None, "Prometheus has ended"
            return {}
        return {one["metric"]["job"]: one["value"][1] for one in found}

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()
