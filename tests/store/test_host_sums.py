"""Gradients for owners elsewhere leave a host as one sum of its ranks, with the bits of ranks that push alone."""

from __future__ import annotations

import itertools
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayzero.config import ZeroConfig
from rayzero.errors import ConfigError, HandshakeError, StoreError, UnsupportedError
from rayzero.layout.model_layout import Shard
from rayzero.protocol.messages import Contribution, ModelSpec, pack_presence
from rayzero.protocol.ownership import Ownership
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.host.host_sums import SummedRanks
from rayzero.store.host.transfer_calls import Sending
from rayzero.store.host.wire_transfers import PushedUnit
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.rank import rank_memory
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.wire.tensor_stream import Sent
from rayzero.telemetry.names import TRANSFER_BYTES
from rayzero.telemetry.recorder import MemoryRecorder
from tests.support import needs
from tests.support.waiting import until

from .proxy import Proxy
from .stores import inprocess
from .test_tensor_streams import over
from .toy import WAIT, Grads, Rank, equal, make_spec, masters, random_grads, start, started, take_step

pytestmark = needs.signals_between_processes

OWNERS = 2
BF16 = (torch.bfloat16,) * 3


class Place:
    """Hosts of ranks, and owners on others."""

    def __init__(
        self, stack: ExitStack, hosts: Sequence[int], owners: Sequence[int | None] = (None, None), **options: Any
    ):
        """``hosts``: of each rank. ``owners``: the host of each; None: one without ranks. A host of ranks without owner
        gets a door."""
        self.token, self._stack, self._hosts, self._options = secrets.token_hex(), stack, hosts, options
        self.directories = {
            host: Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-host-")))
            for host in {*hosts, *owners}
        }
        self.recorders: dict[int, MemoryRecorder] = {}
        doors = [host for host in dict.fromkeys(hosts) if host not in owners]
        self._ownership = Ownership(len(owners) + len(doors), doors=len(doors))
        self.of_doors = {host: MemoryRecorder() for host in hosts}
        self.servers = servers = []
        for owner, host in enumerate([*owners, *doors]):
            recorder = None if host is None else self.of_doors[host]
            models = HostedModels(
                owner,
                self._ownership.num_owners,
                ownership=self._ownership,
                share=self.directories[host],
                recorder=recorder,
            )
            stack.callback(models.close)
            servers.append(stack.enter_context(serve_models(models, token=self.token, replaces_ranks=True)))
        self.addresses = [server.address for server in servers]
        for server in servers:
            server.connect_peers(self.addresses)

    def store(self, rank: int, life: int = 0) -> RankStore:
        recorder = self.recorders[rank] = MemoryRecorder()
        options = {"host_push": "auto", "stall_timeout": WAIT} | self._options
        connection = RemoteConnection(
            rank,
            self.addresses,
            RankTerms(
                token=self.token,
                share=self.directories[self._hosts[rank]],
                ranks_here=[other for other, host in enumerate(self._hosts) if host == self._hosts[rank]],
                life=life,
                recorder=recorder,
                **options,
            ),
            self._ownership,
        )
        store = RankStore(connection)
        self._stack.callback(store.close)
        return store

    def start(self, spec: ModelSpec) -> list[Rank]:
        return start([self.store(rank) for rank in range(spec.world_size)], spec)

    def sent(self, host: int = 0) -> int:
        """The bytes of sums that the door of a host has sent."""
        return int(self.of_doors[host].total(TRANSFER_BYTES, direction="push", transport="grpc"))

    def pushed(self, transport: str = "grpc") -> list[int]:
        """The bytes that each rank has pushed by a transport."""
        return [
            int(self.recorders[rank].total(TRANSFER_BYTES, direction="push", transport=transport))
            for rank in sorted(self.recorders)
        ]


def gradients(spec: ModelSpec, seed: int, without: str = "") -> Grads:
    """Of every parameter but one. Those of neighbouring ranks are so large and so small that each order of adding has
    bits of its own, also of 16-bit gradients."""
    found = random_grads(spec, seed, scale=(1.0, 3e-6, 2e3)[seed // 10 % 3])
    return {name: value for name, value in found.items() if name != without}


def units_of(spec: ModelSpec, grads: Grads) -> list[int]:
    return [unit.index for unit in spec.layout.units if any(slot.name in grads for slot in unit.slots)]


def train(ranks: Sequence[Rank], steps: int = 3, pushes: int = 1, *max_norms: float) -> dict[str, torch.Tensor]:
    """Steps in which ranks skip units and parameters, and one discards what it has pushed; the masters after them."""
    spec = ranks[0].spec
    for step in range(steps):
        for rank in ranks:
            rank.fetch()
        for rank in ranks:
            seed = 100 * step + 10 * rank.rank
            if rank.rank == 1 and step == 1:  # begins again
                rank.push(gradients(spec, seed + 7), [2, 1])
                rank.zero_grad()
            for push in range(pushes):
                mine = gradients(spec, seed + push, "layers.0.b" if rank.rank % 2 else "")
                units = [unit for unit in units_of(spec, mine) if (unit + rank.rank + step) % 4]
                rank.push(mine, units)
        for norm in [rank.finish(*max_norms) for rank in ranks]:
            norm.result(WAIT)
    for rank in ranks:
        rank.fetch()
    return masters(ranks[0])


def alone(spec: ModelSpec, steps: int = 3, pushes: int = 1, *max_norms: float) -> dict[str, torch.Tensor]:
    """The same of ranks that push alone, in one process with their owners."""
    with inprocess(spec.world_size, OWNERS) as stores:
        return train(start(stores, spec), steps, pushes, *max_norms)


GROUPS = "two groups"  # test_only_the_first_ranks_of_a_group_are_added has their bits in the first tier
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"world_size": 2},
    "bf16": {"world_size": 3, "dtypes": BF16},
    "accumulation": {"world_size": 3, "dtypes": BF16, "accumulation_steps": 2},
    "mixed": {"world_size": 3, "dtypes": (torch.float32, torch.bfloat16, torch.float16)},
    GROUPS: {"world_size": 10},
}


@pytest.mark.parametrize(
    ("case", "threads"),
    [
        *((case, 1) for case in CASES if case != GROUPS),
        pytest.param(GROUPS, 1, marks=pytest.mark.thorough),
        ("bf16", 3),
        ("mixed", 3),
    ],
)
def test_the_bits_are_those_of_ranks_that_push_alone(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, case: str, threads: int
) -> None:
    monkeypatch.setattr(rank_memory, "adding_threads", lambda cores, ranks, *, on_gpu: threads)
    spec = make_spec(**CASES[case])
    clip = (0.01,) if case in ("bf16", "accumulation") else ()
    ranks = Place(stack, [0] * spec.world_size).start(spec)
    assert all(map(summed, ranks))
    steps = 3, spec.accumulation_steps, *clip
    assert equal(train(ranks, *steps), alone(spec, *steps))


def summed(rank: Rank) -> bool:
    return rank.store._joined.finished is not None  # type: ignore[attr-defined]


def everything(ranks: Sequence[Rank], step: int) -> None:
    """A step in which every rank pushes everything once."""
    for rank in ranks:
        rank.fetch()
        rank.push(gradients(rank.spec, 10 * step + rank.rank))
    for norm in [rank.finish() for rank in ranks]:
        norm.result(WAIT)


def elements(spec: ModelSpec, owners: Sequence[int] = range(OWNERS)) -> int:
    """Of the units' shards with these owners."""
    plan = SharedPlan.of(spec, OWNERS)
    return sum(shard.numel for owner in owners for shard in plan.shards_of(owner))


def test_what_leaves_a_host_does_not_depend_on_its_ranks(stack: ExitStack) -> None:
    for world_size in (3, 5):
        spec = make_spec(world_size, dtypes=BF16, run=f"toy {world_size}")
        place = Place(stack, [0] * world_size)
        ranks = place.start(spec)
        for step in range(2):
            everything(ranks, step)
        sums = 2 * 4 * elements(spec)
        until(lambda place=place, sums=sums: place.sent() >= sums)
        assert (place.sent(), place.pushed()) == (sums, [0] * world_size), "one fp32 sum a step"
        assert place.pushed("host") == [2 * 2 * elements(spec)] * world_size


def test_owners_of_the_host_read_what_the_others_get_as_a_sum(stack: ExitStack) -> None:
    spec = make_spec(2)
    place = Place(stack, [0, 0], owners=[0, None])
    ranks = place.start(spec)
    assert equal(train(ranks), alone(spec))
    before, sums = place.sent(), 4 * elements(spec, [1])
    everything(ranks, 3)
    until(lambda: place.sent() - before >= sums)  # counted once the owner has answered
    assert place.sent() - before == sums


def test_only_the_first_ranks_of_a_group_are_added(stack: ExitStack) -> None:
    """Ranks 6 to 9 are on one host: 8 and 9 begin their group, and 6 and 7 come behind others of theirs."""
    spec = make_spec(10)
    place = Place(stack, [0] * 6 + [1] * 4)
    ranks = place.start(spec)
    assert [summed(rank) for rank in ranks] == [True] * 6 + [False] * 2 + [True] * 2
    assert equal(train(ranks, 2), alone(spec, 2))

    def sent() -> list[int]:
        return [place.sent(0), place.sent(1), *place.pushed()]

    before, whole = sent(), 4 * elements(spec)
    everything(ranks, 2)
    until(lambda: sum(sent()) - sum(before) >= 4 * whole)  # counted once an owner has answered
    now = [now - then for now, then in zip(sent(), before, strict=True)]
    assert now == [whole, whole, *[0] * 6, whole, whole, 0, 0]


@pytest.mark.promise("hidden", "hosts")
def test_a_unit_leaves_once_its_last_rank_has_pushed_it_and_not_at_the_end_of_the_step(stack: ExitStack) -> None:
    spec = make_spec(2)
    place = Place(stack, [0, 0])
    ranks = place.start(spec)
    for rank in ranks:
        rank.fetch()
    ranks[0].push(gradients(spec, 0))
    time.sleep(0.2)
    assert place.sent() == 0
    ranks[1].push(gradients(spec, 1), [2])
    until(lambda: place.sent() >= 4 * spec.layout.units[2].numel)
    ranks[1].push(gradients(spec, 1), [1, 0])
    for norm in [rank.finish() for rank in ranks]:
        norm.result(WAIT)
    until(lambda: place.sent() >= 4 * elements(spec))
    assert place.sent() == 4 * elements(spec)


def test_more_pushes_than_planned_and_a_discard_after_the_norm(stack: ExitStack) -> None:
    found = []
    for host_push in ("never", "auto"):
        spec = make_spec(2, run=f"toy {host_push}", accumulation_steps=2)
        ranks = Place(stack, [0, 0], host_push=host_push).start(spec)
        for rank in ranks:
            rank.push(gradients(rank.spec, rank.rank))
            rank.push(gradients(rank.spec, rank.rank + 2))
        ranks[1].push(gradients(ranks[1].spec, 5), [1])  # once more than was planned
        norms = [rank.ask_norm() for rank in ranks]
        totals = [norm.result(WAIT).total for norm in norms]
        for discarded in [rank.discard() for rank in ranks]:
            discarded.result(WAIT)
        ranks[0].push(gradients(ranks[0].spec, 6), [2])
        norms = [rank.finish() for rank in ranks]
        totals += [norm.result(WAIT).total for norm in norms]
        found.append((totals, ranks[0].fetch()))
    assert found[0][0] == found[1][0]
    assert equal(found[0][1], found[1][1])


def test_a_rank_that_comes_back_pushes_again_and_its_sums_too(stack: ExitStack) -> None:
    found = []
    for dies in (False, True):
        place = Place(stack, [0, 0])
        spec = make_spec(2, run=f"toy {dies}")
        ranks = place.start(spec)
        everything(ranks, 0)
        for rank in ranks:
            rank.fetch()
        ranks[1].push(gradients(spec, 1), [2, 1, 0])
        ranks[0].push(gradients(spec, 0), [2, 1])
        if dies:
            again = place.store(0, life=1)
            assert again.attach(spec).step == 1
            ranks[0] = Rank(0, again, spec, step=1, attempt=1 << 16)
            ranks[0].push(gradients(spec, 0), [2, 1])
        ranks[0].push(gradients(spec, 0), [0])
        for norm in [rank.finish() for rank in ranks]:
            norm.result(WAIT)
        found.append(ranks[1].fetch())
    assert equal(*found)


@pytest.mark.spread(2)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_ranks_that_leave_one_after_the_other_leave_their_sums_to_the_door(
    stack: ExitStack, order: tuple[int, ...]
) -> None:
    """A rank of another host sees the step decided."""
    spec = make_spec(4)
    ranks = Place(stack, [0, 0, 0, 1]).start(spec)
    grads = [gradients(spec, 10 * rank) for rank in range(4)]
    ranks[3].push(grads[3])
    for index in order:
        ranks[index].push(grads[index])
        ranks[index].finish()  # nobody waits for the norm
        ranks[index].store.close()
    ranks[3].finish().result(WAIT)
    with started(inprocess(4, OWNERS), spec) as there:
        take_step(there, grads)
        assert equal(ranks[3].fetch(), there[3].fetch())


def test_ranks_that_disagree_are_refused_by_name(stack: ExitStack) -> None:
    spec = make_spec(2)
    place = Place(stack, [0, 0])
    place.store(0).attach(spec)
    place._options["host_push"] = "never"
    with pytest.raises(HandshakeError, match=r"rank 1 says .* alone\), others say \[0, 1\]; start every rank"):
        place.store(1).attach(spec)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"transport": "grpc"}, "host_push='always' needs memory that a host's ranks share, but transport is 'grpc'"),
        ({"wire_compression": "bf16"}, "host_push='always' cannot be used with wire_compression='bf16'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ZeroConfig(host_push="always", **settings)
    assert ZeroConfig(host_push="auto", **settings).pushes_for_host == "never"


def test_ranks_without_a_door_push_alone_and_say_so(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    place = Place(stack, [0, 0])
    place.directories[0] = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-")))
    ranks = place.start(make_spec(2))
    assert not any(map(summed, ranks))
    everything(ranks, 0)
    assert caplog.text.count("leave it rank by rank, because no optimizer shares memory with rank") == 2
    place._options["host_push"] = "always"
    with pytest.raises(UnsupportedError, match="adds up gradients on their host, but no optimizer shares memory"):
        place.store(0, life=1).attach(make_spec(2))


@pytest.mark.parametrize("where", ["add", "settled"])
def test_sums_that_cannot_be_made_end_the_run_by_name(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    ranks = Place(stack, [0, 0]).start(make_spec(2))
    monkeypatch.setattr(SummedRanks, where, lambda *_: 1 / 0)
    for rank in ranks:
        rank.push(gradients(rank.spec, rank.rank))
    for norm in [rank.finish() for rank in ranks]:
        with pytest.raises(StoreError, match="optimizer 2: ZeroDivisionError"):
            norm.result(WAIT)


def test_no_stream_is_opened_to_send_again_what_needs_not_go_any_more(stack: ExitStack) -> None:
    """Owners refuse an empty one: found by a rank that came back twice."""
    place = Place(stack, [0, 0])
    [rank, _] = place.start(make_spec(2))
    wire = rank.store.connection._ways.wires[0]  # type: ignore[attr-defined]
    channel = wire._link.channel()
    wire.push_again(channel, lambda: iter(()), 0, 1.0)
    assert sum(place.pushed()) == 0


def flipping(monkeypatch: pytest.MonkeyPatch, sums: set[int]) -> list[int]:
    """Change a bit in one chunk of some of the sums that are sent; returns the numbers of those that were."""
    struck: list[int] = []
    marked: dict[int, int] = {}  # sums by addresses of chunks
    contents, next_chunk, count = Sending.contents, Sent._next_chunk, itertools.count()

    def counted(part: Sending) -> Iterator[tuple[Shard, torch.Tensor]]:
        number = next(count)
        for shard, content in contents(part):
            if number in sums and number not in {*struck, *marked.values()} and content.nbytes > 500:
                marked[content.data_ptr()] = number
            yield shard, content

    def flipped(sent: Sent) -> list[memoryview]:
        head, payload = next_chunk(sent)
        number = marked.pop(np.frombuffer(payload, np.uint8).ctypes.data, None)
        if number is not None:
            struck.append(number)
            payload = memoryview(bytes(payload[:300]) + bytes([payload[300] ^ 4]) + bytes(payload[301:]))
        return [head, payload]

    monkeypatch.setattr(Sending, "contents", counted)
    monkeypatch.setattr(Sent, "_next_chunk", flipped)
    return struck


def test_bytes_that_are_sent_again_because_some_came_damaged_count_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(stack, [0, 0], host_push="never")
    spec = make_spec(2)
    [rank, _] = place.start(spec)
    pushes = []
    for unit in spec.layout.units:
        presence = pack_presence([True] * len(unit.slots))
        push = Contribution(step=0, attempt=0, rank=0, unit=unit.index, seq=0, presence=presence)
        shards = [shard for shard in SharedPlan.of(spec, OWNERS).shards_of(0) if shard.unit == unit.index]
        pushes.append(PushedUnit(unit=unit, shards=shards, contribution=push, values=torch.zeros(unit.numel)))
    wire = rank.store.connection._ways.wires[0]  # type: ignore[attr-defined]
    struck = flipping(monkeypatch, {len(pushes) - 1})
    wire.push_again(wire._link.channel(), lambda: iter(pushes), 0, WAIT)
    assert struck == [len(pushes) - 1]
    assert place.pushed() == [sum(4 * shard.numel for push in pushes for shard in push.shards), 0]


def test_sums_whose_links_are_cut_and_whose_bytes_are_damaged_are_sent_again(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(Place(stack, [0, 0]).start(make_spec(2)))
    proxies = stack.enter_context(over(Proxy))
    ranks = Place(stack, [0, 0]).start(make_spec(2, run="toy cut"))
    for proxy in proxies:
        proxy.cut_after(30_000, 20_000, 25_000)
    struck = flipping(monkeypatch, {1, 4, 6})
    assert equal(train(ranks), expected)
    assert struck == [1, 4, 6]
    assert all(len(proxy._cuts) < 3 for proxy in proxies)
