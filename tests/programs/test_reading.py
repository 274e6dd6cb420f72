"""Reading: what a loop reads of a model between steps is complete, or an error that names what to call instead."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.models import VOCAB, WIDTH, Block, token_loss
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from .case import Case, Program, Run, train
from .engines import Setting


class Chain(nn.Module):
    """A model that can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)) * self.scale.to(self.head.weight.dtype))


def after_a_step(read: Callable[[nn.Module], Any]) -> Program:
    """Train, read, train on."""

    def program(run: Run) -> Any:
        train(run)
        seen = read(run.model)
        train(run)
        return seen

    return program


def values(model: nn.Module) -> list[Any]:
    weight, bias = model.layers[1].up.weight, model.layers[1].up.bias
    with torch.no_grad():
        return [
            weight.norm(),
            weight.data.clone(),
            weight[3, 5].clone(),
            bias.tolist(),
            bias[0].item(),
            weight.float().std(),
        ]


def one_by_one(model: nn.Module) -> list[float]:
    return [float(param.detach().float().square().sum()) for param in model.parameters()]


def gradients(run: Run) -> Any:
    token_loss(run.model, run.batch(0)).backward()
    return [param.grad.norm() for param in run.model.parameters()]


def torchs_clip(run: Run) -> Any:
    token_loss(run.model, run.batch(0)).backward()
    return nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)


def gradients_after_step(run: Run) -> Any:
    token_loss(run.model, run.batch(0)).backward()
    run.optimizer.step()
    return [param.grad.norm() for param in run.model.parameters()]


def names_and_shapes(model: nn.Module) -> list[Any]:
    return [
        [(name, list(param.shape), param.numel(), param.requires_grad) for name, param in model.named_parameters()],
        [(name, list(value.shape)) for name, value in model.state_dict().items()],
        [name for name, _ in model.named_buffers()],
        sum(param.numel() for param in model.parameters()),
    ]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def copies(clone: Callable[[nn.Module], nn.Module]) -> Program:
    """A copy is a plain model, which trains on its own."""

    def program(run: Run) -> Any:
        train(run)
        twin = clone(run.model)
        logits = twin(run.batch(5)[0])
        logits.float().square().mean().backward()
        grads = {name: param.grad.clone() for name, param in twin.named_parameters()}
        train(run)
        return [state(twin), grads, type(twin.head.weight).__name__]

    return program


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def described(model: nn.Module) -> list[str]:
    return [repr(model), repr(model.layers[0].norm), repr(model.layers[1].norm.bias.detach())]


def summary(run: Run) -> list[Any]:
    """What summaries do: hooks on every module, sizes of outputs and of parameters."""
    lines: list[Any] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        own = list(module.parameters(recurse=False))
        lines.append((type(module).__name__, list(output.shape), sum(p.numel() for p in own)))

    handles = [module.register_forward_hook(note) for module in run.model.modules()]
    with torch.no_grad():
        run.model(run.batch(0)[0])
    for handle in handles:
        handle.remove()
    train(run)
    return lines


def kept_views(run: Run) -> list[Tensor]:
    """A view of a weight that is held over the step reads the new one."""
    data = run.model.layers[1].up.weight.detach()
    row = run.model.layers[1].up.weight.data[3]
    train(run)
    return [data.clone(), row.clone()]


def all_in_place(run: Run) -> list[Any]:
    train(run)
    with run.full_parameters():
        seen = [param.detach().clone() for param in run.model.parameters()]
    train(run)
    return seen


def full_state_between(run: Run) -> Any:
    seen = []
    for step in range(2):
        token_loss(run.model, run.batch(step)).backward()
        seen.append(run.full_state())
        run.update()
    return seen


FITS = {"gpu_param_memory_budget": 1 << 20}
TOO_SMALL = {"gpu_param_memory_budget": 96 << 10}

CASES = [
    Case("values of single parameters", after_a_step(values), build=Chain),
    Case("every parameter in turn", after_a_step(one_by_one), build=Chain),
    Case(
        "all parameters in one vector",
        after_a_step(lambda m: parameters_to_vector(m.parameters()).detach()),
        build=Chain,
        settings=FITS,
    ),
    Case(
        "all parameters in one vector, beyond the budget",
        after_a_step(lambda model: parameters_to_vector(model.parameters()).detach()),
        build=Chain,
        settings=TOO_SMALL,
        refused="gpu_param_memory_budget=98,304 bytes has no room for unit .* set it to at least",
    ),
    Case("full_parameters", all_in_place, build=Chain, settings=FITS),
    Case("the full state between backward and step", full_state_between, build=Chain),
    Case("views kept over the step", kept_views, build=Chain, spare=1),
    Case(
        "gradients", gradients, build=Chain, refused=r"gradient of 'embed.weight' has left this rank .*clip_grad_norm_"
    ),
    Case(
        "torch's clip_grad_norm_", torchs_clip, build=Chain, refused=r"has left this rank .* optimizer.clip_grad_norm_"
    ),
    Case(
        "gradients between step() and zero_grad()",
        gradients_after_step,
        build=Chain,
        refused=r"gradient of 'embed.weight' has left this rank .* cannot be read",
    ),
    Case("names and shapes", after_a_step(names_and_shapes), build=Chain),
    Case("state_dict", after_a_step(state), build=Chain),
    Case("deepcopy", copies(copy.deepcopy), build=Chain),
    Case("pickle", copies(lambda model: pickle.loads(pickle.dumps(model))), build=Chain),
    Case("torch.save and load", copies(saved_and_loaded), build=Chain),
    Case("repr", after_a_step(described), build=Chain),
    Case("summary", summary, build=Chain),
]


@pytest.mark.spread(7)
def test_trains_as_unsharded(case: Case, setting: Setting, check: Callable[[Case, Setting], None]) -> None:
    check(case, setting)
