"""Which Ray a run joins: what the environment names is asked first, and nothing waits for a Ray that is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import ray
from ray._private.services import resolve_ip_for_localhost
from ray._private.utils import write_ray_address

import rayzero
from rayzero.cluster.nodes import ray_address, session
from rayzero.cluster.nodes.ray_address import find_ray, silence_at
from rayzero.cluster.nodes.session import ray_session
from rayzero.errors import ConfigError


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's temporary folder, without a note of ``ray start`` in it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.fixture
def answering() -> Iterator[str]:
    """A gRPC server, as Ray's GCS is one, at the address that Ray gives this host."""
    server = grpc.server(None)
    host = resolve_ip_for_localhost("127.0.0.1")
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    yield f"{host}:{port}"
    server.stop(None).wait()


@contextmanager
def deserted() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:  # so that nobody else gets the port meanwhile
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_ray_that_answers_is_joined_from_the_file_and_from_the_variable(
    noted: Path, answering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ray_address(answering)
    assert noted.exists()
    assert find_ray() == ray_address.RayAddress(answering)
    with deserted() as gone:
        noted.write_text(gone)
        monkeypatch.setenv("RAY_ADDRESS", answering)
        found = find_ray()
    assert found == ray_address.RayAddress(answering)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert find_ray() == ray_address.RayAddress(None)


def test_a_stale_file_is_named_once_and_a_ray_of_its_own_is_started(
    noted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[str | None] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *, address, **_: started.append(address))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(session, "LocalRay", lambda: nullcontext(SimpleNamespace(address=lambda: "127.0.0.1:1")))
    said: list[str] = []
    with deserted() as gone:
        write_ray_address(gone)
        with ray_session(said.append):
            pass
    assert started == ["127.0.0.1:1"]
    assert said == ["starting Ray on this machine"]
    (record,) = caplog.records
    message = record.getMessage()
    assert str(noted) in message
    assert gone in message
    assert "Connection refused" in message
    assert "\n" not in message


@pytest.mark.parametrize("named", ["127.0.0.1:{port}", "auto"])
def test_an_address_that_was_asked_for_and_does_not_answer_is_refused(
    noted: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was asked"))
    with deserted() as gone:
        write_ray_address(gone)
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
        monkeypatch.setenv("RAY_ADDRESS", named.format(port=gone.rpartition(":")[2]))
        refusal = r"RAY_ADDRESS is '.*Connection refused.*unset it"
        with pytest.raises(ConfigError, match=refusal) as refused, ray_session():
            pytest.fail("the session began")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("named", ["nonsense", "127.0.0.1:none", "127.0.0.1:99999", "no.such.host.invalid:1"])
def test_an_address_that_is_none_is_refused(noted: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS is '{named}'"):
        find_ray()


def test_a_port_out_of_range_is_not_the_one_that_the_c_library_makes_of_it(answering: str) -> None:
    host, _, port = answering.rpartition(":")
    assert silence_at(f"{host}:{int(port) + 65_536}") == "ports end at 65535"
    assert silence_at(answering) is None


def test_a_process_that_is_stopped_takes_connections_and_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_address, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert silence_at(f"127.0.0.1:{mute.getsockname()[1]}") == "no answer within 0.2 s"


def test_a_server_of_something_else_is_no_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert silence_at(f"127.0.0.1:{server.getsockname()[1]}") == "the program that listens there is not Ray"
        thread.join()


def test_a_folder_whose_rayzero_would_shadow_the_installed_one_is_refused(
    noted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rayzero").mkdir()
    assert find_ray() == ray_address.RayAddress(None), "of runs, perhaps: no package"
    (tmp_path / "rayzero" / "__init__.py").touch()
    with pytest.raises(ConfigError, match=f"rayzero from the current folder, {tmp_path}, and not the"):
        find_ray()


def test_the_folder_that_rayzero_was_installed_from_is_not_refused(
    noted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rayzero").symlink_to(Path(rayzero.__file__).parent)
    monkeypatch.chdir(tmp_path)
    assert find_ray() == ray_address.RayAddress(None)
