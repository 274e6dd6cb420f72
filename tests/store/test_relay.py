"""Parameters of owners elsewhere come once for a host, into memory that its ranks share."""

from __future__ import annotations

import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked, forked

from rayzero.concurrency.futures import settled
from rayzero.config import ZeroConfig
from rayzero.errors import ConfigError, MemoryPlanError
from rayzero.memory import planner
from rayzero.protocol.messages import COMPUTE, ModelSpec
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.rank.memory import relay_memory
from rayzero.store.rank.memory.relay_memory import RelayMemory
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.rank.remote import RemoteConnection
from rayzero.store.rank.transfers.host_fetches import HostFetches
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.shm.signals import available
from rayzero.telemetry.names import TRANSFER_BYTES
from rayzero.telemetry.recorder import MemoryRecorder

from .toy import WAIT, Rank, equal, make_spec, random_grads, start, take_step

pytestmark = pytest.mark.skipif(available() is not None, reason="no signals between processes here")

OWNERS = 2


class Place:
    """A host of ranks, whose owners are elsewhere."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-host-")))
        self.token, self._stack, self._options = secrets.token_hex(), stack, options
        self.recorders: list[MemoryRecorder] = []
        servers = []
        for owner in range(OWNERS):
            models = HostedModels(owner, OWNERS, share=None, threads=1)
            stack.callback(models.close)
            servers.append(stack.enter_context(serve_models(models, token=self.token)))
        self.addresses = [server.address for server in servers]
        for server in servers:
            server.connect_peers(self.addresses)

    def store(self, rank: int, life: int = 0) -> RankStore:
        recorder = MemoryRecorder()
        self.recorders.append(recorder)
        options = {"host_fetch": "auto", "stall_timeout": WAIT} | self._options
        connection = RemoteConnection(
            rank, self.addresses, token=self.token, share=self.directory, life=life, recorder=recorder, **options
        )
        store = RankStore(connection)
        self._stack.callback(store.close)
        return store

    def start(self, spec: ModelSpec) -> list[Rank]:
        return start([self.store(rank) for rank in range(spec.world_size)], spec)

    def fetched(self, transport: str) -> list[int]:
        """The bytes that each rank has fetched by a transport."""
        return [int(each.total(TRANSFER_BYTES, direction="fetch", transport=transport)) for each in self.recorders]

    def memory(self, spec: ModelSpec) -> RelayMemory:
        """What a further rank of this host joins."""
        plan = SharedPlan.of(spec, OWNERS)
        return RelayMemory.join(plan, range(len(spec.layout.shards)), self.token, 0, self.directory, patience_s=WAIT)

    @property
    def files(self) -> list[str]:
        return sorted(slab.header.facts.role for slab in list_slabs(self.directory) if slab.header is not None)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def model_bytes(spec: ModelSpec) -> int:
    return sum(unit.size_bytes for unit in spec.layout.units)


def step(ranks: list[Rank], seed: int) -> None:
    take_step(ranks, [random_grads(ranks[0].spec, 10 * seed + rank.rank) for rank in ranks])


@pytest.mark.promise("bounded", "hosts")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_crosses_the_network_does_not_depend_on_the_ranks_of_a_host(stack: ExitStack, world_size: int) -> None:
    place = Place(stack)
    spec = make_spec(world_size)
    ranks = place.start(spec)
    for number in range(3):
        step(ranks, number)
        found = [rank.fetch() for rank in ranks for _ in range(2)]
        assert all(equal(each, found[0]) for each in found)
    assert sum(place.fetched("grpc")) == 4 * model_bytes(spec), "each version once"
    assert place.fetched("host") == [3 * 3 * model_bytes(spec)] * world_size, "and for every use it is copied here"


def test_ranks_that_fetch_for_themselves_carry_it_each(stack: ExitStack) -> None:
    place = Place(stack, host_fetch="never")
    ranks = place.start(make_spec(2))
    step(ranks, 0)
    for rank in ranks:
        rank.fetch()
    assert place.fetched("grpc") == [2 * model_bytes(ranks[0].spec)] * 2, "both versions"
    assert place.files == []


def test_a_version_that_changes_nothing_is_not_fetched_again(stack: ExitStack) -> None:
    place = Place(stack)
    ranks = place.start(make_spec(2))
    step(ranks, 0)
    first = [rank.fetch() for rank in ranks]
    before = sum(place.fetched("grpc"))
    take_step(ranks, [{}, {}])
    again = [rank.fetch() for rank in ranks]
    assert all(equal(each, first[0]) for each in [*first, *again])
    assert sum(place.fetched("grpc")) == before


def test_ranks_map_one_memory_and_see_each_version_there(stack: ExitStack) -> None:
    place = Place(stack)
    spec = make_spec(2, shard_numel=4096)
    ranks = place.start(spec)
    layout = spec.layout.units[1]
    for number in range(3):
        step(ranks, number)
        for rank in ranks:
            rank.store.published(layout.index, rank.step).result(WAIT)
        mapped = [rank.store.mapped(layout.index) for rank in ranks]
        done, out = ranks[0].fetch_unit(layout.index)
        done.result(WAIT)
        for each in mapped:
            assert each is not None
            assert torch.equal(each, out)
    inodes = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "relayed" in line}
    assert len(inodes) == 1


def test_who_asks_for_a_version_hears_of_it_once_its_bytes_are_here(stack: ExitStack) -> None:
    """The notice alone is not enough: another rank may have claimed the bytes, and they come later."""
    place = Place(stack)
    spec = make_spec(2, shard_numel=4096)
    ranks = place.start(spec)
    other = place.memory(spec)
    stack.callback(other.close)
    step(ranks, 0)
    shards = spec.layout.shards_by_unit[1]
    while ranks[0].store._route(1).parts[0][0]._wire.content([shards[0]], 1) is None:  # type: ignore[attr-defined]
        time.sleep(0.01)
    assert other.claims.claim(shards[0].index, other.claims.look(shards[0].index), 1)
    asked = ranks[0].store.published(1, 1)
    time.sleep(0.5)
    assert not asked.done()
    other.claims.give_up(shards[0].index, 1)
    other.bell.ring()
    assert asked.result(WAIT) == 1


CLAIMER = """
import sys
from pathlib import Path
from store.toy import make_spec
from rayzero.store.rank.memory.relay_memory import RelayMemory
from rayzero.store.shm.shared_plan import SharedPlan
spec = make_spec(2)
memory = RelayMemory.join(SharedPlan.of(spec, 2), [], sys.argv[2], 0, Path(sys.argv[1]), patience_s=20.0)
for shard in spec.layout.shards:
    assert memory.claims.claim(shard.index, memory.claims.look(shard.index), 1)
    memory.tensor(shard.index).fill_(-1.0)
print("claimed", flush=True)
sys.stdin.read()
"""


def another_process(stack: ExitStack, place: Place) -> Forked:
    """A rank's process with a claim to every shard of version 1, all of them half written."""
    process = stack.enter_context(forked(CLAIMER, place.directory, place.token))
    assert process.said() == "claimed"
    return process


def test_the_claims_of_a_process_that_dies_are_void(stack: ExitStack) -> None:
    place = Place(stack)
    ranks = place.start(make_spec(2))
    step(ranks, 0)
    process = another_process(stack, place)
    asked = [rank.fetch_unit(unit.index) for rank in ranks for unit in rank.spec.layout.units]
    time.sleep(0.3)
    assert not any(done.done() for done, _ in asked), "a fetcher that lives is waited for"
    process.kill()
    before = sum(place.fetched("grpc"))
    for done, _ in asked:
        done.result(WAIT)
    found = [rank.fetch() for rank in ranks]
    assert equal(found[0], found[1])
    assert sum(place.fetched("grpc")) - before == model_bytes(ranks[0].spec)


def test_who_waits_for_a_fetcher_that_receives_nothing_fetches_for_itself(stack: ExitStack) -> None:
    """And leaves alone what that one may still write."""
    place = Place(stack)
    ranks = place.start(make_spec(2))
    step(ranks, 0)
    before = place.fetched("grpc")
    another_process(stack, place).send_signal(signal.SIGSTOP)
    found = [rank.fetch() for rank in ranks]
    assert equal(found[0], found[1])
    now = place.fetched("grpc")
    assert [b - a for a, b in zip(before, now, strict=True)] == [model_bytes(ranks[0].spec)] * 2
    memory = place.memory(ranks[0].spec)
    stack.callback(memory.close)
    assert all((memory.tensor(shard.index) == -1.0).all() for shard in ranks[0].spec.layout.shards)


def test_a_fetch_that_fails_gives_its_claims_back(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(stack)
    ranks = place.start(make_spec(2))
    step(ranks, 0)
    with monkeypatch.context() as broken:
        broken.setattr(RelayMemory, "tensor", lambda *_: 1 / 0)
        done, _ = ranks[0].fetch_unit(0)
        with pytest.raises(ZeroDivisionError):
            done.result(WAIT)
    found = [rank.fetch() for rank in ranks]
    assert equal(found[0], found[1])


@pytest.mark.parametrize("kind", [COMPUTE, "master"])
def test_what_comes_while_a_write_is_made_is_not_taken_for_what_was_written(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = Place(stack)
    ranks = place.start(make_spec(2))
    unit = ranks[0].spec.layout.units[0]
    begun: list[Any] = []
    with monkeypatch.context() as slow:
        slow.setattr(HostFetches, "_begin", lambda *args: begun.append(args))
        done, _ = ranks[0].fetch_unit(0, 0)
        deadline = time.monotonic() + WAIT
        while not begun and time.monotonic() < deadline:
            time.sleep(0.01)
        done.cancel()
    values = torch.arange(unit.numel, dtype=torch.float32)
    writes = [rank.store.write(0, 0, kind, values.clone()) for rank in ranks]
    old = torch.zeros(unit.numel)
    for fetches, wait, claim in begun:
        for shard in claim.shards:
            fetches.memory.tensor(shard.index).copy_(old[shard.start : shard.stop])
        fetches._fetched(wait, claim, settled(None))
    for write in writes:
        write.result(WAIT)
    for rank in ranks:
        done, out = rank.fetch_unit(0, 0)
        done.result(WAIT)
        assert torch.equal(out, values.to(unit.dtype))


@pytest.mark.parametrize("kind", [COMPUTE, "master"])
def test_what_was_written_is_in_the_mapped_memory_when_the_write_is_done(stack: ExitStack, kind: str) -> None:
    place = Place(stack)
    ranks = place.start(make_spec(2, shard_numel=4096))
    unit = ranks[0].spec.layout.units[1]
    for rank in ranks:
        rank.store.published(1, 0).result(WAIT)
    values = torch.arange(unit.numel, dtype=torch.float32)
    for write in [rank.store.write(1, 0, kind, values.clone()) for rank in ranks]:
        write.result(WAIT)
    for rank in ranks:
        mapped = rank.store.mapped(1)
        assert mapped is not None
        for slot in unit.slots:
            assert torch.equal(mapped[slot.start : slot.stop], values[slot.start : slot.stop])


# ---- the memory -------------------------------------------------------------------------------------------------


def test_whoever_leaves_last_removes_the_memory_and_a_later_life_finds_it(stack: ExitStack) -> None:
    place = Place(stack)
    ranks = place.start(make_spec(2))
    assert place.files == ["relay", "relayed"]
    ranks[0].store.close()  # which has made it
    assert place.files == ["relay", "relayed"]
    again = place.memory(ranks[0].spec)
    assert {shard.index for shard in ranks[0].spec.layout.shards if again.has(shard.index)}
    assert place.files == ["relay", "relayed"]
    again.close()
    ranks[1].store.close()
    assert place.files == []


def test_what_processes_that_are_dead_have_left_is_made_anew(stack: ExitStack) -> None:
    place = Place(stack)
    spec = make_spec(2)
    first = place.memory(spec)
    process = another_process(stack, place)
    first._fetchers.leave(first.number)  # as if this process had died: only the other one is left
    for slab in (first.control, *first.shards.slabs):
        slab.close(unlink=False)
    joined = place.memory(spec)
    assert joined.control.path == first.control.path
    joined._fetchers.leave(joined.number)
    joined.control.close(unlink=False)
    process.kill()
    process.wait()
    fresh = place.memory(spec)
    stack.callback(fresh.close)
    assert fresh.control.path != first.control.path
    assert place.files == ["relay", "relayed"]


def test_a_claim_of_the_dead_is_not_taken_for_one_of_who_has_joined_since(stack: ExitStack) -> None:
    place = Place(stack)
    one, other = place.memory(make_spec(2)), place.memory(make_spec(2))
    assert one.claims.claim(0, one.claims.look(0), 3)
    one._fetchers.leave(one.number)  # as if its process had died
    again = place.memory(make_spec(2))
    for each in (other, again):
        stack.callback(each.close)
    assert len({one.number, other.number, again.number}) == 3
    assert [other.is_dead(each.number) for each in (one, other, again)] == [True, False, False]
    seen = other.claims.look(0)
    assert again.claims.claim(0, seen, 3)
    assert not other.claims.claim(0, seen, 3)
    for slab in (one.control, *one.shards.slabs):
        slab.close(unlink=False)


def test_another_start_of_a_run_of_the_same_name_has_memory_of_its_own(stack: ExitStack) -> None:
    place = Place(stack)
    one = place.memory(make_spec(2))
    place.token = secrets.token_hex()
    other = place.memory(make_spec(2))
    for each in (one, other):
        stack.callback(each.close)
    assert one.control.path != other.control.path


def test_models_of_one_run_have_memories_of_their_own(stack: ExitStack) -> None:
    place = Place(stack)
    plan = SharedPlan.of(make_spec(2), OWNERS)
    paths = set()
    for model in (0, 1, 0):
        memory = RelayMemory.join(plan, [0], place.token, model, place.directory, patience_s=WAIT)
        stack.callback(memory.close)
        paths.add(memory.control.path)
    assert len(paths) == 2


def no_room(size: int, directory: Path, **_: Any) -> None:
    raise planner.no_room(size, directory, "too small")


def test_without_room_each_rank_fetches_for_itself_and_says_so(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay_memory, "check_shared", no_room)
    place = Place(stack)
    ranks = place.start(make_spec(2))
    step(ranks, 0)
    for rank in ranks:
        rank.fetch()
    assert place.fetched("grpc") == [2 * model_bytes(ranks[0].spec)] * 2, "both versions"
    said = [line for line in caplog.messages if "fetches parameters for itself, not once for its host" in line]
    assert len(said) == 2
    assert "shared memory needs" in said[0]


def test_without_room_always_is_refused_with_the_sum(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_memory, "check_shared", no_room)
    place = Place(stack, host_fetch="always")
    with pytest.raises(MemoryPlanError, match=r"shared memory needs .* but .* has .* free"):
        place.store(0).attach(make_spec(2))


# ---- the setting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "ranks", "comes_to"),
    [
        ({}, 2, "auto"),
        ({}, 1, "never"),
        ({"transport": "grpc"}, 2, "never"),
        ({"host_fetch": "never"}, 2, "never"),
        ({"host_fetch": "always"}, 1, "always"),
    ],
)
def test_where_a_host_fetches(settings: dict[str, Any], ranks: int, comes_to: str) -> None:
    assert ZeroConfig(**settings).fetches_for_host(ranks) == comes_to


def test_always_is_refused_by_name_where_it_cannot_be() -> None:
    says = "host_fetch='always' needs memory that a host's ranks share, but transport is 'grpc'"
    with pytest.raises(ConfigError, match=says):
        ZeroConfig(host_fetch="always", transport="grpc")
