"""torch.compile, whole or by block: the bits of the eager model, and graphs that are not made anew each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from forked import forked
from torch import nn
from torch._dynamo.utils import counters

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext

from .models import Net, fit, prepared_copy, same_bits, seeded, tight, tokens

# Dynamo reads .grad of non-leaf tensors, which warns.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def blocks(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("how", [whole, blocks])
@pytest.mark.parametrize("fits", [True, False], ids=["all up", "one ahead"])
def test_compiled_models_train_as_eager_ones(
    how: Callable[[nn.Module], nn.Module], fits: bool, alone: RankContext
) -> None:
    plain = seeded(Net)
    model = copy.deepcopy(plain)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    config = ZeroConfig() if fits else tight(model, prefetch_buffer_size=1)
    model, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    compiled, graphs = how(model), []
    for step in range(4):
        for m, o in ((plain, sgd), (compiled, optimizer)):
            fit(m, o, [step])
        graphs.append(counters["stats"]["unique_graphs"])
    assert same_bits(rayzero.full_state_dict(model), plain.state_dict())
    assert 0 < graphs[0] == graphs[-1]


def test_the_compiled_end_of_an_iteration_is_an_eager_one(alone: RankContext) -> None:
    """The optimizer's calls are outside of the graphs: the compiler read .grad of gradients that had left."""
    done = []
    for compiled in (False, True):
        model, optimizer = prepared_copy(seeded(Net), torch.optim.AdamW, lr=0.1)

        def end(optimizer: rayzero.ZeroOptimizer = optimizer) -> None:
            optimizer.clip_grad_value_(1e-3)
            optimizer.clip_grad_norm_(1e-2)
            optimizer.step()
            optimizer.zero_grad()

        act = torch.compile(end, backend="eager") if compiled else end
        for step in range(3):
            model(tokens(step)[0]).square().mean().backward()
            act()
        done.append((rayzero.full_state_dict(model), optimizer.state_dict()["state"][0]))
    (eager, state), (compiled_one, its_state) = done
    assert same_bits(eager, compiled_one)
    assert same_bits(state, its_state)


@pytest.mark.parametrize("call", ["step", "zero_grad", "state_dict"])
def test_a_call_of_the_optimizer_may_be_compiled_alone(call: str, alone: RankContext) -> None:
    model, optimizer = prepared_copy(seeded(Net), torch.optim.AdamW, lr=0.1)
    compiled = torch.compile(getattr(optimizer, call), backend="eager")
    for step in range(2):
        model(tokens(step)[0]).square().mean().backward()
        compiled()
        optimizer.zero_grad()
    assert optimizer.engine.version == (2 if call == "step" else 0)
    assert counters["stats"]["unique_graphs"] == 0


def test_the_first_call_of_a_model_may_be_compiled() -> None:
    """In a process of its own: here, other tests have called hooks."""
    code = """
        import torch, rayzero

        model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(2)])
        model, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.ones(1, 2)
        compiled = torch.compile(model, backend="eager")(x)
        print(torch.equal(compiled, model(x)))
        """
    with forked(code) as process:
        assert process.said() == "True"
