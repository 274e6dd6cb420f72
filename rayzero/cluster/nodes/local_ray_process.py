"""The process of a Ray that a driver starts on its machine; see ``local_ray``.

It is Ray's first driver, which starts and ends Ray, and runs nothing. It adopts what its processes leave behind (it is
their subreaper), so that it can end all of them, whenever that is asked for. A run's workers are forked by a server
that it starts, too (forks/fork_server.py).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import psutil

from rayzero.cluster.forks import ray_setup
from rayzero.cluster.forks.worker_fork import make_ready, start_server
from rayzero.cluster.nodes.local_ray import END, NOT_FOR_RAY

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_DIES_S = 1.0  # between two looks for processes that are left


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
    parameter.RayParams = partial(parameter.RayParams, setup_worker_path=ray_setup.__file__, no_monitor=True)
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
    """The id of the next driver's job."""
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
