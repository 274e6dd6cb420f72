"""A run's processes as Ray actors: their classes, whose processes the host's fork server forks, and calls to them, made
while their loops last and answered in time, or a failure that names the process.

Calls that should answer soon have a deadline. Calls that last as long as their process (``run``, ``watch``) report its
death at once. A trial asks whether the hosts of a run reach its owners, before the run, or an owner that joins, depends
on it.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayzero.cluster.files.metrics_log import MetricsLog
from rayzero.cluster.nodes.reachability import require_reached
from rayzero.cluster.nodes.session import answered
from rayzero.cluster.nodes.worker_fork import TOKEN, fork_token
from rayzero.cluster.processes.coordinator import Coordinator
from rayzero.cluster.run import NAMESPACE, Member, coordinator_name
from rayzero.cluster.supervision import Failure, death_of, failure_of, run_failed
from rayzero.errors import ConfigError, RunFailedError

CONTROL = "control"  # concurrency group of the calls that must be answered while `run` or `watch` lasts

_SAME_INTERPRETER = {"working_dir", "py_modules", "excludes", "env_vars", "config"}  # of a job's runtime environment
_OF_RAYLET = r"""tr '\0' '\n' </proc/$PPID/cmdline | sed -n 's/^--python_worker_command=\([^ "]*\) .*/\1/p' | grep ."""
_FORK = """import os, sys
try:
    from rayzero.cluster.nodes.worker_fork import main
except ImportError:  # as the worker will say
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
main()
"""

START_S = 120.0  # until an actor has imported torch and answers; slow on a loaded machine
ANSWER_S = 30.0  # a call that only reads or sets a value
STOP_S = 5.0  # how long a process may take to stop before it is killed


def actor_class(of: type) -> Any:
    """The Ray actor class of ``of``; calls through ``control`` are answered while another one lasts."""
    return ray.remote(concurrency_groups={CONTROL: 3}, **forked())(of)


def forked() -> dict[str, Any]:
    """The actor options by which the host's fork server forks an actor's process (nodes/worker_fork.py); none where
    the job's runtime environment has another interpreter, or changes it before anything is imported."""
    if set(ray.get_runtime_context().runtime_env) - _SAME_INTERPRETER:
        return {}
    # Ray's shell executes it. Another node's interpreter may be at another path: it is the one that its raylet starts.
    interpreter = f'"$({_OF_RAYLET} || echo {shlex.quote(sys.executable)})"'
    return {
        "runtime_env": {"py_executable": f"{interpreter} -c {shlex.quote(_FORK)}", "env_vars": {TOKEN: fork_token()}}
    }


def control(method: Any) -> Any:
    """An actor's method in the concurrency group that is served while ``run`` or ``watch`` lasts."""
    return method.options(concurrency_group=CONTROL)


def ask(run: str, calls: Mapping[str, Any], members: Mapping[str, Member], timeout_s: float) -> dict[str, Any]:
    """The answers to calls already made, by process. ``members``: those whose process ids are known.

    Raises RunFailedError, naming the process that failed or is late."""
    ready, late = answered(list(calls.values()), timeout_s)
    failed = [
        failure
        for who, call in calls.items()
        if call in ready and (failure := failure_of_call(who, call, members.get(who)))
    ]
    if failed:
        raise run_failed(run, failed[0], failed[1:])
    if late:
        names = ", ".join(who for who, call in calls.items() if call in late)
        raise run_failed(run, Failure(who=names, what=f"gave no answer within {timeout_s:g} s"))
    return {who: ray.get(call) for who, call in calls.items()}


def ask_config(run: str, calls: Mapping[str, Any], members: Mapping[str, Member], timeout_s: float) -> dict[str, Any]:
    """See ``ask``. Raises a process's ConfigError as it is: a port that is taken, an address that is none."""
    try:
        return ask(run, calls, members, timeout_s)
    except RunFailedError as failed:
        if isinstance(failed.__cause__, ConfigError):
            raise failed.__cause__ from None
        raise


def failure_of_call(who: str, call: Any, member: Member | None = None) -> Failure | None:
    """How a call that has ended has failed; None: it has an answer. ``member``: None before it has said who it is."""
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        return failure_from_ray(who, error, member)
    return None


def failure_from_ray(who: str, error: ray.exceptions.RayError, member: Member | None) -> Failure:
    if isinstance(error, ray.exceptions.RayTaskError):
        original = error.cause if isinstance(error.cause, BaseException) else error
        return failure_of(who, original, traceback_text=str(error))
    if error.args and isinstance(error.args[0], ray.exceptions.RayTaskError):  # its constructor raised
        return failure_from_ray(who, error.args[0], member)
    return death_of(who, None if member is None else member.pid, _detail(str(error)))


def _detail(text: str) -> str:
    """The part of Ray's message that says how the process ended."""
    said = text.rpartition("Worker exit detail:")[2].partition("Some common causes")[0]
    return " ".join(said.split())


# ---- the coordinator ------------------------------------------------------------------------------------------------


_CALLS = 100  # to the coordinator at a time, besides those of the ranks' reports
_LOOK_S = 0.2  # between two looks whether a dead driver's run has left the cluster


def make_coordinator(run: str, log: MetricsLog | None, restarts: int, ranks: int) -> Any:
    """Create the actor, on the driver's node, which is how http_sd is found. ``log``: see ``Coordinator``.
    ``restarts``: how often Ray may start it again. ``ranks``: how many report.

    Raises ConfigError if a run of this name is on the cluster."""
    here = ray.get_runtime_context().get_node_id()
    options = {
        "name": coordinator_name(run),
        "namespace": NAMESPACE,
        "num_cpus": 0,  # for actors without CPUs Ray picks a node at random, and only a hard affinity changes that
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
        "max_concurrency": ranks + _CALLS,  # a call of each rank may wait until the driver has told of the run
        "max_restarts": restarts,  # by Ray, so that every process's handle stays good
        "max_task_retries": -1 if restarts else 0,
    }
    try:
        return ray.remote(Coordinator).options(**options, **forked()).remote(run, log, time.time())
    except ValueError as error:  # ActorAlreadyExistsError is one
        raise _name_in_use(run) from error


def refuse_name_in_use(run: str, patience_s: float = 0.0) -> None:
    """Raise ConfigError if a run of this name is on the cluster, before waiting for resources that it holds.

    ``patience_s``: how long it may still be there, because its driver is dead."""
    until = time.monotonic() + patience_s
    while _is_there(run):
        if time.monotonic() >= until:
            raise _name_in_use(run)
        time.sleep(_LOOK_S)


def _is_there(run: str) -> bool:
    try:
        ray.get_actor(coordinator_name(run), namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def _name_in_use(run: str) -> ConfigError:
    return ConfigError(
        f"a run named {run!r} is already on this cluster; a run is named after its directory, so choose another one"
    )


# ---- whether owners are reached -------------------------------------------------------------------------------------


_DEATHS = (  # of a process, or of its node
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
)


@dataclass(frozen=True, slots=True)
class ReachTarget:
    """An owner that is to be reached."""

    who: str
    address: str
    actor: Any


@dataclass(frozen=True, slots=True)
class Tries:
    """A process that connects to owners, for all of its host."""

    who: str
    host: str
    actor: Any
    listeners: tuple[ReachTarget, ...]


class ReachTrial:
    """Calls in which processes try to connect to owners. Once none is left, ``require`` says what came of them.

    Owners say their ports for tensors first. Ray sends an actor its calls in order: a try that waited for a port would
    hold up every later call to that actor."""

    def __init__(self, tries: Iterable[Tries]) -> None:
        """Each owner is reached if its port for calls is, and that for tensors."""
        self._tries = list(tries)
        owners = {to.address: to for each in self._tries for to in each.listeners}
        self._owners = {at: to.who for at, to in owners.items()}
        self._asked = {control(to.actor.tensor_address).remote(at): to for at, to in owners.items()}
        self._tensors: dict[str, str] = {}  # address of an owner that has answered -> that for tensors
        self._calls: dict[Any, Tries] = {}
        self._failed: dict[str, dict[str, str]] = {}  # host -> address -> why
        self._raised: list[str] = []  # who could not try or be tried, and why

    @property
    def calls(self) -> dict[Any, str]:
        """Those that have not been taken, and who is to answer."""
        return {call: each.who for each_of in (self._asked, self._calls) for call, each in each_of.items()}

    def take(self, call: Any) -> None:
        if call in self._asked:
            owner = self._asked.pop(call)
            if self._has_answer(call, owner.who):
                self._tensors[owner.address] = ray.get(call)
            if not self._asked:
                self._begin()
        else:
            each = self._calls.pop(call)
            if self._has_answer(call, each.who):
                self._failed.setdefault(each.host, {}).update(ray.get(call))  # a host may have several nodes

    def _begin(self) -> None:
        for each in self._tries:
            answered = [to.address for to in each.listeners if to.address in self._tensors]
            tensors = [self._tensors[at] for at in answered]
            self._calls[control(each.actor.unreachable).remote([*answered, *tensors])] = each

    def _has_answer(self, call: Any, who: str) -> bool:
        """Whether the call has returned a value. Keeps what it has raised; another call reports a death."""
        try:
            ray.get(call)
        except ray.exceptions.RayError as error:
            if not isinstance(error, _DEATHS):
                raised = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                self._raised.append(f"{who} {failure_of(who, raised).what}")
            return False
        return True

    def require(self) -> None:
        """Raise ConfigError, naming both ends, if a host does not reach an owner, or a process could not try."""
        tensors = {at: self._owners[owner] for owner, at in self._tensors.items()}
        require_reached(self._failed, self._owners, tensors)
        if self._raised:
            raise ConfigError(f"it is not known whether all hosts reach all optimizers: {self._raised[0]}; ask again")
