"""Makes Ray actor classes of a run's processes: their processes are forked by their host's fork server."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import ray

from rayzero.cluster.forks.worker_fork import TOKEN, fork_token

CONTROL = "control"  # concurrency group of the calls that must be answered while `run` or `watch` lasts

_SAME_INTERPRETER = {"working_dir", "py_modules", "excludes", "env_vars", "config"}  # of a job's runtime environment
_OF_RAYLET = r"""tr '\0' '\n' </proc/$PPID/cmdline | sed -n 's/^--python_worker_command=\([^ "]*\) .*/\1/p' | grep ."""
_FORK = """import os, sys
try:
    from rayzero.cluster.forks.worker_fork import main
except ImportError:  # as the worker will say
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
main()
"""


def actor_class(of: type) -> Any:
    """The Ray actor class of ``of``; calls through ``calls.control`` are answered while another one lasts."""
    return ray.remote(concurrency_groups={CONTROL: 3}, **forked())(of)


def forked() -> dict[str, Any]:
    """The actor options by which the host's fork server forks an actor's process (forks/worker_fork.py); none where
    the job's runtime environment has another interpreter, or changes it before anything is imported."""
    if set(ray.get_runtime_context().runtime_env) - _SAME_INTERPRETER:
        return {}
    # Ray's shell executes it. Another node's interpreter may be at another path: it is the one that its raylet starts.
    interpreter = f'"$({_OF_RAYLET} || echo {shlex.quote(sys.executable)})"'
    return {
        "runtime_env": {"py_executable": f"{interpreter} -c {shlex.quote(_FORK)}", "env_vars": {TOKEN: fork_token()}}
    }
