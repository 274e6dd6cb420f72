"""OffloadManager: the bits of the plain loop over prepare(), in either form, whatever is freed or reset on the way."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero import OffloadManager, ZeroConfig
from rayzero.engine.context import RankContext, get_context
from rayzero.engine.units.param_unit import UnitState
from rayzero.errors import ConfigError, GradientAccessError, UnsupportedError
from rayzero.layout.shard_map import RankMapping
from rayzero.memory.process_memory import process_memory
from rayzero.testing import run_ranks
from tests.support.leftovers import threads, threads_left

from .models import Net, prepared_copy, same_bits, seeded, tight, token_loss, tokens

STEPS = 5
adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
Precision = Literal["fp32", "bf16"]


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


def plain(base: nn.Module, config: ZeroConfig, rank: int = 0, rates: tuple[float, ...] = ()) -> dict[str, Tensor]:
    """The plain loop."""
    model, optimizer = prepared_copy(base, adamw, config)
    for step in range(STEPS):
        token_loss(model, tokens(step, rank)).backward()
        for group in optimizer.param_groups:
            group["lr"] = rates[step] if rates else group["lr"]
        optimizer.step()
        optimizer.zero_grad()
    return rayzero.full_state_dict(model)


def managed(
    base: nn.Module,
    config: ZeroConfig,
    rank: int = 0,
    between: Callable[[OffloadManager], object] = lambda _: None,
    context: RankContext | None = None,
) -> dict[str, Tensor]:
    """The same through a manager; ``between`` acts after every call."""
    with OffloadManager(config, context, copy.deepcopy(base), adamw) as manager:
        for step in range(STEPS):
            inputs, targets = tokens(step, rank)
            output = manager.forward_pass(inputs)
            between(manager)
            manager.backward_pass(loss_of(output, targets))
            between(manager)
            manager.optimizer_step()
            between(manager)
        return rayzero.full_state_dict(manager.model)


CONFIGS: dict[str, Callable[[Precision], ZeroConfig]] = {
    "all up": lambda precision: ZeroConfig(precision=precision),
    "tight": lambda precision: tight(Net(), precision=precision),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("budget", CONFIGS)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_manager_alone_has_the_bits_of_the_plain_loop(
    precision: Precision, budget: str, debug: str, alone: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYZERO_DEBUG", debug)
    base, config = seeded(Net), CONFIGS[budget](precision)
    expected = plain(base, config)
    assert same_bits(managed(base, config), expected)
    assert same_bits(managed(base, config, between=OffloadManager.force_memory_optimization), expected)
    assert same_bits(managed(base, config, between=OffloadManager.reset_state), expected)
    assert not same_bits(expected, base.state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_managers_of_two_ranks_have_the_bits_of_the_plain_loops(precision: Precision) -> None:
    base, config = seeded(Net), tight(Net(), precision=precision)
    expected = run_ranks(lambda ctx: plain(base, config, ctx.rank), 2, 2)

    def run(ctx: RankContext) -> dict[str, Tensor]:
        return managed(base, config, ctx.rank, OffloadManager.adapt_performance, ctx if ctx.rank else None)

    found = run_ranks(run, 2, 2)
    assert same_bits(found[0], expected[0])
    assert same_bits(found[1], expected[0])


def test_the_async_form_has_the_same_bits_and_leaves_the_loop_free(alone: RankContext) -> None:
    base, config = seeded(Net), tight(Net())
    expected = plain(base, config)
    threads = set()

    async def train(manager: OffloadManager) -> dict[str, Tensor]:
        manager.model.layers[0].register_forward_hook(lambda *_: threads.add(threading.current_thread().name))
        for step in range(STEPS):
            inputs, targets = tokens(step)
            output = await manager.forward_pass_async(inputs)
            await manager.backward_pass_async(loss_of(output, targets))
            await manager.optimizer_step_async()
            await manager.force_memory_optimization_async()
            await manager.adapt_performance_async()
        assert (await manager.get_performance_stats_async()).steps.count == STEPS
        assert (await manager.get_memory_stats_async()).parameters > 0
        assert (await manager.get_prefetch_status_async()).limit == 16
        await manager.reset_state_async()
        assert (await manager.get_performance_stats_async()).steps.count == 0
        return rayzero.full_state_dict(manager.model)

    with OffloadManager(config, None, copy.deepcopy(base), adamw) as manager:
        assert same_bits(asyncio.run(train(manager)), expected)
    assert len(threads) == 1
    assert threads.pop().startswith("rayzero-manager")


def test_async_calls_run_in_the_order_of_their_making_and_plain_ones_wait_to_be_told(manager: OffloadManager) -> None:
    order: list[str] = []
    enter, go = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        enter.set()
        assert go.wait(30)
        order.append("forward")

    async def both() -> None:
        hook = manager.model.layers[0].register_forward_hook(slow)
        first = asyncio.create_task(manager.forward_pass_async(tokens(0)[0]))
        second = asyncio.create_task(manager.get_memory_stats_async())
        second.add_done_callback(lambda _: order.append("stats"))
        while not enter.is_set():
            await asyncio.sleep(0.01)  # the event loop goes on meanwhile
        with pytest.raises(UnsupportedError, match="still running; await it first"):
            manager.get_prefetch_status()
        go.set()
        await asyncio.gather(first, second)
        hook.remove()

    asyncio.run(both())
    assert order == ["forward", "stats"]
    assert manager.get_prefetch_status().depth == 16  # nothing runs any more


def test_a_twin_keeps_the_callers_grad_mode_and_raises_its_errors(manager: OffloadManager) -> None:
    async def evaluate() -> Tensor:
        with torch.no_grad():
            return await manager.forward_pass_async(tokens(0)[0])

    assert not asyncio.run(evaluate()).requires_grad
    with pytest.raises(GradientAccessError, match="before forward_pass"):
        asyncio.run(manager.backward_pass_async(torch.zeros(())))


@pytest.fixture
def manager(alone: RankContext, full_depth: None) -> Iterator[OffloadManager]:
    with OffloadManager(None, None, seeded(Net)) as made:
        yield made


def test_the_gradient_of_the_output_does_what_the_loss_does(alone: RankContext) -> None:
    base, states = seeded(Net), []
    for by_gradient in (False, True):
        with OffloadManager(None, None, copy.deepcopy(base), adamw) as manager:
            inputs, targets = tokens(0)
            output = manager.forward_pass(inputs)
            loss = loss_of(output, targets)
            if by_gradient:
                (grad,) = torch.autograd.grad(loss, output)
                manager.backward_pass(grad)
            else:
                manager.backward_pass(loss)
            manager.optimizer_step()
            states.append(rayzero.full_state_dict(manager.model))
    assert same_bits(*states)


def test_gradients_of_several_forwards_add_up_until_the_step(alone: RankContext) -> None:
    base = seeded(Net)
    config = ZeroConfig(gradient_accumulation_steps=2)
    with OffloadManager(config, None, copy.deepcopy(base), adamw) as manager:
        for step in range(2):
            inputs, targets = tokens(step)
            manager.backward_pass(loss_of(manager.forward_pass(inputs), targets) / 2)
        manager.optimizer_step()
        found = rayzero.full_state_dict(manager.model)
    with OffloadManager(None, None, copy.deepcopy(base), adamw) as manager:
        first, second = (loss_of(manager.forward_pass(tokens(step)[0]), tokens(step)[1]) for step in range(2))
        manager.backward_pass(first / 2 + second / 2)  # two forwards, one backward
        manager.optimizer_step()
        both = rayzero.full_state_dict(manager.model)
    for name, value in found.items():
        assert torch.allclose(value, both[name], atol=1e-6)


def test_a_rate_given_to_the_step_holds_from_then_on(alone: RankContext) -> None:
    base = seeded(Net)
    expected = plain(base, ZeroConfig(), rates=(0.1, 0.1, 0.01, 0.01, 0.01))
    with OffloadManager(None, None, copy.deepcopy(base), adamw) as manager:
        for step in range(STEPS):
            inputs, targets = tokens(step)
            manager.backward_pass(loss_of(manager.forward_pass(inputs), targets))
            manager.optimizer_step({0: 0.1, 2: 0.01}.get(step))
        assert same_bits(rayzero.full_state_dict(manager.model), expected)
        manager.backward_pass(loss_of(manager.forward_pass(tokens(0)[0]), tokens(0)[1]))
        with pytest.raises(ConfigError, match="lr must be a finite number >= 0, got -1"):
            manager.optimizer_step(-1)


def test_clipping_and_checkpoints_take_the_managers_optimizer(alone: RankContext, tmp_path: Path) -> None:
    base, states = seeded(Net), []
    for resumed in (False, True):
        resume = tmp_path / "step" if resumed else None
        with OffloadManager(None, None, copy.deepcopy(base), adamw, resume=resume) as manager:
            for step in range(1 if resumed else 0, 2):
                inputs, targets = tokens(step)
                manager.backward_pass(loss_of(manager.forward_pass(inputs), targets))
                assert manager.optimizer.clip_grad_norm_(0.5) > 0.5
                manager.optimizer_step()
                if not resumed and step == 0:
                    rayzero.save_checkpoint(manager.optimizer, tmp_path / "step", {})
            states.append(rayzero.full_state_dict(manager.model))
    assert same_bits(*states)


def test_the_optimizer_is_adamw_or_the_one_given(alone: RankContext) -> None:
    assert OffloadManager(None, None, Net(), lr=0.5).optimizer.make.cls is torch.optim.AdamW
    assert OffloadManager(None, None, Net(), lr=0.5).optimizer.param_groups[0]["lr"] == 0.5
    model = Net()
    given = OffloadManager(None, None, model, torch.optim.SGD(model.parameters(), lr=0.25)).optimizer
    assert (given.make.cls, given.param_groups[0]["lr"]) == (torch.optim.SGD, 0.25)
    with pytest.raises(ConfigError, match="give it to the optimizer instead"):
        OffloadManager(None, None, Net(), adamw, lr=0.5)


def forward(manager: OffloadManager) -> Tensor:
    inputs, targets = tokens(0)
    return loss_of(manager.forward_pass(inputs), targets)


def test_calls_in_the_wrong_order_are_one_line_each(manager: OffloadManager) -> None:
    with pytest.raises(GradientAccessError) as early:
        manager.backward_pass(torch.zeros(()))
    with pytest.raises(UnsupportedError) as stepless:
        manager.optimizer_step()
    loss = forward(manager)
    manager.backward_pass(loss)
    with pytest.raises(GradientAccessError) as again:
        manager.backward_pass(loss * 2)
    manager.optimizer_step()
    with pytest.raises(UnsupportedError) as twice:
        manager.optimizer_step()
    with torch.no_grad():
        forward(manager)
    with pytest.raises(GradientAccessError, match="run a forward with grad first"):
        manager.backward_pass(torch.zeros(()))
    said = [str(error.value) for error in (early, stepless, again, twice)]
    assert all("\n" not in line for line in said)
    assert "called again for a forward that has had its backward" in said[2]
    assert said[1] == said[3] == "optimizer_step() was called without a backward_pass() since the last step"


def test_a_gradient_that_fits_no_output_is_refused(manager: OffloadManager) -> None:
    output = manager.forward_pass(tokens(0)[0])
    with pytest.raises(ConfigError, match=r"gradient of shape \(2,\) for an output of \(4, 8, 32\)"):
        manager.backward_pass(torch.zeros(2))
    with pytest.raises(ConfigError, match="takes a loss or a gradient, got float"):
        manager.backward_pass(0.5)
    manager.backward_pass(torch.ones_like(output))
    with OffloadManager(None, None, Pair()) as two:
        output, _ = two.forward_pass(torch.ones(2, 4))
        with pytest.raises(ConfigError, match="the last output is a tuple; pass the loss instead"):
            two.backward_pass(torch.ones(2, 4))
        two.backward_pass(output.sum())


def test_a_loss_that_is_no_scalar_is_refused_and_leaves_the_step_as_it_was(manager: OffloadManager) -> None:
    loss = forward(manager)
    with pytest.raises(ConfigError, match=r"a loss of shape \(2,\), but a loss is one number; take its mean or sum"):
        manager.backward_pass(torch.stack([loss, loss]))
    manager.backward_pass(loss)
    manager.optimizer_step()


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("a fault in the middle of backward")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("budget", CONFIGS)
def test_a_backward_that_fails_in_its_middle_discards_the_step(
    precision: Precision, budget: str, alone: RankContext
) -> None:
    """What it had pushed would be added to the gradients of the next try."""
    base, config = seeded(Net), CONFIGS[budget](precision)
    expected = plain(base, config)
    with OffloadManager(config, None, copy.deepcopy(base), adamw) as manager:
        for step in range(STEPS):
            inputs, targets = tokens(step)
            if step in (0, 2):
                broken = manager.model.layers[0].register_forward_hook(lambda *call: Fails.apply(call[2]))
                loss = loss_of(manager.forward_pass(inputs), targets)
                broken.remove()
                with pytest.raises(ArithmeticError, match="in the middle of backward"):
                    manager.backward_pass(loss)
                with pytest.raises(UnsupportedError, match="without a backward_pass"):
                    manager.optimizer_step()
            manager.backward_pass(loss_of(manager.forward_pass(inputs), targets))
            manager.optimizer_step()
        assert same_bits(rayzero.full_state_dict(manager.model), expected)


class Pair(nn.Module):
    """Returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


def test_a_closed_manager_refuses_every_call(alone: RankContext) -> None:
    manager = OffloadManager(None, None, seeded(Net))
    manager.close()
    manager.close()
    others = ("close", "num_tokens")
    calls = [name for name in vars(OffloadManager) if not name.startswith("_") and name not in others]
    assert len(calls) == 18
    for name in calls:
        arguments = (torch.zeros(()),) if name.startswith(("forward", "backward")) else ()
        call = partial(getattr(manager, name), *arguments)
        with pytest.raises(UnsupportedError, match="was closed"):
            asyncio.run(call()) if name.endswith("_async") else call()
    assert get_context() is alone


def test_a_manager_in_a_run_leaves_its_ranks_context_to_the_run() -> None:
    base = seeded(Net)

    def run(ctx: RankContext) -> tuple[bool, int]:
        with OffloadManager(None, RankMapping(ctx.rank, 2), copy.deepcopy(base)) as manager:
            mine = manager.context is ctx
        return mine, ctx.rank

    assert run_ranks(run, 2, 1) == [(True, 0), (True, 1)]


def test_a_rank_mapping_that_is_not_the_runs_is_refused(alone: RankContext) -> None:
    said = "got rank 1 of 4, but this loop runs as rank 0 of 1"
    with pytest.raises(ConfigError, match=said):
        OffloadManager(None, RankMapping(1, 4), Net())


# ---- memory and prefetch ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("full_depth")
def test_freeing_gives_back_what_it_says(alone: RankContext) -> None:
    """In debug mode a rank has buffers of its own, as on CUDA or over gRPC."""
    base = seeded(lambda: Net(num_layers=4, width=512))
    with OffloadManager(None, None, base) as manager:
        with torch.no_grad():
            manager.forward_pass(tokens(0)[0])
        memory = manager.get_memory_stats()
        assert memory.device_parameters == memory.parameters
        before = process_memory().rss
        freed = manager.force_memory_optimization()
        after = manager.get_memory_stats()
        assert set(freed) == {"garbage", "units", "buffers", "malloc"}
        assert freed["units"].bytes == memory.gathered_peak
        assert freed["buffers"].bytes == memory.device_bytes >= memory.gathered_peak > 16 << 20
        assert before - process_memory().rss > 0.8 * memory.device_bytes
        assert (after.device_bytes, after.device_parameters) == (0, 0)
        assert all(one.seconds >= 0 and one.count == 1 for one in freed.values())
        again = manager.force_memory_optimization()
        assert (again["units"].bytes, again["buffers"].bytes) == (0, 0)
        total = manager.get_performance_stats().strategy.freed["buffers"]
        assert (total.count, total.bytes) == (2, freed["buffers"].bytes)


def test_freed_memory_that_malloc_keeps_goes_back_to_the_kernel(manager: OffloadManager) -> None:
    blocks = [bytearray(16 << 10) for _ in range(4096)]
    above = bytearray(16 << 10)  # without it malloc would give the end of its heap back by itself
    del blocks
    freed = manager.force_memory_optimization()
    assert freed["malloc"].bytes > 32 << 20
    assert len(above) == 16 << 10


def test_units_that_a_graph_needs_stay_where_handles_do_not_protect_them(manager: OffloadManager) -> None:
    """A model that stays up has no handles: autograd saved the very Parameters."""
    loss = forward(manager)
    assert manager.optimizer.engine.resident
    manager.force_memory_optimization()
    manager.backward_pass(loss)
    manager.optimizer_step()
    manager.force_memory_optimization()
    assert all(unit.state is UnitState.SHARDED for unit in manager.optimizer.engine.units)


def test_a_graph_made_without_the_manager_is_respected_too(manager: OffloadManager) -> None:
    loss = token_loss(manager.model, tokens(0))
    manager.force_memory_optimization()
    loss.backward()
    part = manager.model.layers[0](torch.ones(2, 64)).sum()
    manager.reset_state()
    part.backward()


@pytest.mark.usefixtures("full_depth")
def test_adapting_follows_the_pressure_of_now(alone: RankContext) -> None:
    config = ZeroConfig(cpu_memory_budget=64 << 20, max_cpu_memory_mb=64, auto_memory_management="balanced")
    with OffloadManager(config, None, seeded(Net)) as manager:
        found = manager.adapt_performance()  # this process has more than 64 MiB: full pressure, half of the depth
        assert (found.pressure, found.depth_before, found.depth_allowed, found.depth) == (1.0, 16, 8, 8)
        assert found.link_to_device > 1e8
        assert found.link_to_host > 1e8
        status, strategy = manager.get_prefetch_status(), manager.get_performance_stats().strategy
        assert (status.depth, status.limit, strategy.depth_allowed) == (8, 16, 8)
        assert (strategy.pressure, strategy.pressure_peak, strategy.threshold) == (1.0, 1.0, 0.75)
        assert strategy.readings == 1
        assert manager.adapt_performance().link_to_device == found.link_to_device, "measured once"
        assert manager.get_performance_stats().strategy.readings == 2, "not the one of a moment ago"
        manager.backward_pass(forward(manager))
        assert manager.get_performance_stats().to_host.limit_share > 0


def test_a_reset_forgets_the_order_of_use_and_counts_but_no_weight(alone: RankContext) -> None:
    with OffloadManager(tight(Net()), None, seeded(Net)) as manager:
        for _ in range(2):
            manager.backward_pass(forward(manager))
            manager.optimizer_step()
        before = rayzero.full_state_dict(manager.model)
        manager.reset_state()
        found, cache = manager.get_performance_stats(), manager.optimizer.engine.cache
        assert (found.forwards, found.backwards, found.steps.count, found.prefetch.hits) == (0, 0, 0, 0)
        assert (found.tokens.tokens, found.tokens.peak, found.memory.device_bytes) == (0, None, 0)
        assert found.prefetch.depth == 16
        assert cache.schedule.first(4) == tuple(range(4))
        assert found.version == 2
        assert same_bits(rayzero.full_state_dict(manager.model), before)


class Counting(OffloadManager):
    """Counts tokens in a way of its own."""

    def __init__(self, count: Callable[[Tensor], Any]) -> None:
        super().__init__(None, None, Pair())
        self._count = count

    def num_tokens(self, x: Tensor) -> Any:
        return self._count(x)


def test_tokens_are_the_ids_of_the_inputs_or_what_a_subclass_counts(manager: OffloadManager) -> None:
    inputs = tokens(0)[0]
    for _ in range(2):
        manager.backward_pass(manager.forward_pass(inputs).sum())
        manager.optimizer_step()
    assert manager.get_performance_stats().tokens.tokens == 2 * inputs.numel()
    with OffloadManager(None, None, Pair()) as floats:
        floats.backward_pass(floats.forward_pass(x=torch.ones(2, 4))[0].sum())
        floats.optimizer_step()
        assert floats.get_performance_stats().tokens.tokens == 0
    with Counting(lambda x: len(x)) as counted:
        counted.backward_pass(counted.forward_pass(x=torch.ones(2, 4))[0].sum())
        counted.optimizer_step()
        assert counted.get_performance_stats().tokens.tokens == 2


@pytest.mark.parametrize("count", [None, "many", 2.5, -1, math.nan])
def test_a_count_of_tokens_that_is_none_is_refused_before_the_forward(count: Any, alone: RankContext) -> None:
    with Counting(lambda x: count) as manager:
        with pytest.raises(ConfigError, match=r"num_tokens\(\) must return a whole number >= 0, got "):
            manager.forward_pass(torch.ones(2, 4))
        assert manager.get_performance_stats().forwards == 0


def test_what_a_manager_cannot_be_made_of_is_refused_in_a_line(alone: RankContext) -> None:
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        ("model must be a torch.nn.Module, got NoneType", (None, None, None)),
        ("context must be a RankContext, a RankMapping or None, got int", (None, 0, Pair())),
        (
            "optimizer must be a torch.optim.Optimizer, a function that makes one .* got str",
            (None, None, Pair(), "adam"),
        ),
        ("ReLU has no parameters to train", (None, None, nn.ReLU())),
    ]
    for said, arguments in wrong:
        with pytest.raises(ConfigError, match=said) as found:
            OffloadManager(*arguments)
        assert "\n" not in str(found.value)


def test_a_manager_that_cannot_be_made_leaves_no_thread(alone: RankContext) -> None:
    before, model = threads(), Pair()
    with pytest.raises(UnsupportedError, match="LBFGS cannot run on shards"):
        OffloadManager(None, None, model, torch.optim.LBFGS)
    assert threads_left(before) == []
    OffloadManager(None, None, model).close()
