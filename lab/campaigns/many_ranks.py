"""Measures a real lead and real owners under up to 1,000 ranks that compute nothing.

    python -m lab many_ranks [--ranks 8 64 256 1000] [--owners 1 64] [--steps 6] [--units 32]
        [--door-of 1 8] [--profile]

Three processes: owner 0, which leads, as it runs in an optimizer actor (``OwnerServer``); the other owners, each with a
server of its own; and the ranks.
A rank here is a coroutine with a channel of its own that sends what a rank's store
sends: it attaches, follows notices, fetches every unit, pushes a gradient for each, finishes and commits, and gives to
a mean. With ``--door-of 8``, 8 ranks have a door, which sends what all of them ask of the lead, and hears for them what
is published: their own streams of notices are muted. With several owners, the ranks talk to the lead alone and push
nothing (their finish counts no push), so that the row shows what the lead does: it collects from every owner and sends
each the decision.

CPU and bytes are those of the lead's process, from its first message of a step to its last; latency is from the moment
at which the last rank sends its finish to the last rank's answer. All three processes share this machine's cores, so
latencies are upper bounds where lead and ranks compete. ``--profile`` prints where the lead's event loop was.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import logging
import multiprocessing
import os
import pstats
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import grpc
import psutil
import torch

from lab.bench.figures import at_least_one
from rayzero.concurrency.event_loop import shared_loop
from rayzero.concurrency.processes import this_process
from rayzero.layout.model_layout import ModelLayout, UnitLayout, lay_out_unit
from rayzero.protocol.messages import (
    COMPUTE,
    PROTOCOL_VERSION,
    Contribution,
    Edit,
    EditKind,
    FinishReport,
    MeanInput,
    ModelSpec,
    StepInputs,
    pack_presence,
)
from rayzero.protocol.ownership import owner_map
from rayzero.security.clients import host_of
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import Caller
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import OwnerServer, serve_models
from rayzero.store.wire import translate
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.rpc import (
    LinkNumber,
    methods,
    open_channel,
    token_metadata,
)
from rayzero.store.wire.tensor_streams import Opening, TensorStreams

TOKEN = "many ranks"
SLOTS = 12  # parameters of a unit, as in a transformer block
NUMEL = 64  # elements of each: nothing here measures bytes of tensors
AT_ONCE = 64  # ranks that open their links at the same time: more would only fill the kernel's queue of connections
GROUP = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
INPUTS = StepInputs(edits=(Edit(EditKind.CLIP_NORM, 1.0),), hyper=(GROUP, GROUP))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured: so many ranks and owners over a model of so many units."""

    ranks: int
    owners: int
    units: int
    steps: int
    door_of: int = 1  # ranks whose finishes, commits and means come in one call of a door, which has their notices

    @property
    def spec(self) -> ModelSpec:
        """A model of units that are as in a transformer, but small."""
        units = tuple(
            lay_out_unit(
                index,
                f"model.layers.{index}",
                torch.bfloat16,
                True,
                [(f"model.layers.{index}.part_{slot}.weight", (NUMEL,)) for slot in range(SLOTS)],
            )
            for index in range(self.units)
        )
        return ModelSpec(
            run="many-ranks",
            layout=ModelLayout(units=units, shard_numel=SLOTS * NUMEL),
            world_size=self.ranks,
            optimizer="torch.optim.adamw:AdamW",
            hyper=INPUTS.hyper,
            group_of=tuple(tuple(slot % 2 for slot in range(SLOTS)) for _ in units),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a process has used so far."""

    cpu_s: float
    rss: int
    threads: int
    files: int


# ------------------------------------------------------------------------------------------------ owners


def serve(pipe: Connection, profile: bool) -> None:
    """Be one or several owners: a process that answers a few orders."""
    _raise_file_limit()
    logging.disable(logging.WARNING)  # of ranks that end without a goodbye
    profiler = cProfile.Profile()
    with ExitStack() as stack:
        servers: list[OwnerServer] = []
        while (order := pipe.recv()) is not None:
            method, *arguments = order
            if method == "open":
                servers = [_open(stack, owner, num_owners) for owner, num_owners in arguments[0]]
                pipe.send([server.address for server in servers])
            elif method == "connect":
                for server in servers:
                    server.connect_peers(arguments[0])
                pipe.send(None)
            elif method == "load":
                pipe.send(_load())
            elif profile:
                done = threading.Event()
                shared_loop().loop.call_soon_threadsafe(lambda: (getattr(profiler, method)(), done.set()))  # noqa: B023
                done.wait()
                if method == "disable":
                    pstats.Stats(profiler).sort_stats("tottime").print_stats(32)
                pipe.send(None)
            else:
                pipe.send(None)


def _open(stack: ExitStack, owner: int, num_owners: int) -> OwnerServer:
    models = HostedModels(owner, num_owners)
    stack.callback(models.close)
    return stack.enter_context(serve_models(models, token=TOKEN))


def _load() -> Load:
    process = psutil.Process()
    return Load(
        cpu_s=time.process_time(),
        rss=process.memory_info().rss,
        threads=process.num_threads(),
        files=process.num_fds(),
    )


def _raise_file_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# ------------------------------------------------------------------------------------------------ ranks


_TRANSFER_S = 600.0  # deadline


class FakeLink:
    """A link to one owner."""

    def __init__(self, caller: Caller, address: str, shards: Sequence[int]) -> None:
        """``shards``: of the owner."""
        self._caller, self._shards = caller, shards
        self.sent = self.received = 0  # bytes of messages and of shards
        self.notices = 0  # messages of the owner's own
        self._channel = open_channel(address, None, grpc.aio)
        link = LinkNumber(caller.name, 0).next()
        self._metadata = (*token_metadata(TOKEN), *caller.metadata, *link.metadata)
        self._calls = {name: method.bind(self._channel) for name, method in methods(caller.service).items()}
        self._version: dict[int, int] = {}  # by shard
        self._news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def ask(self, method: str, request: Any) -> Any:
        """Make a unary call."""
        self.sent += request.ByteSize()
        answer = await self._calls[method](request, timeout=600.0, metadata=self._metadata)
        self.received += answer.ByteSize()
        return answer

    async def open(self) -> None:
        """Open the link."""
        self._following = asyncio.create_task(self._follow())
        await self._news.wait()

    async def _follow(self) -> None:
        notices = self._calls["Notices"](pb.NoticesRequest(**self._caller.signature), metadata=self._metadata)
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for notice in notices:
                self.received += notice.ByteSize()
                self.notices += 1
                self._version.update((each.shard, each.version) for each in notice.published)
                self._news.set()

    async def published(self, version: int) -> None:
        """Wait until every shard of the owner has a version."""
        while len(self._version) < len(self._shards) or min(self._version.values()) < version:
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        """End the link, without a word."""
        if self._following is not None:
            self._following.cancel()
        await self._channel.close()


class FakeRank(FakeLink):
    """One rank without a model, and the messages of a rank's store."""

    def __init__(self, rank: int, address: str, spec: ModelSpec, num_owners: int, owner: int = 0) -> None:
        super().__init__(Caller.rank(rank), address, owner_map(spec, num_owners).shards_of(owner))
        self.rank, self._spec, self._num_owners, self._owner = rank, spec, num_owners, owner
        self._address = address
        self._tensors: TensorStreams | None = None  # after the first transfer. freed by: close()

    async def attach(self, described: bytes, digest: str) -> None:
        """Open the link, and shake hands."""
        await self.open()
        request = pb.AttachRequest(
            protocol_version=PROTOCOL_VERSION,
            rank=self.rank,
            spec_digest=translate.spec_digest(described),
            layout_digest=digest,
            owner=self._owner,
            num_owners=self._num_owners,
            process=translate.process_to_pb(this_process()),
            lease_s=300.0,
        )
        answer = await self.ask("Attach", request)
        if answer.needs_spec:
            request.spec = described
            await self.ask("Attach", request)

    async def mute(self) -> None:
        """Hear of no publications from the owner: the door does."""
        await self.ask("Mute", pb.MuteRequest(rank=self.rank))

    async def load(self) -> None:
        """Send the initial values of the owner's shards, as rank 0 does."""
        units = [self._spec.layout.units[index] for index in self._shards]  # a shard is a whole unit here
        request = pb.LoadRequest(units=[pb.LoadRequest.Unit(unit=unit.index, shards=[unit.index]) for unit in units])
        await self._upload("Load", request, [(unit.index, torch.ones(unit.numel)) for unit in units])

    async def _connections(self) -> TensorStreams:
        """The connection for tensors."""
        if self._tensors is None:
            asked = pb.OpenTensorStreamRequest(rank=self.rank, host=host_of(self._address))
            opening = Opening.of(await self.ask("OpenTensorStream", asked), protected=False)
            self._tensors = TensorStreams(self._address, lambda _: opening)
        return self._tensors

    async def _upload(self, method: str, request: Any, shards: Sequence[tuple[int, torch.Tensor]]) -> None:
        connections, content = await self._connections(), request.SerializeToString()
        self.sent += len(content) + sum(values.nbytes for _, values in shards)

        def send() -> None:
            with connections.transfer(method, content, _TRANSFER_S) as transfer:
                for index, values in shards:
                    transfer.send(index, byte_view(values).data)
                transfer.answer()

        await asyncio.to_thread(send)

    async def fetch(self, version: int) -> None:
        """Fetch all units in one call, as small ones are."""
        units, connections = self._spec.layout.units, await self._connections()
        request = pb.FetchRequest(rank=self.rank, shards=[u.index for u in units], version=version, kind=COMPUTE)
        content = request.SerializeToString()
        self.sent += len(content)

        def receive() -> None:
            with connections.transfer("Fetch", content, _TRANSFER_S) as transfer:
                for unit in units:
                    values = torch.empty(unit.numel, dtype=unit.dtype)
                    transfer.receive(Assembly(unit.index, values.nbytes, byte_view(values)))
                    self.received += values.nbytes
                transfer.answer()

        await asyncio.to_thread(receive)

    async def push(self, step: int) -> None:
        """Push a gradient for every unit, in one call, as small ones go."""
        units = list(reversed(self._spec.layout.units))
        request = pb.PushRequest(units=[self._pushed(step, unit) for unit in units])
        await self._upload("Push", request, [(unit.index, _gradient(unit, self.rank)) for unit in units])

    def _pushed(self, step: int, unit: UnitLayout) -> pb.PushRequest.Unit:
        presence = pack_presence([True] * SLOTS)
        given = Contribution(step=step, attempt=0, rank=self.rank, unit=unit.index, seq=0, presence=presence)
        return pb.PushRequest.Unit(contribution=translate.contribution_to_pb(given), shards=[unit.index])

    def finish(self, step: int, pushes: int) -> Any:
        """Finish with ``pushes`` of each unit; answered with the norm."""
        counts = (pushes,) * len(self._spec.layout.units)
        report = FinishReport(step=step, attempt=0, rank=self.rank, counts=counts)
        return pb.FinishRequest(report=translate.report_to_pb(report))

    def commit(self, step: int) -> Any:
        """Commit; answered with the decision."""
        return pb.CommitRequest(rank=self.rank, step=step, inputs=translate.inputs_to_pb(INPUTS))

    def mean(self, number: int) -> Any:
        """Give a loss to a mean over ranks."""
        return translate.mean_to_pb(self.rank, number, MeanInput(values=(float(self.rank),), weight=1.0))

    async def close(self) -> None:
        if self._tensors is not None:
            self._tensors.close()
        await super().close()


def _gradient(unit: UnitLayout, rank: int) -> torch.Tensor:
    return torch.full((unit.numel,), 1.0 + rank % 7, dtype=unit.dtype)


@dataclass(frozen=True, slots=True)
class Host:
    """Ranks of one host, and their door if they have one."""

    ranks: Sequence[FakeRank]
    door: FakeLink | None

    @property
    def links(self) -> Sequence[FakeLink]:
        """Those that hear of publications."""
        return self.ranks if self.door is None else [self.door]

    async def ask(self, method: str, request: Callable[[FakeRank], Any]) -> None:
        """What the ranks ask: in one call of the door, or each by itself."""
        if self.door is None:
            await asyncio.gather(*(rank.ask(method, request(rank)) for rank in self.ranks))
            return
        asked = [
            pb.AskRequest.Question(rank=rank.rank, life=0, request=request(rank).SerializeToString())
            for rank in self.ranks
        ]
        answered = await self.door.ask("Ask", pb.AskRequest(method=method, questions=asked))
        if sum(len(each.questions) for each in answered.answers if each.HasField("response")) != len(self.ranks):
            raise RuntimeError(f"{method} of ranks {[rank.rank for rank in self.ranks]}: {answered}")


class Phases:
    """Runs the phases of all ranks one after the other, and notes what each cost.

    Asks the lead's process for its load between two phases."""

    def __init__(self, links: Sequence[FakeLink], lead: Connection) -> None:
        self._links, self._lead = links, lead
        self.costs: dict[str, list[Cost]] = {}

    def load(self) -> Load:
        """Of the lead's process."""
        self._lead.send(("load",))
        found: Load = self._lead.recv()
        return found

    def _bytes(self) -> int:
        return sum(link.sent + link.received for link in self._links)

    async def run(self, name: str, calls: Sequence[Awaitable[None]]) -> None:
        """Run a phase: ``calls``, one of each rank that takes part, all at once."""
        before, had, began = self.load(), self._bytes(), time.perf_counter()
        await asyncio.gather(*calls)
        took, after = time.perf_counter() - began, self.load()
        cost = Cost(
            seconds=took, cpu_s=after.cpu_s - before.cpu_s, bytes=self._bytes() - had, rss=after.rss - before.rss
        )
        self.costs.setdefault(name, []).append(cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a phase took: seconds of the clock and of the lead's CPU, bytes of ranks' messages, memory that stayed."""

    seconds: float
    cpu_s: float
    bytes: int
    rss: int


async def _few_at_once(calls: Sequence[Awaitable[None]]) -> None:
    """All of ``calls``, of which ``AT_ONCE`` run at the same time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[None]) -> None:
        async with room:
            await call

    await asyncio.gather(*map(one, calls))


async def play(case: Case, address: str, lead: Connection, profile: bool) -> dict[str, Any]:
    """Attach all ranks and take some steps; the costs by phase."""
    spec = case.spec
    described, digest = translate.spec_to_bytes(spec), spec.layout.digest
    ranks = [FakeRank(rank, address, spec, case.owners) for rank in range(case.ranks)]
    pushes = 1 if case.owners == 1 else 0
    hosts = [
        Host(ranks[at : at + case.door_of], _door(number, address, case) if case.door_of > 1 else None)
        for number, at in enumerate(range(0, case.ranks, case.door_of), case.owners)
    ]
    doors = [host.door for host in hosts if host.door is not None]
    phases = Phases([*ranks, *doors], lead)
    empty = phases.load()
    if profile:
        _order(lead, "enable")
    await phases.run("attach", [_few_at_once([rank.attach(described, digest) for rank in ranks])])
    await ranks[0].load()
    await phases.run("first notices", [rank.published(0) for rank in ranks])
    if doors:
        await phases.run("mute", [*(rank.mute() for rank in ranks), *(door.open() for door in doors)])
    joined, told = phases.load(), sum(link.notices for link in (*ranks, *doors))
    for step in range(case.steps):
        if pushes:
            await phases.run("fetch", [rank.fetch(step) for rank in ranks])
            await phases.run("push", [rank.push(step) for rank in ranks])

        def finish(rank: FakeRank, step: int = step) -> Any:
            return rank.finish(step, pushes)

        def commit(rank: FakeRank, step: int = step) -> Any:
            return rank.commit(step)

        def mean(rank: FakeRank, step: int = step) -> Any:
            return rank.mean(step + 1)

        early = [asyncio.create_task(host.ask("Finish", finish)) for host in hosts[:-1]]
        await phases.run("finish of all but one", [_passed(early)])
        await phases.run("last finish to last answer", [*early, hosts[-1].ask("Finish", finish)])
        await phases.run("commit to last decision", [host.ask("Commit", commit) for host in hosts])
        await phases.run("notices", [link.published(step + 1) for host in hosts for link in host.links])
        await phases.run("mean", [host.ask("Mean", mean) for host in hosts])
    if profile:
        _order(lead, "disable")
    end = phases.load()
    await asyncio.gather(*(link.close() for link in (*ranks, *doors)))
    return {
        **asdict(case),
        "spec_bytes": len(described),
        "phases": {name: _middle(costs) for name, costs in phases.costs.items()},
        "threads": end.threads,
        "files": end.files - empty.files,
        "notices": (sum(link.notices for link in (*ranks, *doors)) - told) / case.ranks / case.steps,
        "rss_per_rank": (joined.rss - empty.rss) // case.ranks,
        "rss": end.rss,
    }


def _door(number: int, address: str, case: Case) -> FakeLink:
    """``number``: as an optimizer."""
    return FakeLink(Caller.optimizer(number), address, owner_map(case.spec, case.owners).shards_of(0))


async def _passed(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Give the lead time to take what these tasks have sent: until its process does nothing more."""
    process, idle = psutil.Process(_lead_pid[0]), 0
    used = sum(process.cpu_times()[:2])
    while idle < 2 and tasks:
        await asyncio.sleep(0.05)
        now = sum(process.cpu_times()[:2])
        idle, used = (idle + 1 if now == used else 0), now


_lead_pid: list[int] = []


def _order(pipe: Connection, *order: Any) -> Any:
    pipe.send(order)
    return pipe.recv()


def _middle(costs: Sequence[Cost]) -> dict[str, float]:
    kept = costs[1:] or costs  # the first step warms up
    return {
        "seconds": median(cost.seconds for cost in kept),
        "cpu_s": median(cost.cpu_s for cost in kept),
        "bytes": median(cost.bytes for cost in kept),
    }


# ------------------------------------------------------------------------------------------------ the table


def measure(case: Case, profile: bool) -> dict[str, Any]:
    """One case, in fresh processes."""
    _raise_file_limit()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(2 if case.owners > 1 else 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, profile), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        addresses = _order(pipes[0], "open", [(0, case.owners)])
        if case.owners > 1:
            addresses += _order(pipes[1], "open", [(owner, case.owners) for owner in range(1, case.owners)])
        for pipe in pipes:
            _order(pipe, "connect", addresses)
        _lead_pid[:] = [processes[0].pid or os.getpid()]
        if case.owners > 1:
            asyncio.run(_load_others(case, addresses[1:]))
        return asyncio.run(play(case, addresses[0], pipes[0], profile))
    finally:
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(20.0)
            process.kill()


async def _load_others(case: Case, addresses: Sequence[str]) -> None:
    """Let the other owners know the model and its values, as rank 0 does: they have no more to do with ranks here."""
    spec = case.spec
    for owner, address in enumerate(addresses, 1):
        rank = FakeRank(0, address, spec, case.owners, owner)
        await rank.attach(translate.spec_to_bytes(spec), spec.layout.digest)
        await rank.load()
        await rank.close()


def table(found: dict[str, Any]) -> str:
    """The figures of one case, a phase a line."""
    lines = [
        f"{found['ranks']} ranks, {found['door_of']} a door, {found['owners']} owners, {found['units']} units, a "
        f"spec of {found['spec_bytes']:,} bytes: {found['threads']} threads, {found['files']} files more, "
        f"{found['rss_per_rank'] / 1e3:.0f} kB a rank, {found['rss'] / 1e6:.0f} MB in all",
        f"  {'phase':28}{'ms':>9}{'lead CPU ms':>13}{'us a rank':>11}{'bytes a rank':>14}",
    ]
    for name, cost in found["phases"].items():
        lines.append(
            f"  {name:28}{cost['seconds'] * 1e3:9.1f}{cost['cpu_s'] * 1e3:13.0f}"
            f"{cost['cpu_s'] * 1e6 / found['ranks']:11.0f}{cost['bytes'] / found['ranks']:14,.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=at_least_one, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--owners", type=at_least_one, nargs="+", default=[1, 64])
    parser.add_argument("--units", type=at_least_one, default=32)
    parser.add_argument("--door-of", type=at_least_one, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=at_least_one, default=6)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for owners in args.owners:
        for ranks in args.ranks:
            for together in args.door_of:
                case = Case(ranks=ranks, owners=owners, units=args.units, steps=args.steps, door_of=together)
                found = measure(case, args.profile)
                print(json.dumps(found) if args.json else table(found), flush=True)
