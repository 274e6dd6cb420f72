"""Parameters of owners on other hosts come once for a host, into memory that an optimizer actor of it writes."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rayzero.codecs.changes import Change, apply_record, encode, to_record
from rayzero.codecs.record import LENGTH, used_bytes
from rayzero.concurrency.futures import Gather
from rayzero.errors import StateLostError, StoreError
from rayzero.followers.follower import Follower
from rayzero.followers.remote_shards import RemoteRun
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.layout.shard_map import Rescale
from rayzero.memory import planner
from rayzero.protocol.messages import COMPUTE, ModelSpec, Published
from rayzero.protocol.ownership import Ownership
from rayzero.security.credentials import follower_token
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.store.host import mirror_memory
from rayzero.store.host.mirror_memory import MirrorMemory
from rayzero.store.host.mirrors import Mirror
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.wire.rpc import CallTerms
from rayzero.telemetry.names import TRANSFER_BYTES
from tests.support import needs
from tests.support.waiting import until

from . import test_host_sums
from .deaths import Owners, differing, disturbed, train, undisturbed
from .stores import TOKEN, inprocess
from .test_succession import RANKS
from .toy import HYPER, WAIT, Rank, equal, make_spec, random_grads, start, take_step

pytestmark = needs.signals_between_processes

BF16 = (torch.bfloat16,) * 3
OWNERS = 3  # 0 is on the ranks' host


class Place(test_host_sums.Place):
    """A host of up to three ranks with owner 0. The others are on other hosts."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack, (0, 0, 0), (0, None, None), host_push="never")
        self.directory = self.directories[0]

    def fetched(self, transport: str) -> list[int]:
        """The bytes that each rank has fetched by a transport."""
        return [
            int(each.total(TRANSFER_BYTES, direction="fetch", transport=transport)) for each in self.recorders.values()
        ]

    @property
    def crossed(self) -> int:
        """The bytes that owner 0 has fetched for its host."""
        return int(self.of_doors[0].total(TRANSFER_BYTES, direction="fetch", transport="grpc"))

    @property
    def files(self) -> list[str]:
        found = (slab.header.facts.role for slab in list_slabs(self.directory) if slab.header is not None)
        return sorted(role for role in found if role.startswith("mirror"))


def away_bytes(spec: ModelSpec) -> int:
    """Of one version of what owners on other hosts publish."""
    plan = SharedPlan.of(spec, OWNERS)
    units = spec.layout.units
    shards = [shard for owner in range(1, OWNERS) for shard in plan.shards_of(owner)]
    return sum(shard.numel * units[shard.unit].dtype.itemsize for shard in shards)


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
    assert place.crossed == 4 * away_bytes(spec), "each version once"
    assert place.fetched("grpc") == [0] * world_size
    assert place.fetched("host") == [3 * 3 * away_bytes(spec)] * world_size, "and for every use it is copied here"


def test_a_version_that_changes_nothing_is_not_fetched_again(stack: ExitStack) -> None:
    place = Place(stack)
    ranks = place.start(make_spec(2))
    step(ranks, 0)
    first = [rank.fetch() for rank in ranks]
    before = place.crossed
    take_step(ranks, [{}, {}])
    again = [rank.fetch() for rank in ranks]
    assert all(equal(each, first[0]) for each in [*first, *again])
    assert place.crossed == before


def test_ranks_map_one_memory_and_see_each_version_there(stack: ExitStack) -> None:
    place = Place(stack)
    spec = make_spec(2, shard_numel=4096)
    ranks = place.start(spec)
    for number in range(3):
        step(ranks, number)
        for layout in spec.layout.units:
            for rank in ranks:
                rank.store.published(layout.index, rank.step).result(WAIT)
            done, out = ranks[0].fetch_unit(layout.index)
            done.result(WAIT)
            for rank in ranks:
                mapped = rank.store.mapped(layout.index)
                assert mapped is None or torch.equal(mapped, out)
    assert ranks[0].store.mapped(1) is not None
    inodes = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "mirrored" in line}
    assert len(inodes) == 1


@pytest.mark.parametrize("kind", [COMPUTE, "master"])
@pytest.mark.parametrize("mapped", [False, True])
def test_what_was_written_is_here_when_the_write_is_done(stack: ExitStack, kind: str, mapped: bool) -> None:
    place = Place(stack)
    ranks = place.start(make_spec(2, shard_numel=4096))
    for unit in ranks[0].spec.layout.units:
        ranks[0].store.published(unit.index, 0).result(WAIT)
    before = place.crossed
    for unit in ranks[0].spec.layout.units:
        values = torch.arange(unit.numel, dtype=torch.float32)
        if kind == COMPUTE:
            values = values.to(unit.dtype)
        for write in [rank.store.write(unit.index, 0, kind, values.clone()) for rank in ranks]:
            write.result(WAIT)
        for rank in ranks:
            out = rank.store.mapped(unit.index)
            if out is None or not mapped:
                done, out = rank.fetch_unit(unit.index, 0)
                done.result(WAIT)
            for slot in unit.slots:
                assert torch.equal(out[slot.start : slot.stop], values.to(unit.dtype)[slot.start : slot.stop])
    assert place.crossed - before == away_bytes(ranks[0].spec), "once, though each rank asks for it"


# ---- changes ----------------------------------------------------------------------------------------------------


def step_at(ranks: list[Rank], rate: float) -> dict[str, Tensor]:
    """A step at a learning rate; what every rank has after it."""
    spec, number = ranks[0].spec, ranks[0].step
    for rank in ranks:
        rank.push(random_grads(spec, 10 * number + rank.rank))
    for norm in [rank.finish(hyper=[{**options, "lr": rate} for options in spec.hyper]) for rank in ranks]:
        norm.result(WAIT)
    found = [rank.fetch() for rank in ranks]
    assert all(equal(each, found[0]) for each in found)
    return found[0]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The words that each shard's update has changed, of those that owners have packed."""
    found: list[int] = []

    def spied(values: Tensor, bitmap: Tensor | None) -> Any:
        made = encode(values, bitmap)
        found.append(made[2])
        return made

    monkeypatch.setattr("rayzero.owner.changes.encode", spied)
    return found


@pytest.mark.promise("exact", "hosts")
def test_what_versions_change_comes_where_it_is_smaller_and_no_bit_differs(stack: ExitStack, packed: list[int]) -> None:
    """A rate that changes little, one that changes nearly all, and the first again. An owner notes one update of ever
    more while that does not pay, and each as soon as it does."""
    spec, place = make_spec(2, dtypes=BF16, shard_numel=4096), Place(stack)
    ranks, alone = place.start(spec), start(stack.enter_context(inprocess(2, OWNERS)), spec)
    whole, sizes, counts = away_bytes(spec), list[int](), list[int]()
    for rate in [1e-6] * 6 + [1.0] * 12 + [1e-6] * 40:
        before, already = place.crossed, len(packed)
        assert equal(step_at(ranks, rate), step_at(alone, rate))
        sizes.append(place.crossed - before)
        counts.append(len(packed) - already)
    away = sum(len(SharedPlan.of(spec, OWNERS).shards_of(owner)) for owner in range(1, OWNERS))
    most = whole + LENGTH * away
    assert sizes[0] == most, "the first question"
    assert all(size < 0.2 * whole for size in sizes[3:6])
    assert sizes[7:18] == [most] * 11
    assert sum(counts[7:18]) < 4 * away, "of 11 updates, few are noted"
    assert sizes[18] > 0.2 * whole
    assert all(size < 0.2 * whole for size in sizes[-20:])


@pytest.mark.promise("exact", "hosts")
@pytest.mark.parametrize("owners", [(0, 1, 2), (None, None)], ids=["an owner on each", "owners on others"])
def test_doors_of_three_hosts_and_a_follower_get_what_each_version_changes(
    stack: ExitStack, owners: tuple[int | None, ...]
) -> None:
    """Each door asks on its own, and so does the follower: what one of them gets is no other's, nor used up by it."""
    spec, place = make_spec(3, dtypes=BF16, shard_numel=4096), test_host_sums.Place(stack, (0, 1, 2), owners)
    ranks, alone = place.start(spec), start(stack.enter_context(inprocess(3, len(owners))), spec)
    terms = CallTerms(token=follower_token(place.token))
    run = RemoteRun("toy", lambda: (place.addresses, terms))
    follower = stack.enter_context(Follower(run, None, lambda: True))
    plan, units = SharedPlan.of(spec, len(owners)), spec.layout.units
    bytes_of = [sum(s.numel * units[s.unit].dtype.itemsize for s in plan.shards_of(o)) for o in range(len(owners))]
    away = [sum(size for size, host in zip(bytes_of, owners, strict=True) if host != own) for own in range(3)]

    def crossed() -> list[int]:
        """Bytes that the door of each host has fetched."""
        return [
            int(place.of_doors[host].total(TRANSFER_BYTES, direction="fetch", transport="grpc")) for host in range(3)
        ]

    follower.read(0)
    for number, rate in enumerate([1e-4] * 3 + [1.0] * 2 + [1e-4] * 3, 1):
        before, had, wanted = crossed(), follower.stats().change_bytes, step_at(alone, rate)
        assert equal(step_at(ranks, rate), wanted)
        assert equal(dict(follower.read(number)), wanted)
        if rate < 1.0:
            came = [now - then for now, then in zip(crossed(), before, strict=True)]
            assert all(0 < size < 0.2 * whole for size, whole in zip(came, away, strict=True)), number
            assert 0 < follower.stats().change_bytes - had < 0.2 * sum(bytes_of)
    assert follower.stats().whole_bytes == sum(bytes_of), "the first version alone came whole"


@pytest.mark.parametrize("what", ["damaged", "of another version", "for other bytes"])
def test_a_change_that_does_not_fit_is_followed_by_the_shard(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    spec, place, spoilt = make_spec(1, dtypes=BF16), Place(stack), list[int]()

    def spoil(change: Change | None) -> bytes:
        made = bytearray(to_record(change))
        if change is not None and change.payload and len(spoilt) < 3:
            spoilt.append(change.after)
            made[{"damaged": -1, "of another version": 8}[what]] ^= 1
        return bytes(made)

    def apply_to_others(record: Tensor, before: int, after: int, values: Tensor) -> bool:
        if used_bytes(record) > LENGTH and len(spoilt) < 3:
            spoilt.append(after)
            values.view(torch.int16)[7] ^= 1
        return apply_record(record, before, after, values)

    if what == "for other bytes":
        monkeypatch.setattr("rayzero.store.host.transfer_calls.apply_record", apply_to_others)
    else:
        monkeypatch.setattr("rayzero.store.owner.handlers.to_record", spoil)
    ranks, alone = place.start(spec), start(stack.enter_context(inprocess(1, OWNERS)), spec)
    for _ in range(8):
        assert equal(step_at(ranks, 1e-5), step_at(alone, 1e-5))
    assert len(spoilt) == 3


# ---- deaths -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hosts(stack: ExitStack) -> tuple[Path, Path]:
    """The memory of the ranks' host, and of another one."""
    made = (tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix=f"test-{name}-") for name in ("host", "other"))
    here, other_host = (Path(stack.enter_context(each)) for each in made)
    return here, other_host


@pytest.mark.promise("recoverable", "hosts")
@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("comes", [{}, {"dtypes": BF16, "hyper": [{**HYPER, "lr": 1e-6}]}], ids=["whole", "as changes"])
def test_nothing_is_lost_with_the_owner_that_keeps_it_or_one_that_publishes(
    hosts: tuple[Path, Path], owner: int, seed: int, comes: dict[str, Any]
) -> None:
    here, other_host = hosts
    spec, draws = make_spec(RANKS, **comes), random.Random(seed)
    kills = [(step, draws.uniform(0.0, 0.02), owner) for step in (4, 8)]
    terms: dict[str, Any] = {"shares": (True,) * RANKS, "other_host": other_host}
    found = disturbed(here, spec, 11, train, kills, num_owners=OWNERS, **terms)
    assert not differing(spec, found, undisturbed(spec, 11, train))
    until(lambda: not [path for directory in hosts for path in directory.iterdir()], what="memory stays")


def test_what_its_predecessor_had_does_not_come_again_and_stays_mapped(hosts: tuple[Path, Path]) -> None:
    here, other_host = hosts
    spec, owners = make_spec(1, shard_numel=4096), Owners(here, OWNERS, other_host)
    connection = RemoteConnection(0, owners.addresses, RankTerms(token=TOKEN, share=here, outlives_owners=True))
    owners.stores.append(RankStore(connection))
    with closing(owners), closing(owners.stores[0]):
        ranks = start(owners.stores, spec)
        for unit in spec.layout.units:
            ranks[0].store.published(unit.index, 0).result(WAIT)
        mapped = ranks[0].store.mapped(1)
        assert mapped is not None
        files = sorted(path.name for path in here.glob("*mirror*"))
        owners.kill(0)
        for number in range(2):
            step(ranks, number)
            done, out = ranks[0].fetch_unit(1)
            done.result(WAIT)
            assert torch.equal(mapped, out), "the successor writes into the same memory"
        assert sorted(path.name for path in here.glob("*mirror*")) == files


def test_a_successor_that_cannot_go_on_with_it_is_the_end(hosts: tuple[Path, Path]) -> None:
    here, other_host = hosts
    spec, owners = make_spec(1), Owners(here, OWNERS, other_host)
    connection = RemoteConnection(0, owners.addresses, RankTerms(token=TOKEN, share=here, outlives_owners=True))
    owners.stores.append(RankStore(connection))
    with closing(owners), closing(owners.stores[0]):
        ranks = start(owners.stores, spec)
        ranks[0].fetch()
        for path in here.glob("*mirror*"):
            path.unlink()
        owners.kill(0)
        with pytest.raises(StateLostError, match="does not go on with the copy of other hosts' parameters"):
            ranks[0].store.published(0, 1).result(WAIT)


# ---- the memory -------------------------------------------------------------------------------------------------


def test_nothing_is_left_once_the_owner_has_stopped(stack: ExitStack) -> None:
    place = Place(stack)
    ranks = place.start(make_spec(2))
    assert place.files == ["mirror", "mirrored"]
    for rank in ranks:
        rank.store.close()
    assert place.files == ["mirror", "mirrored"], "a rank that comes back finds it"
    for server in place.servers:
        server.stop()
    assert place.files == []


def test_only_what_is_copied_takes_memory(stack: ExitStack) -> None:
    place = Place(stack)
    spec = make_spec(1, shard_numel=4096)
    place.start(spec)
    (shards,) = place.directory.glob("*mirrored*")
    held, page = shards.stat().st_blocks * 512, 4096
    plan = SharedPlan.of(spec, OWNERS)
    pages = {
        at // page
        for owner in range(1, OWNERS)
        for shard in plan.shards_of(owner)
        for place in [plan.params_of(spec.layout.shards).places[shard.index]]
        for at in range(place.offset, place.offset + place.bytes)
    }
    assert held == page * len(pages | {0}), "and the header"


def no_room(size: int, directory: Path, **_: Any) -> None:
    raise planner.no_room(size, directory, "too small")


def test_without_room_each_rank_fetches_for_itself_and_says_so(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror_memory, "check_shared", no_room)
    place = Place(stack)
    ranks = place.start(make_spec(2))
    step(ranks, 0)
    for rank in ranks:
        rank.fetch()
    assert place.fetched("grpc") == [2 * away_bytes(ranks[0].spec)] * 2, "both versions"
    said = [line for line in caplog.messages if "fetches parameters for itself, not once for its host" in line]
    assert len(said) == 2
    assert "shared memory needs" in said[0]


def test_another_start_of_a_run_and_another_model_have_memory_of_their_own(stack: ExitStack) -> None:
    place = Place(stack)
    plan = SharedPlan.of(make_spec(2), OWNERS)
    memories = [
        MirrorMemory.open(plan, plan.shards_of(1), key, model, place.directory)
        for key, model in (("one", 0), ("one", 1), ("another", 0))
    ]
    assert len({memory.offer().control for memory in memories}) == 3
    for memory in memories:
        memory.close(unlink=True)


def test_what_was_not_kept_all_the_time_is_fetched_again(stack: ExitStack) -> None:
    """A write changes bytes within a version, and is brought to what is kept."""
    place = Place(stack)
    one, later = SharedPlan.of(make_spec(2), OWNERS), Ownership(OWNERS)
    for _ in range(2):
        later = later.then(Rescale.to(OWNERS + 1 - later.epoch, later.num_owners))
    both, first = one.spec.layout.shards[:2], one.spec.layout.shards[:1]

    def left(plan: SharedPlan, copied: Sequence[Shard]) -> set[int]:
        memory = MirrorMemory.open(plan, copied, "key", 0, place.directory)
        found = set(memory.former)
        for shard in copied:
            memory.show(Published(shard.index, 3, 3))
        memory.close(unlink=False)
        return found

    assert left(one, both) == set()
    assert left(one, both) == {0, 1}
    assert left(one, first) == {0, 1} - {1}
    assert left(one, both) == {0}
    assert left(SharedPlan.of(one.spec, OWNERS, later), both) == set(), "an epoch has passed without a copy"


def test_memory_of_an_earlier_start_of_the_run_is_removed(stack: ExitStack) -> None:
    place = Place(stack)
    plan = SharedPlan.of(make_spec(2), OWNERS)
    for key in ("one", "another"):
        MirrorMemory.open(plan, plan.shards_of(1), key, 0, place.directory).close(unlink=False)
    assert place.files == ["mirror", "mirrored"]


def test_memory_that_another_process_still_writes_is_not_taken(stack: ExitStack) -> None:
    place = Place(stack)
    plan = SharedPlan.of(make_spec(2), OWNERS)
    first = MirrorMemory.open(plan, plan.shards_of(1), "key", 0, place.directory)
    with pytest.raises(StoreError, match="cannot be taken over: the process that made it still runs"):
        MirrorMemory.open(plan, plan.shards_of(1), "key", 0, place.directory)
    first.close(unlink=True)


# ---- in every order -----------------------------------------------------------------------------------------------

SPEC = make_spec(1, dtypes=BF16)
SHARDS = SPEC.layout.shards[:2]


class Lines:
    """The memory of a mirror: two shards of one element, and their lines."""

    def __init__(self) -> None:
        self.former: dict[int, Published] = {}
        self.bytes = {shard.index: -1 for shard in SHARDS}

    def show(self, published: Published) -> None:
        self.former[published.shard] = published

    def forget(self, shard: Shard) -> None:
        self.former.pop(shard.index, None)

    def tensor(self, shard: Shard) -> Tensor:
        raise AssertionError("no bytes move in this test")


class Owner:
    """What an owner has, and what has been asked of it. A value is the number of its last change."""

    def __init__(self) -> None:
        self.values = {shard.index: 0 for shard in SHARDS}
        self.published = {shard.index: Published(shard.index, 0, 0) for shard in SHARDS}
        self.changes = 0
        self.before = dict.fromkeys(self.values, -1)  # the content before the newest one
        self.made = {(shard.index, 0): 0 for shard in SHARDS}  # the values of each content, the newest ones
        self.asked: list[tuple[list[Shard], int, Gather, dict[int, int], int | None]] = []

    def fetch_kept(
        self, gather: Gather, unit: UnitLayout, shards: Sequence[Shard], version: int, place: Any, since: int | None
    ) -> None:
        found = {shard.index: self.values[shard.index] for shard in shards}  # read at the earliest: the worst case
        self.asked.append((list(shards), version, gather, found, since))


@pytest.mark.parametrize("seed", range(30))
def test_what_a_line_shows_is_what_its_bytes_are_in_every_order(seed: int) -> None:
    """A step at a time: the owner publishes or skips once the host has read, or the user writes; notices and bytes
    arrive late, one by one; fetches fail, and the process that keeps the copy dies."""
    draws = random.Random(seed)
    owner, lines = Owner(), Lines()
    rung: list[bool] = []

    def begin() -> Mirror:
        return Mirror(SHARDS, SPEC.layout.units, cast(Any, lines), cast(Any, owner), lambda: rung.append(True))

    mirror, notices = begin(), [list(owner.published.values())]
    brought: Future[None] | None = None
    written = changed = 0

    def whole() -> bool:
        return all(lines.former.get(s.index) == owner.published[s.index] for s in SHARDS) and brought is None

    for _ in range(400):
        for shard in SHARDS:
            shown, now = lines.former.get(shard.index), owner.published[shard.index]
            if shown == now and (brought is None or brought.done()):
                assert lines.bytes[shard.index] == owner.values[shard.index]
        move = draws.choice(("owner", "notice", "bytes", "bytes", "fail", "die"))
        unread = brought is None and draws.random() < 0.1  # a step in which this host's ranks do not use the unit
        if move == "owner" and (whole() or unread):
            version = owner.published[SHARDS[0].index].version
            what = draws.choice(("step", "skip", "write") if whole() else ("step", "skip"))
            if what == "write":
                written += 1
                owner.changes += 1
                owner.values = dict.fromkeys(owner.values, owner.changes)
                owner.made |= {(s.index, owner.published[s.index].content): owner.changes for s in SHARDS}
                brought = mirror.bring(SHARDS[0].unit)
                continue
            for shard in SHARDS:
                content = owner.published[shard.index].content
                if what == "step":
                    owner.changes += 1
                    owner.values[shard.index] = owner.changes
                    owner.before[shard.index], content = content, version + 1
                    owner.made[shard.index, content] = owner.changes
                owner.published[shard.index] = Published(shard.index, version + 1, content)
                notices.append([owner.published[shard.index]])
        elif move == "notice" and notices:
            mirror.hear(notices.pop(0))
        elif move == "bytes" and owner.asked:
            shards, version, gather, found, since = owner.asked.pop(draws.randrange(len(owner.asked)))
            if any(owner.published[shard.index].version > version for shard in shards):
                gather.end(StoreError(f"v{version} is gone"))
                continue
            for shard in shards:
                if since is not None and since == owner.before[shard.index]:  # else the owner sends it whole
                    changed += 1
                    assert lines.bytes[shard.index] in (owner.made[shard.index, since], found[shard.index])
            lines.bytes.update(found)
            gather.end(None)
            assert rung.pop()
        elif move == "fail" and owner.asked and draws.random() < 0.3:
            _, _, gather, found, _ = owner.asked.pop()
            lines.bytes.update(draws.sample(sorted(found.items()), 1))  # some had come
            gather.end(StoreError("a fetch failed"))
            notices.append(list(owner.published.values()))  # over the next link
        elif move == "die" and draws.random() < 0.1:
            owner.asked = []
            mirror, notices = begin(), [list(owner.published.values())]
            if brought is not None and not brought.done():
                brought = mirror.bring(SHARDS[0].unit)  # it had no answer, so the rank asks again
        if brought is not None and brought.done():
            brought.result()
            assert all(lines.bytes[shard.index] == owner.values[shard.index] for shard in SHARDS)
            brought = None
    assert owner.changes > 3
    assert written
    assert changed
    while notices or owner.asked:  # nothing is waited for in vain
        if notices:
            mirror.hear(notices.pop(0))
        else:
            shards, version, gather, *_ = owner.asked.pop(0)
            gone = any(owner.published[shard.index].version > version for shard in shards)
            lines.bytes.update({} if gone else {shard.index: owner.values[shard.index] for shard in shards})
            gather.end(StoreError("gone") if gone else None)
    assert {shard.index: lines.former[shard.index] for shard in SHARDS} == owner.published
    assert lines.bytes == owner.values
