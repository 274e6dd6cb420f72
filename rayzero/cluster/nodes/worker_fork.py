"""What Ray starts in place of an interpreter for a run's actors: it has the host's fork server fork the worker. And
what the raylet of a driver's own Ray runs to start any worker, in place of Ray's own ``setup_worker.py``.

A Ray worker imports torch and RayZero for 3 CPU seconds. On a host with 8 ranks and 4 optimizer actors that happens
once, in the fork server, and what was loaded is memory that all of them share. This process is the one that the raylet
started, so it stays until the worker has ended. It imports almost nothing, because each worker waits for it.

[Note: one fork server a driver and raylet] Its address is an abstract socket: it needs no file, and is gone with its
process. A worker may be forked only where it would be what a new interpreter is, so the address has the driver, whose
actors all have one environment, the raylet, which Ray's library reads from it once, and what tells containers of one
host apart. The process of a driver's own Ray (nodes/local_ray.py) starts the server before Ray, names it by the
driver alone, and has it import Ray for the job that the driver will most likely be. A worker of another job is not
forked.

[Note: what a raylet runs] Ray's program imports Ray, for half a CPU second a worker, to run a command that a runtime
environment names, which is a shell that becomes another interpreter (cluster/actor_calls.py). This file as a program
knows a worker of a run by its environment, and has it forked. Every other one is left to Ray's.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import sys
import time
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

TOKEN = "RAYZERO_FORK_SERVER"  # the environment variable that names the driver
LENGTH = struct.Struct("!I")  # of a request's text, before it; the worker's standard streams go with it
READ_ONCE = ("RAY_RAYLET_PID", "RAY_JOB_ID")  # what Ray's library reads of its environment as it is imported
_IDLE_S = 5.0  # how long a server waits for a worker while it has none
_START_S = 40.0  # until a server answers; it imports first. Ray waits 60 s for a worker
_LOOK_S = 0.01  # between two looks whether it does
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="  # of a raylet's command lines


def main() -> None:
    """Have the worker of this command line forked and wait for its end; become it where that cannot be done."""
    arguments = sys.argv[1:]
    try:
        driver, raylet = os.environ[TOKEN], os.environ["RAY_RAYLET_PID"]
        server = _connect(driver) or _connect_or_start(f"{driver}-{raylet}")
        _ask(server, arguments, dict(os.environ))
    except OSError as error:
        print(f"rayzero: no fork server ({error}): the worker imports all by itself", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *arguments])
    server.recv(1)  # the end of the worker, which holds the other end


def make_ready(name: str, raylet: int, job: str) -> None:
    """Have the fork server of this name import Ray now, for the workers of a raylet (its pid) and a job (its id).
    Raises OSError."""
    server = _connect(name)
    if server is not None:
        with server:
            worker = os.environ | dict(zip(READ_ONCE, (str(raylet), job), strict=True))
            _ask(server, [os.devnull], worker)  # it does nothing


def _ask(server: socket.socket, arguments: list[str], environment: dict[str, str]) -> None:
    """Send what makes a process: arguments, environment, folder, limits and standard streams. Raises OSError if the
    server has not forked: it ended, or stands still."""
    request = {
        "arguments": arguments,
        "environment": environment,
        "folder": os.getcwd(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "cpus": sorted(os.sched_getaffinity(0)),
        "oom": _text("/proc/self/oom_score_adj"),
    }
    text = json.dumps(request).encode()
    server.settimeout(_START_S)
    socket.send_fds(server, [LENGTH.pack(len(text))], [0, 1, 2])
    server.sendall(text)
    if not server.recv(1):
        raise ConnectionResetError("it ended")
    server.settimeout(None)


def _connect(name: str) -> socket.socket | None:
    """A connection to the fork server of this name; None if there is none. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_address(name))
    except ConnectionRefusedError:
        connection.close()
        return None
    if not peer_is_us(connection):
        raise PermissionError("its socket is another user's")
    return connection


def _connect_or_start(name: str) -> socket.socket:
    """A connection to the fork server of this name, which is started if there is none. Raises OSError."""
    until = time.monotonic() + _START_S
    while (connection := _connect(name)) is None:
        if start_server(name, int(os.environ["RAY_RAYLET_PID"]), _IDLE_S) is None:  # another worker has just done so
            if time.monotonic() >= until:
                raise TimeoutError("it does not start")
            time.sleep(_LOOK_S)
    return connection


@cache
def fork_token() -> str:
    return os.urandom(16).hex()


def start_server(name: str, lives_with: int, idle_s: float | None = None) -> subprocess.Popen[bytes] | None:
    """Start a server on this host; None if there is one of this name. ``lives_with``: the process at whose end it ends.
    ``idle_s``: how long it has no worker before it ends; None: that does not end it."""
    import subprocess  # one worker of all needs it

    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_address(name))
    except OSError:
        listener.close()
        return None
    with listener:
        listener.listen(socket.SOMAXCONN)
        idle = () if idle_s is None else (str(idle_s),)
        module = ("-m", "rayzero.cluster.nodes.fork_server", str(listener.fileno()), str(lives_with), *idle)
        command = [sys.executable, *module]
        # a reader of this process's output must not wait for the server's end
        none, file = subprocess.DEVNULL, listener.fileno()
        return subprocess.Popen(command, stdin=none, stdout=none, stderr=none, pass_fds=[file], start_new_session=True)


def _address(name: str) -> str:
    containers = "-".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid"))
    return f"\0rayzero-fork-{os.getuid()}-{containers}-{name}"


def peer_is_us(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


# ---- what a raylet runs ---------------------------------------------------------------------------------------------


def set_up_worker() -> None:
    """Be the worker of this command line, as a raylet's runtime environment says; see [Note: what a raylet runs]."""
    arguments = sys.argv[1:]
    given = next((one.removeprefix(_CONTEXT) for one in arguments if one.startswith(_CONTEXT)), "{}")
    variables = _of_a_forked_worker(json.loads(given))
    if variables is None:
        os.execv(sys.executable, [sys.executable, _rays_own(), *arguments])
    os.environ |= variables
    sys.argv[1:] = [one for one in arguments if not one.startswith((_CONTEXT, _LANGUAGE))]
    main()


def _rays_own() -> str:
    """The path of Ray's program, found without importing Ray."""
    from importlib.util import find_spec  # few workers need it

    ray = find_spec("ray")
    assert ray is not None
    assert ray.submodule_search_locations is not None
    return os.path.join(ray.submodule_search_locations[0], "_private", "workers", "setup_worker.py")


def _of_a_forked_worker(context: dict[str, object]) -> dict[str, str] | None:
    """The environment variables of a runtime environment that makes a run's worker and does nothing else."""
    variables = context.get("env_vars")
    others = {name for name, value in context.items() if value} - {"env_vars", "py_executable"}
    return variables if isinstance(variables, dict) and set(variables) == {TOKEN} and not others else None


if __name__ == "__main__":
    set_up_worker()
