"""A Ray on this machine that belongs to this process, which goes on while it starts.

Imports no Ray, so that it can begin first of all. Ray itself is in a process of its own (``main``): it imports and
starts on another core, it can be ended at any moment of its start, and no thread of this process has to outlive its
processes, which the kernel kills with the thread that started them.

That process is Ray's first driver, which starts and ends Ray, and runs nothing. It adopts what its processes leave
behind (it is their subreaper), so that it can end all of them, whenever that is asked for. A run's workers are forked
by a server that it starts, too (fork_server.py).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NoReturn

import psutil

from rayzero.cluster.nodes import worker_fork
from rayzero.cluster.nodes.worker_fork import fork_token, make_ready, start_server
from rayzero.cluster.supervision import delayed, shielded
from rayzero.concurrency.survivor import with_own_path
from rayzero.errors import RunFailedError

END = signal.SIGUSR1  # what ends Ray and its process
# which a terminal, a shell or a service manager sends to everyone: Ray ends when the driver says so, or has ended
NOT_FOR_RAY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_END_S = 60.0  # how long that may take
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_DIES_S = 1.0  # between two looks for processes that are left


class LocalRay:
    """Begins to start a Ray when it is made; leaving the ``with`` block ends it, also while it starts."""

    def __init__(self) -> None:
        """Raises OSError."""
        # -P: a folder called rayzero in the current one is not imported; the driver refuses it by name
        command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), fork_token()]
        try:
            with delayed():  # a signal, which any thread may be given, ends what has begun
                before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_RAY)  # until it can ignore them
                try:
                    self._process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=with_own_path()
                    )
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:
            if hasattr(self, "_process"):
                self.close()
            raise

    def address(self) -> str | None:
        """Wait for Ray; its address. None: another Ray was there to be joined, and none is started. Call it once.

        Sets what a process needs to join it. Raises RunFailedError if it does not start."""
        assert self._process.stdout is not None
        mark = fork_token().encode()  # Python's own start may print lines, too (sitecustomize)
        answer = next((line.removeprefix(mark) for line in self._process.stdout if line.startswith(mark)), None)
        if answer is None:
            raise RunFailedError(f"cannot start Ray on this machine: its process ended ({self._process.wait()})")
        said = json.loads(answer)
        if said["error"] is not None:
            raise RunFailedError(f"cannot start Ray on this machine: {said['error']}")
        if said["auth_mode"] is not None:
            os.environ["RAY_AUTH_MODE"] = said["auth_mode"]
        address: str | None = said["address"]
        return address

    def close(self) -> None:
        """End Ray; returns once nothing of it is left. Idempotent."""
        with shielded():
            with suppress(ProcessLookupError):
                self._process.send_signal(END)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:  # the kernel kills Ray's processes with it
                self._process.kill()
                self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def __enter__(self) -> LocalRay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def begin_ray() -> LocalRay | None:
    """Begin to start the Ray that a run will need; None if its environment names one to join."""
    return LocalRay() if os.environ.get("RAY_ADDRESS", "") in ("", "local") else None


# ---- the process of Ray -------------------------------------------------------------------------------------------


class _EndedError(BaseException):
    """The driver needs Ray no more."""


def main() -> None:
    """Start Ray, say where it is, and end it when the driver says so or has ended."""
    driver, token = int(sys.argv[1]), sys.argv[2]
    said = _answer_file()
    signal.signal(END, _end)
    for number in NOT_FOR_RAY:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup's stay ignored
            signal.signal(number, lambda *_: None)  # not ignored: what it starts would ignore them, too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_RAY)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, END)
    if os.getppid() != driver:
        return
    try:
        with suppress(_EndedError, BrokenPipeError):
            _serve(said, driver, token)
    finally:
        signal.signal(END, signal.SIG_IGN)
        with suppress(Exception):  # Ray's own end may fail; what is left is killed
            if os.getppid() == driver and "ray" in sys.modules and _ray().is_initialized():
                _ray().shutdown()
        _kill_all()
    os._exit(0)  # Ray would take its leave of processes that have just been killed


def _answer_file() -> int:
    """The file in which the driver reads; from now on what Ray prints goes where its errors go."""
    said = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    if sys.stderr is None:  # the driver's is closed: nothing that is opened next is to be it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.set_inheritable(2, True)
    os.dup2(2, 1)
    return said


def _serve(said: int, driver: int, token: str) -> None:
    """Start Ray, say where it is in the file ``said``, and wait until it is to end."""
    with os.fdopen(said, "w") as answer:
        started = _start(token)
        answer.write(f"{token}{json.dumps(started)}\n")
    if started["address"] is None:
        return
    with suppress(OSError, StopIteration, psutil.Error):  # else the first worker does it
        raylet = next(child.pid for child in psutil.Process().children() if child.name() == "raylet")
        make_ready(token, raylet, _next_job())
    signal.pthread_sigmask(signal.SIG_BLOCK, {END})
    # its handler stays if Ray has not swallowed what it raised; another thread may have been given the signal
    while signal.getsignal(END) is _end and os.getppid() == driver and not signal.sigtimedwait({END}, _DIES_S):
        _reap()


def _start(token: str) -> dict[str, str | None]:
    """Start Ray and the server of its workers, unless there is a Ray to join. Returns what the driver reads."""
    from rayzero.cluster.nodes.ray_address import find_ray
    from rayzero.errors import ConfigError

    none: dict[str, str | None] = {"address": None, "auth_mode": None, "error": None}
    try:
        if find_ray().joined is not None:
            return none
    except ConfigError:  # as the driver will find
        return none
    start_server(token, os.getpid())
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # a run's workers are forked
    ray = _ray()
    from ray._private import parameter, utils

    # this Ray never grows, so it needs no autoscaler
    parameter.RayParams = partial(parameter.RayParams, setup_worker_path=worker_fork.__file__, no_monitor=True)
    utils.set_sigterm_handler = lambda _: None  # Ray's own would exit midway
    try:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises a bare Exception if a node does not start in time
        return none | {"error": " ".join(str(error).split()) or type(error).__name__}
    address = ray.get_runtime_context().gcs_address
    return none | {"address": address, "auth_mode": os.environ.get("RAY_AUTH_MODE")}


def _ray() -> Any:
    import ray

    return ray


def _next_job() -> str:
    own = bytes.fromhex(_ray().get_runtime_context().get_job_id())
    return (int.from_bytes(own, "little") + 1).to_bytes(len(own), "little").hex()


def _kill_all() -> None:
    """Kill whatever is left below this process; returns once all of it has ended."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_DIES_S)
        _reap()


def _reap() -> None:
    """Let children that have ended be gone: this process adopts what others leave."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(END, signal.SIG_IGN)  # once: what follows is not to be cut short
    raise _EndedError


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main()
