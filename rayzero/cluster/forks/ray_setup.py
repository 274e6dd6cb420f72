"""What the raylet of a driver's own Ray runs to start a worker, in place of Ray's own ``setup_worker.py``.

Ray's imports Ray, for half a CPU second a worker, to run a command that a runtime environment names, which is a shell
that becomes another interpreter (actors/actor_calls.py). A worker of a run is known by its environment: it is forked by
this process. Every other one is left to Ray's.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main() -> None:
    arguments = sys.argv[1:]
    given = next((one.removeprefix(_CONTEXT) for one in arguments if one.startswith(_CONTEXT)), "{}")
    variables = _of_a_forked_worker(json.loads(given))
    if variables is None:
        os.execv(sys.executable, [sys.executable, _rays_own(), *arguments])
    from rayzero.cluster.forks import worker_fork

    os.environ |= variables
    sys.argv[1:] = [one for one in arguments if not one.startswith((_CONTEXT, _LANGUAGE))]
    worker_fork.main()


def _rays_own() -> str:
    """The path of Ray's program, found without importing Ray."""
    ray = find_spec("ray")
    assert ray is not None
    assert ray.submodule_search_locations is not None
    return os.path.join(ray.submodule_search_locations[0], "_private", "workers", "setup_worker.py")


def _of_a_forked_worker(context: dict[str, object]) -> dict[str, str] | None:
    """The environment variables of a runtime environment that makes a run's worker and does nothing else."""
    from rayzero.cluster.forks.worker_fork import TOKEN

    variables = context.get("env_vars")
    others = {name for name, value in context.items() if value} - {"env_vars", "py_executable"}
    return variables if isinstance(variables, dict) and set(variables) == {TOKEN} and not others else None


if __name__ == "__main__":
    main()
