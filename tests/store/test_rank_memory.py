"""What one rank has in common with its host, for every kind of neighbour: without a link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from rayzero.errors import EpochOverError, MemoryPlanError, StoreClosedError
from rayzero.protocol.messages import Contribution, SharedPaths
from rayzero.store.host.waits import PublishBoard
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.rank import rank_memory
from rayzero.store.rank.rank_memory import RankMemory
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.shm.signals import available

from .toy import WAIT, make_spec

pytestmark = pytest.mark.skipif(available() is not None, reason="no memory that ranks share here")

OWNERS = 2
SPEC = make_spec(world_size=4, shard_numel=1024)
PLAN = SharedPlan.of(SPEC, OWNERS)
UNITS = SPEC.layout.units
CLOSED = StoreClosedError("closed")

Make = Callable[..., RankMemory]


@pytest.fixture
def stack(slab_dir: Path) -> Iterator[ExitStack]:
    """Ends before ``slab_dir`` does."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def make(stack: ExitStack, slab_dir: Path) -> Make:
    def made(rank: int = 0, **how: Any) -> RankMemory:
        said = {"life": 0, "key": "a secret", "ranks": (0, 1), "keeps_pushed": True}
        said |= {"host_push": "never", "directory": slab_dir} | how
        found = RankMemory(rank, said.pop("directory"), **said)
        stack.callback(found.close, CLOSED)
        return found

    return made


def joined(memory: RankMemory, offers: dict[int, SharedPaths], board: PublishBoard | None = None) -> RankMemory:
    """``memory`` after all that happens at attach."""
    away = [owner for owner in range(OWNERS) if owner not in offers]
    if memory.may_sum:
        memory.choose_sums(PLAN, list(offers))
    memory.meet(PLAN, offers, away, None)
    memory.open(PLAN, away, board or PublishBoard(), None)
    return memory


def owner_of(stack: ExitStack, directory: Path, owner: int) -> SharedPaths:
    """What an owner in this process offers."""
    models = HostedModels(owner, OWNERS, share=directory)
    stack.callback(models.close)
    hosted = models[0]
    hosted.service.attach(0, SPEC, own_gradients=True)
    assert hosted.shared is not None
    return hosted.shared.offer()


# ---- whose gradients are added up


@pytest.mark.parametrize(
    ("rank", "how", "summed"),
    [
        (1, {"host_push": "always"}, (0, 1)),
        (1, {"host_push": "auto"}, (0, 1)),
        (1, {"host_push": "never"}, ()),
        (1, {"host_push": "always", "directory": None}, ()),
        (1, {"host_push": "always", "ranks": (1,)}, ()),
        (2, {"host_push": "always", "ranks": (0, 2)}, ()),  # a gap
        (1, {"host_push": "auto", "room": 4096}, ()),
        (1, {"host_push": "always", "room": 4096}, (0, 1)),  # it fails when it takes the memory, with the sum
    ],
)
def test_whose_gradients_leave_as_one_sum(
    rank: int, how: dict[str, Any], summed: tuple[int, ...], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = how.pop("room", 1 << 40)
    monkeypatch.setattr(rank_memory, "_size_of", lambda _: room)
    memory = make(rank, **how)
    if memory.may_sum:
        memory.choose_sums(PLAN, [0])
    assert memory.summed == summed


def test_what_the_host_keeps_of_parameters_needs_room_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, parameters = 2 * PLAN.gradient_bytes(pooled=False), sum(unit.size_bytes for unit in UNITS)
    for room, summed in ((gradients + parameters, (0, 1)), (gradients + parameters - 1, ())):
        monkeypatch.setattr(rank_memory, "_size_of", lambda _, room=room: room)
        memory = make(host_push="auto")
        memory.choose_sums(PLAN, [0])
        assert memory.summed == summed


# ---- what there is


ELSEWHERE: tuple[int, ...] = ()
ALL = {"shared", "windows", "gradients"}


@pytest.mark.parametrize(
    ("here", "how", "there"),
    [
        (ELSEWHERE, {"directory": None}, {"gradients"}),
        (ELSEWHERE, {"directory": None, "keeps_pushed": False}, set()),
        (ELSEWHERE, {}, {"shared", "gradients"}),
        (ELSEWHERE, {"keeps_pushed": False}, set()),
        ((0,), {"keeps_pushed": False}, ALL),
        ((0,), {"host_push": "always"}, ALL),
        ((0, 1), {}, ALL),
    ],
)
def test_what_a_rank_has_depends_on_its_neighbours(
    here: Sequence[int], how: dict[str, Any], there: set[str], make: Make, stack: ExitStack, slab_dir: Path
) -> None:
    memory = joined(make(**how), {owner: owner_of(stack, slab_dir, owner) for owner in here})
    assert {name for name in ALL if getattr(memory, name) is not None} == there
    assert memory.shares == bool(here)
    if "windows" in there:
        assert memory.windows is not None
        whole = {unit.index for unit in UNITS if memory.windows.tensor(unit.index) is not None}
        assert whole == shown(here)


def test_where_no_owner_is_and_no_room_a_rank_keeps_what_it_pushes_in_memory_of_its_own(
    make: Make, stack: ExitStack, slab_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offers = {0: owner_of(stack, slab_dir, 0)}
    full = MemoryPlanError("/dev/shm is too small")
    monkeypatch.setattr("rayzero.store.rank.shared_memory.check_shared", lambda *_: raised(full))
    memory = joined(make(), {})
    assert (memory.shared, memory.gradients is not None, memory.left(PLAN, 4)) == (None, True, None)
    assert "rank 0 keeps what it pushes in memory that dies with it: /dev/shm is too small" in caplog.text
    with pytest.raises(MemoryPlanError, match="/dev/shm is too small"):
        joined(make(), offers)


def raised(error: Exception) -> NoReturn:
    raise error


def shown(here: Sequence[int]) -> set[int]:
    """The units all of whose shards owners of the host have."""
    away = {shard.unit for owner in range(OWNERS) if owner not in here for shard in PLAN.shards_of(owner)}
    return {unit.index for unit in UNITS if unit.index not in away}


# ---- other owners


def test_gradients_and_windows_go_on_with_other_owners(make: Make, stack: ExitStack, slab_dir: Path) -> None:
    """Owner 1, whose memory the rank had, is elsewhere by now."""
    offers = {owner: owner_of(stack, slab_dir, owner) for owner in range(OWNERS)}
    memory = joined(make(), offers)
    assert memory.windows is not None
    assert memory.shared is not None
    gradients, windows = memory.gradients, memory.windows
    assert {unit.index for unit in UNITS if windows.tensor(unit.index) is not None} == shown((0, 1))
    asked = memory.shared.ask_lead("GetDecision", b"")
    assert asked is not None
    memory.enter(PLAN, {0: offers[0]}, [1], PublishBoard())
    memory.enter_windows([1])
    assert (memory.gradients is gradients, memory.windows is windows, memory.shares) == (True, True, True)
    assert {unit.index for unit in UNITS if windows.tensor(unit.index) is not None} == shown((0,))
    with pytest.raises(EpochOverError, match="the lead was another one before"):
        asked.result(WAIT)


# ---- a former life


def push(memory: RankMemory, step: int) -> None:
    assert memory.gradients is not None
    assert memory.shared is not None
    for unit in UNITS:
        full = b"\xff" * ((len(unit.slots) + 7) // 8)
        contribution = Contribution(step=step, attempt=0, rank=0, unit=unit.index, seq=0, presence=full)
        pushed = memory.gradients.put(contribution, torch.full((unit.numel,), float(step + 1)))
        memory.shared.announce(unit.index, pushed)


def died(memory: RankMemory) -> None:
    """Leave its slabs, as if its process were killed."""
    assert memory.shared is not None
    for slab in (memory.shared._control, *memory.shared._gradients.slabs):
        slab.close(unlink=False)


@pytest.mark.parametrize("here", [(), (0,)])
@pytest.mark.parametrize(("step", "keeps_pushed", "is_left"), [(4, True, True), (3, True, False), (4, False, False)])
def test_a_rank_finds_what_its_former_life_has_pushed(
    step: int, keeps_pushed: bool, is_left: bool, here: Sequence[int], make: Make, stack: ExitStack, slab_dir: Path
) -> None:
    """Also where no owner is on its host."""
    offers = {owner: owner_of(stack, slab_dir, owner) for owner in here}
    before = joined(make(), offers)
    push(before, 4)
    died(before)
    now = joined(make(life=1, keeps_pushed=keeps_pushed), offers)
    left = now.left(PLAN, step)
    if left is None:
        assert keeps_pushed, "nobody needs what it does not keep"
        assert not is_left
        return
    assert [(unit, pushed.step) for unit, pushed in left.pushed] == [(unit.index, 4) for unit in UNITS] * is_left
    for unit, pushed in left.pushed:
        values = left.memory.at(unit, pushed.place)
        assert values is not None
        assert values.max() == 5


def test_what_is_part_of_sums_is_not_sent_again(make: Make, stack: ExitStack, slab_dir: Path) -> None:
    """The door finds it in the memory that the former life has left."""
    offers = {0: owner_of(stack, slab_dir, 0)}
    before = joined(make(host_push="always"), offers)
    push(before, 4)
    died(before)
    left = joined(make(life=1, host_push="always"), offers).left(PLAN, 4)
    assert left is not None
    assert left.pushed == ()


def test_a_rank_that_shares_nothing_has_left_nothing(make: Make) -> None:
    assert joined(make(directory=None), {}).left(PLAN, 0) is None
    assert make(directory=None).identity == ""
    assert make().identity == make(1).identity != ""
