"""A host's fork server: its workers are what new interpreters would be, and it is there while it is needed."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayzero.cluster.nodes import worker_fork
from rayzero.cluster.nodes.worker_fork import LENGTH, TOKEN, make_ready, start_server
from rayzero.concurrency.survivor import ends

pytestmark = [pytest.mark.timeout(120), pytest.mark.promise("exact", "hosts")]

ASK = "from rayzero.cluster.nodes.worker_fork import main; main()"
ASK_IMPATIENTLY = "from rayzero.cluster.nodes import worker_fork; worker_fork._START_S = 0.5; worker_fork.main()"
WORKER = """
import json, os, random, resource, sys, threading
import numpy
print(json.dumps({
    "name": __name__,
    "arguments": sys.argv,
    "path": sys.path[0],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "cpus": sorted(os.sched_getaffinity(0)),
    "oom": open("/proc/self/oom_score_adj").read(),
    "leads": os.getpgid(0) == os.getpid(),
    "open": sorted(os.listdir("/proc/self/fd"), key=int),
    "threads": threading.active_count(),
    "pid": os.getpid(),
    "parent": os.getppid(),
    "random": [random.random(), numpy.random.rand()],
    "torch": "torch" in sys.modules,
    "ray": "ray" in sys.modules,
    "wakes": __import__("signal").set_wakeup_fd(-1),
}), flush=True)
print("said", file=sys.stderr, flush=True)
if sys.stdin.readline().strip() == "raise":
    raise SystemExit(3)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    script = tmp_path / "scripts" / "worker.py"
    script.parent.mkdir()
    script.write_text(WORKER)
    return script


@contextmanager
def in_place_of_a_raylet() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def shared_raylet() -> Iterator[subprocess.Popen[bytes]]:
    """Of tests that may share a fork server."""
    with in_place_of_a_raylet() as process:
        yield process


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """Of one test, which has a fork server of its own."""
    with in_place_of_a_raylet() as process:
        yield process


Ask = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def ask(
    program: Path, request: pytest.FixtureRequest, shared_raylet: subprocess.Popen[bytes], tmp_path: Path
) -> Iterator[Ask]:
    """Start what Ray starts, whose worker then says what it is."""
    asking: list[subprocess.Popen[str]] = []
    lives_with = request.getfixturevalue("raylet") if "raylet" in request.fixturenames else shared_raylet
    token = f"test-{os.getpid()}-{lives_with.pid}"

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        own = os.environ | {TOKEN: token, "RAY_RAYLET_PID": str(lives_with.pid)} | environment
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", ASK, str(program), *arguments]
        asking.append(subprocess.Popen(command, env=own, text=True, cwd=tmp_path, **pipes))
        return asking[-1]

    yield start
    for process in asking:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def has_ended(pid: int) -> bool:
    """Whether a worker or a server ends."""
    with suppress(psutil.NoSuchProcess):
        return ends(psutil.Process(pid), 100)
    return True


def test_a_worker_is_what_a_new_interpreter_would_be(ask: Ask, program: Path, tmp_path: Path) -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    first, second = ask("--one", "two words", ONE="1"), ask("--other")
    workers = [said(first), said(second)]
    for worker, arguments in zip(workers, (["--one", "two words"], ["--other"]), strict=True):
        assert worker["name"] == "__main__"
        assert worker["torch"]
        assert worker["leads"]
        assert worker["arguments"] == [str(program), *arguments]
        assert worker["path"] == str(program.parent)
        assert worker["folder"] == str(tmp_path)
        assert tuple(worker["files"]) == files
        assert worker["cpus"] == sorted(os.sched_getaffinity(0))
        assert worker["threads"] == 1
        assert worker["wakes"] == -1
        assert worker["oom"] == Path("/proc/self/oom_score_adj").read_text()
        assert worker["open"][:3] == ["0", "1", "2"]
        assert len(worker["open"]) <= 5
    assert workers[0]["environment"]["ONE"] == "1"
    assert "ONE" not in workers[1]["environment"]
    assert workers[0]["parent"] == workers[1]["parent"], "one server forked both"
    for one, other in zip(workers[0]["random"], workers[1]["random"], strict=True):
        assert one != other
    assert first.poll() is None, "what Ray started stays as long as its worker"
    assert second.poll() is None
    _, errors = first.communicate("end\n")
    assert errors == "said\n"
    assert has_ended(workers[0]["pid"])
    assert second.poll() is None
    second.communicate("raise\n")
    assert has_ended(workers[1]["pid"])


def test_limits_are_those_of_the_process_that_asks(ask: Ask) -> None:
    worker = said(ask())  # the server has the limits of this one
    only = min(os.sched_getaffinity(0))
    limited = ["prlimit", "--nofile=512:1024", "taskset", "-c", str(only)]
    first = psutil.Process(worker["parent"])
    environment = os.environ | {TOKEN: first.environ()[TOKEN], "RAY_RAYLET_PID": first.environ()["RAY_RAYLET_PID"]}
    command = [*limited, sys.executable, "-c", ASK, worker["arguments"][0]]
    run = subprocess.run(command, env=environment, input="end\n", capture_output=True, text=True, check=True)
    other = json.loads(run.stdout)
    assert other["files"] == [512, 1024]
    assert other["cpus"] == [only]
    assert other["parent"] == worker["parent"]


@pytest.mark.thorough
def test_the_server_ends_with_the_raylet_and_its_workers_go_on(ask: Ask, raylet: subprocess.Popen[bytes]) -> None:
    process = ask()
    worker = said(process)
    raylet.kill()
    raylet.wait()
    assert has_ended(worker["parent"])
    assert psutil.pid_exists(worker["pid"])
    assert process.poll() is None
    process.communicate("end\n")
    assert has_ended(worker["pid"])


@pytest.mark.thorough
def test_a_drivers_server_waits_for_its_first_worker_and_ends_with_the_driver(
    ask: Ask, raylet: subprocess.Popen[bytes]
) -> None:
    server = start_server("of-a-driver", raylet.pid)
    assert server is not None
    assert start_server("of-a-driver", raylet.pid) is None, "there is one"
    process = ask(**{TOKEN: "of-a-driver", "RAY_RAYLET_PID": "1"})
    worker = said(process)
    assert psutil.Process(worker["parent"]).cmdline()[-1] == str(raylet.pid), "it did not start another one"
    process.communicate("end\n")
    raylet.kill()
    raylet.wait()
    assert server.wait() == 0


def test_without_a_server_the_worker_imports_by_itself(program: Path) -> None:
    """A socket that is there and whose server ends before it forks."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(worker_fork._address(f"gone-{os.getpid()}"))
    listener.listen()
    environment = os.environ | {TOKEN: "gone", "RAY_RAYLET_PID": str(os.getpid())}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", ASK, str(program)], env=environment, text=True, **pipes) as process:
        listener.accept()[0].close()
        listener.close()
        output, errors = process.communicate("raise\n")
        worker = json.loads(output)
        assert worker["pid"] == process.pid
        assert not worker["torch"]
        assert process.returncode == 3
        assert "no fork server" in errors
        assert "imports all by itself" in errors


def test_what_asks_for_no_worker_holds_up_no_other(ask: Ask, shared_raylet: subprocess.Popen[bytes]) -> None:
    first = said(ask())
    token = psutil.Process(first["parent"]).environ()[TOKEN]
    for head in (b"", b"12", LENGTH.pack(1 << 20), LENGTH.pack(4) + b"nope"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(worker_fork._address(f"{token}-{shared_raylet.pid}"))
            stranger.sendall(head)
    assert said(ask())["parent"] == first["parent"]


@pytest.mark.thorough
def test_a_server_that_was_killed_has_a_successor(ask: Ask, raylet: subprocess.Popen[bytes]) -> None:
    first = said(ask())
    os.kill(first["parent"], signal.SIGKILL)
    assert has_ended(first["parent"])
    second = said(ask())
    assert second["parent"] not in (first["parent"], first["pid"])
    assert second["torch"]


@pytest.mark.thorough
def test_a_server_that_stands_still_is_left_and_forks_nobody_later(ask: Ask, program: Path) -> None:
    server = psutil.Process(said(ask())["parent"])
    environment = os.environ | {name: server.environ()[name] for name in (TOKEN, "RAY_RAYLET_PID")}
    server.suspend()
    command = [sys.executable, "-c", ASK_IMPATIENTLY, str(program)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert not said(process)["torch"]
        server.resume()  # it has the process's streams until it finds that nobody asks any more
        process.communicate("raise\n")
        assert process.returncode == 3
    workers = {child.pid for child in server.children()}
    assert said(ask())["parent"] == server.pid
    assert len({child.pid for child in server.children()} - workers) == 1, "the last one alone"


@pytest.mark.thorough
def test_workers_of_another_raylet_have_another_server(ask: Ask) -> None:
    """Two nodes on one host, each with a raylet: Ray's library reads whose worker it is as it is imported."""
    with in_place_of_a_raylet() as other:
        assert said(ask())["parent"] != said(ask(RAY_RAYLET_PID=str(other.pid)))["parent"]


@pytest.mark.thorough
def test_a_server_that_has_imported_ray_forks_no_worker_of_another_job(
    ask: Ask, raylet: subprocess.Popen[bytes]
) -> None:
    """Ray's library has read its environment."""
    server = start_server("made-ready", raylet.pid)
    assert server is not None
    make_ready("made-ready", 4711, "02000000")
    own = {TOKEN: "made-ready", "RAY_RAYLET_PID": "4711"}
    worker, other = said(ask(**own, RAY_JOB_ID="02000000")), said(ask(**own, RAY_JOB_ID="03000000"))
    assert worker["parent"] == server.pid
    assert worker["ray"]
    assert worker["environment"]["RAY_JOB_ID"] == "02000000"
    assert other["parent"] != server.pid
    assert not other["torch"]
    server.terminate()
    server.wait()


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("others", "forked"), [({}, True), ({"env_vars": {"A": "1"}}, False), ({"command_prefix": ["A=1"]}, False)]
)
def test_ray_starts_what_is_no_worker_of_a_run_as_it_does_without_us(
    ask: Ask, program: Path, others: dict[str, Any], forked: bool, tmp_path: Path
) -> None:
    """A raylet runs one program for all workers that have a runtime environment."""
    token = psutil.Process(said(ask())["parent"]).environ()
    variables = {"env_vars": {TOKEN: token[TOKEN]}, "py_executable": "false", "command_prefix": [], "java_jars": []}
    context = variables | others | ({} if forked else {"py_executable": sys.executable})
    command = [
        sys.executable, worker_fork.__file__, str(program), "--one",
        f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON", "--two",
    ]  # fmt: skip
    environment = os.environ | {"RAY_RAYLET_PID": token["RAY_RAYLET_PID"]}
    run = subprocess.run(
        command, env=environment, cwd=tmp_path, input="end\n", capture_output=True, text=True, check=True
    )
    worker = json.loads(run.stdout)
    assert worker["torch"] == forked
    assert worker["arguments"] == [str(program), "--one", "--two"]
    assert worker["environment"].get("A") == ("1" if others else None)
    assert (TOKEN in worker["environment"]) == (forked or "env_vars" not in others)


def test_the_server_ends_some_time_after_its_last_worker(ask: Ask) -> None:
    """Below the tests that share the server: it starts in seconds."""
    process = ask()
    worker = said(process)
    process.communicate("end\n")
    assert has_ended(worker["pid"])
    assert has_ended(worker["parent"])


NO_CUDA = """
import sys, torch

def refuse(*_):
    sys.exit("asked")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda.current_device = torch.cuda._lazy_init = refuse
import rayzero.cluster.nodes.fork_server as server
server._import_ray({})
print("imported")
"""


@pytest.mark.thorough
def test_what_a_server_imports_asks_for_no_cuda_device() -> None:
    """A process that is forked after CUDA has begun cannot use it."""
    run = subprocess.run([sys.executable, "-c", NO_CUDA], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "imported\n"), run.stderr
