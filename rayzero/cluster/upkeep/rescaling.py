"""Changes the owners of a run on Ray while it goes on: the request for it, where each is to be, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayzero.cluster.files.run_record import run_status, why_over
from rayzero.cluster.nodes.places import check_memory, check_nodes, choose, is_placed
from rayzero.cluster.nodes.session import alive_nodes
from rayzero.cluster.run import Rescaled, RunState, optimizer_name
from rayzero.cluster.run_actors import RunActors
from rayzero.cluster.status import RunStatus
from rayzero.cluster.upkeep.ray_processes import RayProcesses
from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.config.zero import Placement
from rayzero.elastic import reform
from rayzero.elastic.controller import Action, Supervisor, still_outlived
from rayzero.elastic.members import Answered, Event, MemberKind, Serves
from rayzero.elastic.reform import Step, with_doors
from rayzero.elastic.scaling import ScaleRequest, ask, withdraw
from rayzero.errors import ConfigError, RunFailedError
from rayzero.layout.shard_map import Rescale
from rayzero.protocol.ownership import Prepared, device_owners
from rayzero.quantities import count, format_bytes

_REPLACED = "another change was asked for before it began"
_SAID = {
    Step.START: "starting what is missing",
    Step.HOLD: "finishing what is decided",
    Step.SETTLE: "publishing what is decided",
    Step.PREPARE: "writing down who owns what",
    Step.LET_STAND: "beginning the next epoch",
    Step.ENTER: "letting the new owners serve",
    Step.CHANGE: "leading the ranks to them",
}


def why_not(zero: ZeroConfig, max_failures: int) -> str | None:
    """Why the owners of a run cannot change; None if they can."""
    if zero.shared_directory is None:
        return "with zero.transport='grpc' owners have memory of their own, which nobody else can take over"
    if not max_failures:
        return "run.max_failures is 0, so its processes do not follow other optimizers"
    return None


@dataclass(slots=True)
class _Change:
    """A change that was asked for."""

    request: ScaleRequest
    why: str
    nodes: dict[int, str]  # owner that joins -> its node
    before: int = 0
    began: dict[Step, float] = field(default_factory=dict)  # monotonic seconds
    moved_bytes: int = 0
    stood: float = 0.0  # seconds, in attempts that were given up
    up: int = 0  # of the processes that join

    def __str__(self) -> str:
        return f"from {count(self.before, 'optimizer')} to {self.request.num_optimizers}"

    def begin_again(self, now: float) -> None:
        """The attempt is given up: nothing has moved."""
        self.stood, self.moved_bytes, self.up = self._pause(now), 0, 0
        self.began = {Step.START: now}

    def _pause(self, now: float) -> float:
        held = self.began.get(Step.HOLD)
        return self.stood + (0.0 if held is None else now - held)

    def rescaled(self, now: float, failed: str | None = None) -> Rescaled:
        """What came of it. ``now``: when the last step ended."""
        began = [*self.began.values(), now]
        seconds = {str(step): end - start for step, start, end in zip(self.began, began, began[1:], strict=False)}
        return Rescaled(
            id=self.request.id,
            why=self.why,
            before=self.before,
            after=self.before if failed else self.request.num_optimizers,
            failed=failed,
            seconds=seconds,
            pause=self._pause(now),
            moved_bytes=0 if failed else self.moved_bytes,
        )


class Rescaling:
    """Asks a Supervisor for the changes of the owners that are asked for, and writes down what comes of each.

    Knows requests and where owners are to be; not deaths, nor the calls of a change."""

    def __init__(
        self,
        actors: RunActors,
        supervisor: Supervisor,
        processes: RayProcesses,
        status: RunStatus,
        *,
        zero: ZeroConfig,
        scaling: ScalingConfig,
    ) -> None:
        """``status``: where changes are entered."""
        self._actors, self._supervisor, self._processes, self._status = actors, supervisor, processes, status
        self._controller, self._zero, self._scaling = supervisor.controller, zero, scaling
        self._placement = zero.placement  # that of the last change that named one
        self._refusal = why_not(zero, self._controller.max_failures)
        self._waiting: _Change | None = None  # asked for while another one was under way
        self._change: _Change | None = None

    # ---- requests

    def request(self, request: ScaleRequest, why: str = "asked for") -> None:
        """Change to other owners, once every member does its work; instead of a change that has not begun. ``why``: for
        the record."""
        change = _Change(request, why, {}, before=self._controller.ownership.num_optimizers)
        if self._refusal is not None:
            self._end(change, f"the optimizers of this run cannot change: {self._refusal}")
        elif self._change is not None and self._controller.changes:
            self._replace_waiting(change)
        else:
            self._begin(change)

    def replace(self, request: ScaleRequest) -> None:
        """A request is not carried out, because a newer one came with it."""
        self._end(_Change(request, "asked for", {}, before=self._controller.ownership.num_optimizers), _REPLACED)

    def _replace_waiting(self, change: _Change) -> None:
        if self._waiting is not None:
            self._end(self._waiting, _REPLACED)
        self._waiting = change

    def _begin(self, change: _Change) -> None:
        try:
            wanted = self._planned(change)
            changes = reform.resolved(wanted, self._controller.ownership) is not None
            if changes:
                self._actors.check_files(len(wanted.former), wanted.doors, {})
                self._check_hosts(change, wanted)
        except ConfigError as error:
            self._end(change, str(error))
            return
        if not changes:
            self._status.say(f"it has {count(change.before, 'optimizer')} already")
            self._enter(change.rescaled(time.monotonic()))
            return
        self._change = change
        change.began[Step.START] = time.monotonic()
        self._status.say(f"changing {change} ({change.why})")
        self._progress(f"{change}: {_SAID[Step.START]}")
        self._processes.nodes = change.nodes
        self._note_actions(self._supervisor.scale(wanted))

    def _planned(self, change: _Change) -> Rescale:
        """Who stays, and where those that join are to be. Nodes with ranks keep an optimizer, also those to avoid."""
        avoid, before, labels = change.request.avoid, change.before, self._scaling.optimizer_labels
        alive = alive_nodes()
        check_nodes(avoid, alive)
        check_memory(change.request.num_optimizers - before, alive)
        placement = change.request.placement or self._placement
        nodes = {i: self._actors.members[optimizer_name(i)] for i in range(before)}
        ranks = [member.node for who, member in self._actors.members.items() if who.startswith("rank")]
        right = {
            node.id
            for node in alive
            if change.request.placement is None or is_placed(node, rank_nodes=ranks, placement=placement, labels=labels)
        }
        stays = [i for i, at in nodes.items() if at.node in right and at.node not in avoid and at.host not in avoid]
        former = tuple(i if i in stays else None for i in range(change.request.num_optimizers))
        there = [nodes[i].node for i in stays if i < len(former)]
        for owner in (i for i, was in enumerate(former) if was is None):
            change.nodes[owner] = choose(
                there,
                alive,
                rank_nodes=ranks,
                placement=placement,
                labels=labels,
                avoid=avoid,
            )
            there.append(change.nodes[owner])
        if device_owners(self._scaling.num_workers, self._zero.host_fraction):  # each rank has one beside it
            return Rescale(former)
        ownership = self._controller.ownership
        at = [self._actors.members[optimizer_name(i)].node for i in range(ownership.num_owners)]
        whole, doors = with_doors(Rescale(former), there, ranks=ranks, there=at, before=ownership)
        change.nodes |= doors
        return whole

    def _check_hosts(self, change: _Change, wanted: Rescale) -> None:
        """Raise ConfigError if ranks could not reach the owners after a change, or owners not each other; let them, if
        the run has been on one node until now."""
        members = self._actors.members
        ranks = {member.node for who, member in members.items() if who.startswith("rank")}
        stay = {members[optimizer_name(i)].node for i in wanted.former if i is not None}
        nodes = ranks | stay | set(change.nodes.values())
        if len(nodes) == 1:
            return
        if self._zero.transport == "shm":
            where = count(len(nodes), "node")
            raise ConfigError(f"zero.transport='shm' needs every process on one host, and these are on {where}")
        self._controller.readdress(self._actors.listen_at_nodes(self._controller.addresses))

    def close(self) -> None:
        """The run's processes end: so do the changes that it has not made. Idempotent."""
        waiting, self._waiting, change, self._change = self._waiting, None, self._change, None
        for each in (change, waiting):
            if each is not None:
                self._end(each, "its processes have ended before; ask again if the run starts again")

    def _end(self, change: _Change, failed: str | None) -> None:
        rescaled = change.rescaled(time.monotonic(), failed)
        outcome = "given_up" if failed else "done"
        self._actors.coordinator.rescaled.remote(outcome, dict(rescaled.seconds), rescaled.pause, rescaled.moved_bytes)
        if failed is None:
            self._placement = change.request.placement or self._placement
            now, moved = count(rescaled.after, "optimizer"), format_bytes(change.moved_bytes)
            said = f"the run has {now} now; training stood for {rescaled.pause:.2f} s; {moved} have another owner"
        else:
            said = f"{count(change.before, 'optimizer')} as before: {failed}"
        self._status.say(said)
        self._progress(None)
        if failed is None:
            self._status.num_optimizers = rescaled.after
            self._status.enter(self._controller.addresses, self._actors)
        self._enter(rescaled)

    def _enter(self, rescaled: Rescaled) -> None:
        self._status.rescales.append(rescaled)
        self._status.changed()

    def _progress(self, said: str | None) -> None:
        self._status.rescaling = said
        self._status.changed()

    # ---- what comes of one

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        change = self._change
        # of an attempt that is given up
        is_late = any(isinstance(action, reform.Call) and action.method == "abandon" for action in actions)
        match event:
            case Serves(process) if change is not None and process.member.kind is MemberKind.OWNER:
                if process.member.index in change.nodes and change.up < len(change.nodes):
                    change.up += 1
                    self._progress(f"{change}: {change.up} of {len(change.nodes)} new processes are up")
            case Answered(process, Step.PREPARE, Prepared() as prepared) if change is not None and not is_late:
                change.moved_bytes += prepared.moved_bytes
                moved = format_bytes(change.moved_bytes)
                self._progress(f"{change}: {process.member} is ready; {moved} have another owner by now")
        self._note_actions(actions)

    def _note_actions(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case reform.Call(_, Step() as step) if self._change is not None:
                    self._change.began[step] = time.monotonic()
                    self._progress(f"{self._change}: {_SAID[step]}")
                case reform.Abandon(_, _, why):
                    self._abandoned(why)
                case reform.Retire():
                    change, self._change = self._change, None
                    if change is not None:
                        self._actors.enlist()
                        self._end(change, None)
        if self._change is None:
            self._next()

    def _abandoned(self, why: str) -> None:
        if self._change is not None and self._controller.changes:  # it is tried again
            self._change.begin_again(time.monotonic())
            self._progress(f"{self._change}: {_SAID[Step.START]}")
            left = still_outlived(self._controller.max_failures, self._controller.outlived)
            self._status.say(f"the change of the optimizers begins again: {why} {left}")
            return
        change, self._change = self._change, None
        if change is not None:
            self._end(change, why)

    def _next(self) -> None:
        change, self._waiting = self._waiting, None
        if change is not None:
            change.before = self._controller.ownership.num_optimizers
            self._begin(change)


# ---- asking for it, from any process that sees the run's folder -----------------------------------------------------


_LOOK_S = 0.2
_TAKEN_S = 120.0  # in which a driver takes a request: it looks twice a second, but not while it starts the run again


def scale(
    run: str | Path,
    num_optimizers: int,
    *,
    avoid: Sequence[str] = (),
    placement: Placement | None = None,
    wait: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Rescaled | None:
    """Give a run other optimizer actors while it trains; no step is lost and no bit changes. The newest request counts.

    run: its folder. avoid: nodes (ids or addresses) on which no optimizer actor is to have shards; those that have are
        replaced. placement: where all of them are to be from now on (``ZeroConfig.placement``); those on other nodes
        are replaced. wait: until they have changed; returns then what came of it. on_progress:
        called with each step, while it waits.

    Raises ConfigError if there is no such run, or it cannot change its optimizers, RunFailedError if they stayed as
    they were, the run ended before, or its driver does not take the request, which is withdrawn then."""
    run_dir = Path(run)
    _require_running(run_status(run_dir))
    request = ScaleRequest(num_optimizers=num_optimizers, avoid=tuple(avoid), placement=placement)
    try:
        ask(run_dir, request)
    except OSError as error:
        raise ConfigError(f"cannot leave a request in {run_dir}: {error.strerror}") from error
    return _outcome(run_dir, request, on_progress) if wait else None


def _require_running(record: Mapping[str, Any]) -> None:
    if (gone := why_over(record)) is not None:
        raise ConfigError(f"run {record['run']!r} does not go on, because {gone}: only a run that goes on can change")
    try:
        config = record["config"]
        zero, failures = ZeroConfig.from_mapping(config["zero"]), config["run"]["max_failures"]
    except (KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"the record of run {record['run']!r} does not say how it is configured: {error}") from error
    reason = why_not(zero, failures)
    if reason is not None:
        raise ConfigError(f"the optimizers of run {record['run']!r} cannot change: {reason}")


def _outcome(run_dir: Path, request: ScaleRequest, on_progress: Callable[[str], None]) -> Rescaled:
    said, asked = None, time.monotonic()
    while True:
        record = run_status(run_dir)
        found = next((one for one in record["rescales"] if one["id"] == request.id), None)
        if found is not None:
            if found["failed"] is not None:
                raise RunFailedError(f"the optimizers stay as they are: {found['failed']}")
            return Rescaled(**found)
        progress = record["rescaling"]
        if progress is not None and progress != said:
            said = progress
            on_progress(progress)
        if why_over(record) is not None:
            raise RunFailedError(f"run {record['run']!r} ended before its optimizers changed")
        if record["state"] == RunState.STARTING:
            asked = time.monotonic()
        elif time.monotonic() - asked > _TAKEN_S and withdraw(run_dir, request):
            pid, host = record["driver"]["pid"], record["driver"]["host"]
            raise RunFailedError(
                f"the driver of run {record['run']!r}, pid {pid} on {host}, has not taken the request within "
                f"{_TAKEN_S:.0f} s: see there whether it was killed or is stopped"
            )
        time.sleep(_LOOK_S)
