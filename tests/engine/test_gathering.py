"""Ranks of a host that bring units up together: the same bits, a part of the copies, and nobody waits for ever."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.concurrency.futures import settled
from rayzero.engine.context import RankContext
from rayzero.engine.units import gathering
from rayzero.engine.units.gathering import GatheringTransfers
from rayzero.engine.units.partition import build_layout
from rayzero.engine.units.residency import Residency
from rayzero.engine.units.unit_group import UnitGroup, part_of
from rayzero.errors import ConfigError, StallError, StoreError, UnsupportedError
from rayzero.lanes import ThreadLane
from rayzero.layout.model_layout import ALIGN
from rayzero.memory.pool import BufferPool
from rayzero.protocol.gathers import Stop
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.shm.same_host import why_no_sharing
from rayzero.telemetry.names import HOST_GATHER_BYTES
from rayzero.telemetry.recorder import MemoryRecorder, NullRecorder
from rayzero.testing import run_ranks

from .models import Net, same_bits, seeded, tight, token_loss, tokens

pytestmark = pytest.mark.skipif(why_no_sharing() is not None, reason="no shared memory here")

STEPS = 4
SOURCES = ("own", "ranks", "whole")
Result = tuple[dict[str, Tensor], dict[str, int]]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def bytes_of(ctx: RankContext) -> dict[str, int]:
    recorder = ctx.recorder
    assert isinstance(recorder, MemoryRecorder)
    return {source: int(recorder.total(HOST_GATHER_BYTES, source=source)) for source in SOURCES}


def train(ctx: RankContext, base: nn.Module) -> Result:
    model, optimizer = _prepared(base)
    for step in range(STEPS):
        token_loss(model, tokens(step, ctx.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return rayzero.full_state_dict(model), bytes_of(ctx)


def _prepared(base: nn.Module, config: ZeroConfig | None = None) -> tuple[Any, rayzero.ZeroOptimizer]:
    model = copy.deepcopy(base)
    return rayzero.prepare(model, adamw(model), config)


def run(base: nn.Module, ranks: int, *, loop: Callable[..., Result] = train, **settings: Any) -> list[Result]:
    config = tight(base, prefetch_buffer_size=1, **settings)
    return run_ranks(functools.partial(loop, base=base), ranks, 2, "shm", config=config)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for each other as long as a loaded machine takes, so that bytes are exact."""
    monkeypatch.setattr(gathering, "PATIENCE_S", 30.0)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No slab and no meeting place of these runs stays behind."""
    before = set(SHARED_MEMORY.glob("rayzero-run_ranks*"))
    yield
    left = set(SHARED_MEMORY.glob("rayzero-run_ranks*")) - before
    assert not {path for path in left if "gathers" in path.name}


# ---- the same bits, and whose bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_rank_copies_its_part_and_the_bits_are_those_of_whole_copies(
    ranks: int, precision: str, patient: None
) -> None:
    base = seeded(lambda: Net(num_layers=4))
    whole = run(base, ranks, precision=precision)
    gathered = run(base, ranks, precision=precision, host_gather=True)
    units = build_layout(base, compute_dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision]).layout.units
    assert any(unit.numel % (ranks * 64) for unit in units), "parts are not all of a unit"
    most = ranks * 64 * 4 * len(units) * (2 * STEPS + 2)  # what is left of each unit, in each of its fetches
    for (state, found), (expected, without) in zip(gathered, whole, strict=True):
        assert same_bits(state, expected)
        assert set(without.values()) == {0}
        all_bytes = found["own"] + found["ranks"] + found["whole"]
        small = sum(unit.size_bytes for unit in units if part_of(unit.numel, 0, ranks) == (0, 0))
        assert found["whole"] <= small * (2 * STEPS + 2), "only units without a part"
        assert found["ranks"] > 0.5 * all_bytes * (ranks - 1) / ranks
        assert abs(found["own"] - found["ranks"] / (ranks - 1)) <= most, "1/n of what is gathered"


def test_parts_are_equal_aligned_and_leave_fewer_than_64_elements_a_rank() -> None:
    for numel in (0, 64, 128, 192, 6400, 64 * 1001):
        for size in (2, 3, 7):
            parts = [part_of(numel, place, size) for place in range(size)]
            assert parts[0][0] == 0
            assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
            assert len({stop - start for start, stop in parts}) == 1
            assert all(stop % 64 == 0 for _, stop in parts)
            assert 0 <= numel - parts[-1][1] < 64 * size


# ---- ranks that differ ------------------------------------------------------------------------------------------


class Skips(Net):
    """A net whose rank may leave out blocks."""

    left_out: frozenset[int] = frozenset()

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for i, layer in enumerate(self.layers):
            x = x if i in self.left_out else layer(x)
        return self.head(self.norm(x))


def differing(ctx: RankContext, base: nn.Module) -> Result:
    model, optimizer = _prepared(base)
    for step in range(STEPS):
        if ctx.rank == 1:
            model.left_out = frozenset({step % 4, (step + 1) % 4})  # other blocks in every step
        token_loss(model, tokens(step, ctx.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return rayzero.full_state_dict(model), bytes_of(ctx)


def test_a_rank_that_runs_other_units_is_not_waited_for() -> None:
    base = seeded(lambda: Skips(num_layers=4))
    expected = run(base, 2, loop=differing)
    found = run(base, 2, loop=differing, host_gather=True)
    for (state, sizes), (wanted, _) in zip(found, expected, strict=True):
        assert same_bits(state, wanted)
        assert sizes["whole"] > 0, "what the other did not want"


def leaving(ctx: RankContext, base: nn.Module) -> Result:
    """Rank 1 reads the model once more than the others, alone."""
    model, optimizer = _prepared(base)
    token_loss(model, tokens(0, ctx.rank)).backward()
    optimizer.step()
    if ctx.rank == 1:
        with torch.no_grad():
            model(tokens(0)[0])
    return rayzero.full_state_dict(model), bytes_of(ctx)


def test_a_rank_that_evaluates_alone_copies_whole_units() -> None:
    base = seeded(lambda: Net(num_layers=3))
    expected, found = run(base, 2, loop=leaving), run(base, 2, loop=leaving, host_gather=True)
    for (state, _), (wanted, _) in zip(found, expected, strict=True):
        assert same_bits(state, wanted)
    assert found[1][1]["whole"] > 0


# ---- ranks that die, or do not come -----------------------------------------------------------------------------


def blocks() -> nn.Module:
    return seeded(lambda: Net(num_layers=4))


def dying(ctx: RankContext, folder: Path) -> Result:
    model, optimizer = _prepared(blocks())
    rayzero.track()
    while (step := ctx.step) < STEPS:
        loss = token_loss(model, tokens(step, ctx.rank))
        if (ctx.rank, ctx.life, step) == (1, 0, 1):
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return rayzero.full_state_dict(model), bytes_of(ctx)


def test_a_rank_that_is_killed_comes_back_and_its_host_copies_whole_units(tmp_path: Path) -> None:
    config = tight(blocks(), prefetch_buffer_size=1, host_gather=True)
    loop = functools.partial(dying, folder=tmp_path)
    (other, copied), (back, again) = run_ranks(loop, 2, 1, "shm", processes=True, config=config, max_failures=1)
    assert (tmp_path / "died").exists()
    expected = run(blocks(), 2)[0][0]
    assert same_bits(other, expected)
    assert same_bits(back, expected)
    model_bytes = sum(unit.size_bytes for unit in build_layout(blocks()).layout.units)
    assert copied["whole"] >= (STEPS - 2) * model_bytes, "in every step after the death"
    assert sum(again.values()) == 0, "a rank that has come back copies as without it"


class Alone:
    """Transfers of two ranks over gloo, whose agreement is a test's: see ``UnitGathers``."""

    def __init__(self, place: int, meeting: Path, stall_s: float) -> None:
        self.place, self.size, self.meeting, self.stall_s = place, 2, meeting, stall_s
        self.order: list[int] = []
        self.wanted: list[int] = []
        self.why: Stop | None = None
        self.agrees = True
        self.look: Callable[[], None] = lambda: None
        self.ended = threading.Event()

    def announce(self, unit: int, content: int) -> bool:
        self.wanted.append(unit)
        if self.agrees:
            self.order.append(unit)
        return True

    def withdraw(self, unit: int, *, in_vain: bool) -> bool:
        if unit in self.wanted and not self.agrees:
            self.wanted.remove(unit)
            return True
        return False

    def next(self) -> int | None:
        return self.order.pop(0) if self.order else None

    def issued(self) -> None:
        pass

    def behind(self) -> str:
        return "rank 1 (pid 4711)"

    def stop(self, why: Stop) -> None:
        self.why = self.why or why

    def stopped(self) -> str | None:
        return None if self.why is None else self.why.name

    @property
    def was_left(self) -> bool:
        return self.why is Stop.LEFT

    def listen(self, look: Callable[[], None]) -> None:
        def run() -> None:
            while not self.ended.wait(0.01):
                look()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.ended.set()
        self.thread.join()


class Parameters:
    """A store with one unit that every rank can map."""

    in_process = False

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def mapped(self, unit: int) -> Tensor:
        return self.values


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[list[UnitGroup]]:
    """Two ranks that are connected; their gathers take 2 s at most."""
    made: dict[int, UnitGroup] = {}

    def connect(place: int) -> None:
        made[place] = UnitGroup(torch.device("cpu"), place, 2, tmp_path / "meeting", 2.0)

    threads = [threading.Thread(target=connect, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not (tmp_path / "meeting").exists()
    yield [made[0], made[1]]
    for group in made.values():
        group.end()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.uint8], ids=str
)
def test_a_gather_moves_the_bytes_of_any_dtype(groups: list[UnitGroup], dtype: torch.dtype) -> None:
    """NaNs keep their bits, and a part ends where one of its dtype does."""
    expected = torch.randint(256, (2 * ALIGN * dtype.itemsize,), dtype=torch.uint8)
    wholes = [torch.zeros(2 * ALIGN, dtype=dtype) for _ in groups]
    for group, whole in zip(groups, wholes, strict=True):
        start, stop = part_of(whole.numel(), group.place, group.size)
        whole[start:stop] = expected.view(dtype)[start:stop]
    threads = [
        threading.Thread(target=group.gather, args=(whole,)) for group, whole in zip(groups, wholes, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for whole in wholes:
        assert torch.equal(whole.view(torch.uint8), expected)


class OneRank:
    """Rank 0's transfers, with a unit to fetch."""

    def __init__(self, group: UnitGroup, gathers: Alone, patience_s: float = 30.0) -> None:
        layout = build_layout(nn.Linear(64, 64, bias=False)).layout
        self.unit, self.gathers = layout.units[0], gathers
        self.values = torch.arange(self.unit.numel, dtype=torch.float32)
        self.residency = Residency(layout.units, budget=1 << 20, device=torch.device("cpu"), poison=False)
        self.transfers = GatheringTransfers(
            Parameters(self.values),  # type: ignore[arg-type]
            BufferPool(),
            ThreadLane(),
            {0: self.values},
            gathers=gathers,
            group=group,
            rank=0,
            recorder=NullRecorder(),
            patience_s=patience_s,
        )

    def fetch(self) -> Any:
        buffer = self.residency.acquire(0)
        assert buffer is not None
        buffer.flat.fill_(float("nan"))
        return self.transfers.fetch(self.unit, 0, buffer, published=settled(0), held=None, ahead=False)


def test_a_rank_that_agrees_and_does_not_come_ends_the_wait_by_name(groups: list[UnitGroup], tmp_path: Path) -> None:
    rank = OneRank(groups[0], Alone(0, tmp_path / "meeting", stall_s=1.0))
    fetching = rank.fetch()
    began = time.monotonic()
    with pytest.raises(StallError, match=r"rank 0 has waited 1 s for rank 1 \(pid 4711\) to come to the all-gather of"):
        fetching.wait()
    assert time.monotonic() - began < 10
    assert rank.gathers.why is Stop.STALLED
    rank.transfers.close()


def test_a_rank_that_leaves_in_a_gather_lets_the_other_copy_the_whole_unit(
    groups: list[UnitGroup], tmp_path: Path
) -> None:
    rank = OneRank(groups[0], Alone(0, tmp_path / "meeting", stall_s=60.0))
    fetching = rank.fetch()
    time.sleep(0.1)
    groups[1].end()
    fetching.wait()
    assert torch.equal(fetching.buffer.flat, rank.values)
    assert rank.gathers.why is Stop.FAILED
    assert rank.transfers._group._group is None, "and its own end tells further ranks"
    rank.transfers.close()


def test_a_rank_that_needs_a_unit_now_waits_a_little_and_one_that_prefetches_waits_on(
    groups: list[UnitGroup], tmp_path: Path
) -> None:
    gathers = Alone(0, tmp_path / "meeting", stall_s=60.0)
    gathers.agrees = False
    rank = OneRank(groups[0], gathers, patience_s=0.1)
    fetching = rank.fetch()
    time.sleep(0.3)
    assert not fetching.done.done(), "nobody needs it yet"
    fetching.wait()
    assert torch.equal(fetching.buffer.flat, rank.values)
    rank.transfers.close()


def test_a_fetch_that_is_dropped_before_it_is_agreed_writes_nothing(groups: list[UnitGroup], tmp_path: Path) -> None:
    gathers = Alone(0, tmp_path / "meeting", stall_s=60.0)
    gathers.agrees = False
    rank = OneRank(groups[0], gathers)
    fetching = rank.fetch()
    assert fetching.cancel()
    assert gathers.wanted == []
    assert fetching.done.done()
    assert fetching.buffer.flat.isnan().all()
    rank.transfers.close()


def test_the_end_of_the_gathering_lets_those_who_wait_copy_whole_units(groups: list[UnitGroup], tmp_path: Path) -> None:
    gathers = Alone(0, tmp_path / "meeting", stall_s=60.0)
    gathers.agrees = False
    rank = OneRank(groups[0], gathers)
    fetching = rank.fetch()
    gathers.stop(Stop.DIED)
    fetching.wait()
    assert torch.equal(fetching.buffer.flat, rank.values)
    rank.transfers.close()


def test_a_dead_rank_ends_the_gathers_of_all_others_also_where_it_is_no_neighbour(tmp_path: Path) -> None:
    made: dict[int, UnitGroup] = {}

    def one(place: int) -> None:
        group = made[place] = UnitGroup(torch.device("cpu"), place, 5, tmp_path / "meeting", 30.0)
        if place != 2:
            try:
                group.gather(torch.zeros(5 * 64))
            except RuntimeError:
                failed.append(place)
        group.end()

    failed: list[int] = []
    began = time.monotonic()
    threads = [threading.Thread(target=one, args=(place,)) for place in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(failed) == [0, 1, 3, 4]
    assert time.monotonic() - began < 20, "long before the 30 s of a gather"


# ---- where it cannot work ---------------------------------------------------------------------------------------


def test_settings_that_exclude_it_are_refused() -> None:
    with pytest.raises(ConfigError, match="host_gather=True needs memory that a host's ranks share, but transport"):
        ZeroConfig(host_gather=True, transport="grpc")


def test_owners_in_the_ranks_process_are_refused() -> None:
    base = seeded(lambda: Net(num_layers=1))
    with pytest.raises(UnsupportedError, match="these owners are in the ranks' own process"):
        run_ranks(functools.partial(train, base=base), 2, 1, config=ZeroConfig(host_gather=True))


def two_models(ctx: RankContext, base: nn.Module) -> None:
    _prepared(base)
    _prepared(base)


def test_a_second_model_is_refused() -> None:
    base = seeded(lambda: Net(num_layers=1))
    with pytest.raises(UnsupportedError, match="host_gather=True is for one prepared model, but this is number 2"):
        run_ranks(functools.partial(two_models, base=base), 2, 1, "shm", config=ZeroConfig(host_gather=True))


def test_a_torch_without_the_backend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(UnsupportedError, match="host_gather=True needs gloo for ranks on CPU"):
        UnitGroup(torch.device("cpu"), 0, 2, tmp_path / "meeting", 1.0)


def test_ranks_that_cannot_connect_say_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="the 2 ranks of this host could not connect to each other"):
        UnitGroup(torch.device("cpu"), 0, 2, tmp_path / "meeting", 0.5)


def test_a_rank_alone_copies_as_always(alone: RankContext) -> None:
    model, optimizer = _prepared(Net(num_layers=1), ZeroConfig(host_gather=True))
    assert model(tokens(0)[0]).isfinite().all()
    assert not isinstance(optimizer.engine.transfers, GatheringTransfers)
