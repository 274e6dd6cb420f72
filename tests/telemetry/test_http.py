"""The page server: whoever asks, however often, and whether or not they read."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from rayzero.telemetry import http
from rayzero.telemetry.http import PageServer, listen
from rayzero.telemetry.pages import Page
from tests.support.waiting import until

Serve = Callable[..., str]  # page by path -> host:port
PLAIN = "text/plain"
HELLO = Page(PLAIN, lambda: b"hello\n")
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve pages on a free port until the test ends."""
    with ExitStack() as stack:

        def begin(found: Mapping[str, Page] | None = None) -> str:
            listening, address = listen("127.0.0.1", 0)
            stack.callback(PageServer(listening, found or {"/": HELLO}).close)
            return address

        yield begin


class Held:
    """A page whose making waits for ``go_on``; it says how often it was made."""

    def __init__(self) -> None:
        self.made = 0
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.page = Page(PLAIN, self._make)

    def _make(self) -> bytes:
        self.made += 1
        self.begun.set()
        assert self.go_on.wait(20)
        return b"%d" % self.made


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def is_served(connection: socket.socket) -> bool:
    """Whether the server, in this process, has the other end of a connection open."""
    open_ones = psutil.Process().net_connections("tcp")
    return any(each.raddr == connection.getsockname() for each in open_ones if each.raddr)


def fetched(address: str, path: str = "/") -> bytes:
    with urlopen(f"http://{address}{path}", timeout=20) as answer:
        return answer.read()


def answered(connection: socket.socket, body: bytes = b"hello\n") -> bool:
    """Whether the next answer is this page, whole."""
    found = b""
    while not found.endswith(b"\r\n\r\n" + body) and (more := connection.recv(1 << 10)):
        found += more
    return found.startswith(b"HTTP/1.1 200 OK\r\n") and found.endswith(b"\r\n\r\n" + body)


def exchange(address: str, sent: bytes) -> bytes:
    """All that is answered until the server ends the connection."""
    with connect(address) as connection:
        found = b""
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(sent)
            while more := connection.recv(1 << 16):
                found += more
        return found


def test_sockets_that_never_read_or_ask_hinder_nobody(serve) -> None:
    large = bytes(1 << 22)
    address = serve({"/": Page(PLAIN, lambda: large)})
    with ExitStack() as hanging:
        connections = [hanging.enter_context(connect(address)) for _ in range(http.MOST + 20)]
        for connection in connections[::2]:
            with suppress(OSError):  # cut: the oldest go
                connection.sendall(GET * 20)  # answers that nobody reads
        assert fetched(address) == large
        assert sum(t.name == f"rayzero-exporter-{address.rpartition(':')[2]}" for t in threading.enumerate()) == 1


def test_the_oldest_connection_goes_for_a_new_one(serve) -> None:
    address = serve()
    with ExitStack() as held:
        oldest, *others = [held.enter_context(connect(address)) for _ in range(http.MOST)]
        for connection in (oldest, *others):
            connection.sendall(GET)
            assert answered(connection)
        assert fetched(address) == b"hello\n"
        with suppress(ConnectionResetError):
            assert oldest.recv(1) == b""
        others[-1].sendall(GET)
        assert answered(others[-1])


@pytest.mark.parametrize(("limit", "asked"), [("IDLE_S", b""), ("IDLE_S", b"GET / HT"), ("WRITE_S", GET * 20)])
def test_a_connection_that_does_not_move_is_cut(serve, monkeypatch, limit, asked) -> None:
    monkeypatch.setattr(http, limit, 0.1)
    large = bytes(1 << 22)
    address = serve({"/": Page(PLAIN, lambda: large)})
    with connect(address) as still:
        still.sendall(asked)
        if limit == "WRITE_S":
            until(lambda: is_served(still))
            until(lambda: not is_served(still))  # we do not read
        left = 20 * len(large) if limit == "WRITE_S" else 1
        with suppress(ConnectionResetError):
            while left > 0 and (more := still.recv(1 << 20)):
                left -= len(more)
        assert left > 0
    assert fetched(address) == large


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:9", "localhost:40873", "LOCALHOST", "run.localhost", "[::1]", "[::1]:9"]
)
def test_on_loopback_names_of_loopback_are_answered(serve, host) -> None:
    assert b" 200 OK" in exchange(serve(), LAST.replace(b"localhost", host.encode()))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.7",
        "[::2]",
        "",
        "::1",
    ],
)
def test_on_loopback_a_request_for_another_name_is_refused_and_its_connection_ends(host) -> None:
    refused: list[tuple[str, str, str]] = []
    listening, address = listen("127.0.0.1", 0)
    with closing(PageServer(listening, {"/": HELLO}, refused=lambda *told: refused.append(told))):
        answer = exchange(address, GET.replace(b" localhost", b"\t" + host.encode()).replace(b"Host", b"hOST") + GET)
    assert answer.startswith(b"HTTP/1.1 421 ")
    assert answer.endswith(b"\r\n\r\nserved on loopback: ask 127.0.0.1 or localhost\n")
    assert refused == [("host", "127.0.0.1", "it asks for the name of another host")]


def test_at_an_address_of_the_node_every_name_is_answered() -> None:
    """A node has many names, which nobody can list."""
    listening, address = listen("0.0.0.0", 0)
    with closing(PageServer(listening, {"/": HELLO})):
        found = exchange(address.replace("0.0.0.0", "127.0.0.1"), LAST.replace(b"localhost", b"node-7"))
        assert b" 200 OK" in found


def test_many_scrapes_at_once_make_a_page_once(serve, monkeypatch) -> None:
    monkeypatch.setattr(http, "REFRESH_S", 3600.0)
    made: list[int] = []
    address = serve({"/n": Page(PLAIN, lambda: bytes(made.append(1) or 3))})
    assert [fetched(address, "/n") for _ in range(5)] == [bytes(3)] * 5
    assert len(made) == 1


def test_a_page_that_is_too_old_is_made_anew_for_all_who_wait(serve, monkeypatch) -> None:
    monkeypatch.setattr(http, "REFRESH_S", 0.0)
    held = Held()
    address = serve({"/": held.page})
    with ExitStack() as stack:
        first, second = (stack.enter_context(connect(address)) for _ in range(2))
        first.sendall(GET)
        assert held.begun.wait(20)
        second.sendall(GET)
        held.go_on.set()
        assert answered(first, b"1")
        assert answered(second, b"2")  # it asked after the first page was begun


@pytest.mark.parametrize("path", ["/metric", "/metricss", "/m", "/"])
def test_other_paths_are_not_there(serve, path) -> None:
    address = serve({"/metrics": HELLO})
    with pytest.raises(HTTPError, match="404") as told:
        fetched(address, path)
    assert told.value.read() == b"there is /metrics\n"


def test_the_head_of_a_page_says_how_long_it_is_and_nothing_can_be_written(serve) -> None:
    address = serve()
    with urlopen(Request(f"http://{address}/?debug=1", method="HEAD"), timeout=20) as answer:
        assert (answer.headers["Content-Length"], answer.read()) == ("6", b"")
    with pytest.raises(HTTPError, match="405"):
        urlopen(Request(f"http://{address}/", data=b"abc", method="POST"), timeout=20)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\r\n\r\n\0",
        b"GET / HTTP/1.1\r\nHost: " + b"x" * (1 << 16),
        b"\0" * 100 + b"\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\n\r\n",
        b"GET \r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    ],
)
def test_what_is_no_request_ends_its_connection_alone_and_is_counted(nonsense, caplog) -> None:
    refused: list[tuple[str, str, str]] = []
    listening, address = listen("127.0.0.1", 0)
    with closing(PageServer(listening, {"/": HELLO}, refused=lambda *told: refused.append(told))):
        found = exchange(address, nonsense + GET)
        assert found == b"" or found.startswith(b"HTTP/1.0 400 ")
        assert found.count(b"HTTP/1.") <= 1
        assert fetched(address) == b"hello\n"
    assert refused == [("nonsense", "127.0.0.1", "it sends what is no request")]
    assert caplog.text == ""


def test_a_process_without_descriptors_answers_once_it_has_some_and_does_not_spin(serve) -> None:
    address = serve()
    host, _, port = address.rpartition(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as connection:
        connection.settimeout(20)
        resource.setrlimit(resource.RLIMIT_NOFILE, (connection.fileno(), hard))  # all below it may be taken
        try:
            with ExitStack() as taken:
                with suppress(OSError):
                    while True:
                        taken.enter_context(socket.socket())
                connection.connect((host, int(port)))
                connection.sendall(GET)
                used = time.process_time()
                time.sleep(0.8)
                assert time.process_time() - used < 0.4
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert answered(connection)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it cannot be said")


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("\udcff"), Unspeakable()])
def test_no_error_of_a_page_ends_the_server(serve, error, caplog) -> None:
    def make() -> bytes:
        raise error

    address = serve({"/": HELLO, "/bad": Page(PLAIN, make)})
    with pytest.raises(HTTPError, match="500") as told:
        fetched(address, "/bad")
    assert type(error).__name__.encode() in told.value.read()
    assert "cannot make /bad" in caplog.text
    assert fetched(address) == b"hello\n"


def test_closing_waits_for_one_page_at_most(monkeypatch) -> None:
    monkeypatch.setattr(http, "REFRESH_S", 0.0)
    held = Held()
    listening, address = listen("127.0.0.1", 0)
    serving = PageServer(listening, {"/": held.page})
    with connect(address) as connection:
        connection.sendall(GET * 100)
        assert held.begun.wait(20)
        closing = threading.Thread(target=serving.close)
        closing.start()
        closing.join(0.3)
        held.go_on.set()
        closing.join(20)
    assert held.made <= 2


def test_closing_from_many_threads_at_once() -> None:
    failed: list[BaseException] = []

    def close() -> None:
        try:
            serving.close()
        except BaseException as error:
            failed.append(error)

    for _ in range(30):
        listening, address = listen("127.0.0.1", 0)
        serving = PageServer(listening, {"/": HELLO})
        threads = [threading.Thread(target=close) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        listen("127.0.0.1", int(address.rpartition(":")[2]))[0].close()
    assert failed == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_port_of_a_killed_process_is_free_though_a_process_that_it_forked_lives() -> None:
    listening, address = listen("127.0.0.1", 0)
    (ended, go_on), (begun, begin) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(go_on)
            os.write(begin, b"!")
            os.read(ended, 1)
        finally:
            os._exit(0)
    try:
        os.read(begun, 1)
        listening.close()  # as the kernel does: without a word to whoever also holds it
        listen("127.0.0.1", int(address.rpartition(":")[2]))[0].close()
    finally:
        for end in (ended, go_on, begun, begin):
            os.close(end)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_closing_ends_all_though_a_process_was_forked_off() -> None:
    listening, address = listen("127.0.0.1", 0)
    serving = PageServer(listening, {"/": HELLO})
    with connect(address) as connection:
        connection.sendall(GET)
        assert answered(connection)
        ended, go_on = os.pipe()
        child = os.fork()
        if child == 0:  # a loader of data, which holds all that was open and ends when we do
            try:
                os.close(go_on)
                serving.close()  # not its own
                os.read(ended, 1)
            finally:
                os._exit(0)
        try:
            assert fetched(address) == b"hello\n"
            closing = threading.Thread(target=serving.close, daemon=True)
            closing.start()
            closing.join(20)
            assert not closing.is_alive()
            assert connection.recv(1) == b""
            listen("127.0.0.1", int(address.rpartition(":")[2]))[0].close()
        finally:
            os.close(ended)
            os.close(go_on)
            os.waitpid(child, 0)


def test_a_connection_that_comes_while_it_closes_is_cut_too() -> None:
    for _ in range(100):
        listening, address = listen("127.0.0.1", 0)
        made = PageServer(listening, {"/": HELLO})
        with connect(address) as idle:
            made.close()
            with suppress(ConnectionResetError):
                assert idle.recv(1) == b""
