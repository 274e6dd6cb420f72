"""How much of the model is on the device at once: equations, refusals, and what happens to what users hold."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.engine import Engine
from rayzero.errors import ConfigError, MemoryPlanError
from rayzero.memory.pool import buffer_bytes
from rayzero.memory.process_memory import heap_use
from rayzero.telemetry.names import HEAP_BYTES, PINNED_UNITS
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.testing import run_ranks
from tests.support.waiting import until

from .models import WIDTH, Block, Net, fit, seeded, tight, token_loss, tokens


def prepared(model: nn.Module, config: ZeroConfig) -> tuple[nn.Module, rayzero.ZeroOptimizer, Engine]:
    model, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    return model, optimizer, optimizer.engine


def unit_bytes(engine: Engine, *, root: bool) -> list[int]:
    return [buffer_bytes(unit.size_bytes) for unit in engine.units if (unit.name == "root") is root]


def test_a_model_that_is_let_go_takes_its_engine_along() -> None:
    with running_in(RankContext()):
        model = Net()
        model, optimizer, engine = prepared(model, tight(model))
        fit(model, optimizer, range(3))
    seen = ref(engine)
    del model, optimizer, engine
    gc.collect()
    assert seen() is None


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_one_unit_the_prefetch_depth_and_the_root_are_enough_and_all_that_is_up(depth: int, alone: RankContext) -> None:
    base = seeded(lambda: Net(num_layers=8))
    model, optimizer, engine = prepared(
        base, tight(base, prefetch_buffer_size=max(depth, 1), async_prefetch=depth > 0, spare=0)
    )
    fit(model, optimizer, range(3))
    largest, root = max(unit_bytes(engine, root=False)), sum(unit_bytes(engine, root=True))
    # one computing + ``depth`` asked for or kept + the root, which is open throughout; 8 layers would be 8 x largest
    assert engine.residency.budget.peak == (1 + depth) * largest + root


def test_an_oversize_unit_is_let_through_alone(alone: RankContext) -> None:
    model = seeded(lambda: nn.Sequential(*[Block(WIDTH) for _ in range(3)]))
    model, optimizer, engine = prepared(model, ZeroConfig(gpu_param_memory_budget=1))
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert engine.residency.budget.peak == max(unit_bytes(engine, root=False))


def test_a_budget_that_cannot_hold_what_is_in_use_is_an_error_that_does_the_sum(alone: RankContext) -> None:
    model, _, _ = prepared(seeded(Net), ZeroConfig(gpu_param_memory_budget=20_000))
    with pytest.raises(MemoryPlanError, match=r"budget=20,000 bytes has no room for unit 'layers.0'.*root .*in use"):
        model(tokens(0)[0])


def test_units_that_must_stay_but_do_not_fit_are_refused_at_prepare(alone: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"offload_params=False.*gpu_param_memory_budget"):
        prepared(seeded(Net), ZeroConfig(offload_params=False, gpu_param_memory_budget=100_000))


@pytest.mark.usefixtures("memory")
def test_a_view_held_over_a_step_reads_the_new_weights(alone: RankContext) -> None:
    base = seeded(lambda: Net(num_layers=5))
    model, optimizer, _ = prepared(base, tight(base, prefetch_buffer_size=1))
    recorder = alone.recorder
    assert isinstance(recorder, MemoryRecorder)
    view = model.layers[1].up.weight.detach()[3:5]
    array = model.layers[2].down.bias.detach().numpy()
    fit(model, optimizer, range(2))
    state = rayzero.full_state_dict(model)
    assert torch.equal(view, state["layers.1.up.weight"][3:5])
    assert torch.equal(torch.from_numpy(array), state["layers.2.down.bias"])
    assert recorder.total(PINNED_UNITS, group="layers.1") == recorder.total(PINNED_UNITS, group="layers.2") == 2
    assert recorder.total(PINNED_UNITS) == 4
    del view, array
    fit(model, optimizer, range(1))
    assert recorder.total(PINNED_UNITS) == 4


@pytest.mark.usefixtures("memory")
def test_a_view_outlives_the_engine() -> None:
    def view_of_a_trained_model() -> tuple[Tensor, Tensor]:
        model, optimizer, _ = prepared(seeded(Net), tight(Net(), prefetch_buffer_size=1))
        fit(model, optimizer, range(1))
        return model.layers[0].up.weight.detach(), rayzero.full_state_dict(model)["layers.0.up.weight"]

    with rayzero.engine.running_in(RankContext()):
        view, expected = view_of_a_trained_model()
    assert torch.equal(view, expected)


@pytest.mark.usefixtures("memory")
def test_a_graph_kept_over_a_step_is_torchs_in_place_error_not_a_wrong_gradient(alone: RankContext) -> None:
    for config in (ZeroConfig(), tight(Net(), prefetch_buffer_size=1)):
        model, optimizer, _ = prepared(seeded(Net), config)
        loss = token_loss(model, tokens(0))
        fit(model, optimizer, range(1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---- between two steps ranks hold no gradients: those are in totals, or applied


def holds_nothing(context: RankContext) -> bool:
    """Whether a rank gives back all ranges without another backward."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)])
    adam = torch.optim.AdamW(model.parameters())
    model, optimizer = rayzero.prepare(model, adam, ZeroConfig(units=["Linear"]))
    model(torch.ones(2, 64)).sum().backward()
    region = optimizer.engine.store._pushes.region
    optimizer.step()
    until(lambda: not region.held())
    return True


def test_a_rank_gives_its_last_gradients_back_without_another_backward() -> None:
    assert run_ranks(holds_nothing, 2, 2, "shm") == [True, True]


# ---- the height of a rank's heap, and what a rank says before it gives its model away


MIB = 1 << 20


class Keeps(nn.Module):
    """Has 64 MiB alive from its forward to its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4 * MIB))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (values * self.weight).exp().sum()


def test_a_cpu_ranks_heap_at_its_height_is_told() -> None:
    recorder = MemoryRecorder()
    with running_in(RankContext(recorder=recorder)):
        model = Keeps()
        model, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        gc.collect()  # else what earlier tests left may go meanwhile
        before = heap_use()
        assert before is not None

        def peak_after(rows: int) -> float:
            model(torch.zeros(rows, 4 * MIB)).backward()  # exp keeps its result, the product its factor
            optimizer.step()
            optimizer.zero_grad()
            return recorder.gauge(HEAP_BYTES, kind="peak")

        peaks = [peak_after(rows) for rows in (4, 1, 4, 8)]
    assert 64 * MIB + 64 * MIB <= peaks[0] - before.used < 260 * MIB
    assert peaks[1:] == pytest.approx([peaks[0]] * 3, abs=32 * MIB), "only the first three steps are looked at"


@pytest.mark.parametrize(("tied", "meta"), [(False, False), (True, False), (False, True)])
def test_before_it_gives_its_model_away_a_rank_says_how_large_that_is_in_its_memory(tied: bool, meta: bool) -> None:
    told: list[int] = []
    with running_in(RankContext(handing_over=told.append)):
        with torch.device("meta" if meta else "cpu"):
            model = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
        if tied:
            model[1].weight = model[0].weight

        def init(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.ones_(module.weight)

        rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), init=init if meta else None)
    assert told == [0 if meta else 4 * 900 * (1 if tied else 2)]
