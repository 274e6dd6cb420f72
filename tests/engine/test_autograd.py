"""Programs that use autograd in many ways give the weights plain torch gives, bit for bit.

Each program runs two steps on a plain model and on a prepared one, where everything stays up and where units come and
go, prefetched or not. Buffers swapped out are NaN throughout.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext

from .models import VOCAB, WIDTH, Block, Net, same_bits, seeded, tight, token_loss, tokens

RESIDENCIES: dict[str, Callable[[nn.Module], ZeroConfig]] = {
    "all up": lambda model: ZeroConfig(),
    "one ahead": lambda model: tight(model, units=_is_unit, prefetch_buffer_size=1),
    "none ahead": lambda model: tight(model, units=_is_unit, async_prefetch=False),
    "sums on device": lambda model: tight(model, units=_is_unit, prefetch_buffer_size=1, offload_grads=False),
}

Program = Callable[[nn.Module, Any, torch.optim.Optimizer], None]  # (model, batch, optimizer): leaves gradients


# ---- models -----------------------------------------------------------------------------------------------------


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def non_reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def nested(layer: nn.Module, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return checkpoint(layer, y, use_reentrant=False)

    return checkpoint(inner, x, use_reentrant=False)


class TwoAtOnce(Net):
    """Two blocks under one checkpoint."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = checkpoint(lambda y, a=first, b=second: b(a(y)), x, use_reentrant=False)
        return self.head(self.norm(x))


class InnerCheckpoint(Net):
    """Blocks that checkpoint their own inside: recomputation does not go through the unit's forward."""

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Inside(WIDTH) for _ in range(3))


class InnerReentrant(InnerCheckpoint):
    """The same with the reentrant checkpoint."""

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)


class Dropped(Net):
    """With dropout between the blocks: the same random stream must be drawn."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), 0.2)
        for layer in self.layers:
            x = F.dropout(self.wrap(layer, x), 0.2)
        return self.head(self.norm(x))


class TiedBlocks(Net):
    """The first and last block share a weight across units, and a block ties two of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight
        self.layers[1].down.bias = self.layers[1].norm.bias


class Frozen(Net):
    """One frozen parameter inside a unit, and one frozen unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].up.weight.requires_grad_(False)
        self.layers[1].requires_grad_(False)


class Skipping(Net):
    """One unit is never used, one parameter of another neither."""

    def __init__(self) -> None:
        super().__init__(num_layers=4)
        self.layers[1].spare = nn.Parameter(torch.ones(64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](self.embed(tokens)))
        return self.head(self.norm(self.layers[3](x)))


class Recurrent(Net):
    """One block called several times, out of order."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i in (0, 1, 0, 2, 0, 1):
            x = self.layers[i](x)
        return self.head(self.norm(x))


class Structured(nn.Module):
    """Blocks that take and give tuples and dicts."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(WIDTH)

        def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
            x, seen = pair
            x = self.block(x)
            return x, {**seen, f"h{len(seen)}": x}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.parts = nn.ModuleList(self.Part() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        pair = (self.embed(tokens), {})
        for part in self.parts:
            pair = part(pair)
        return self.head(pair[0] + sum(pair[1].values()))


class Odd(nn.Module):
    """0-dim, one-element, odd-sized and empty parameters, used outside their module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.embed = nn.Embedding(VOCAB, 7)
        self.head = nn.Linear(7, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.one + self.empty.sum()
        for layer in self.layers:
            x = torch.tanh(F.linear(x, layer.weight) + layer.bias)
        return self.head(x)


class Normed(nn.Module):
    """Convolution, batch norm (buffers), LSTM and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.layers = nn.ModuleList(
            [nn.Conv1d(64, 64, 3, padding=1), nn.BatchNorm1d(64), nn.MultiheadAttention(64, 4, batch_first=True)]
        )
        self.rnn = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        conv, norm, attend = self.layers
        x = norm(conv(self.embed(tokens).transpose(1, 2))).transpose(1, 2)
        x = attend(x, x, x, need_weights=False)[0]
        return self.head(self.rnn(x)[0])


class Custom(Net):
    """A custom autograd function that saves a weight and keeps another as an attribute."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.other = other
            return x * weight + other

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum((0, 1)), (grad * ctx.other.sign()).sum((0, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.Scaled.apply(layer(x), layer.norm.weight, layer.norm.bias)
        return self.head(self.norm(x))


# ---- programs ---------------------------------------------------------------------------------------------------


def plain(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    token_loss(model, batch).backward()


def retain_graph(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    loss = token_loss(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    logits = model(batch[0])
    logits.square().mean().backward(retain_graph=True)
    F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).backward()


def two_forwards(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    (token_loss(model, batch) + token_loss(model, (batch[1], batch[0]))).backward()


def two_micro_batches(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    token_loss(model, batch).backward()
    token_loss(model, (batch[1], batch[0])).backward()


def weights_in_loss(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    penalty = sum(p.square().sum() for p in model.parameters())
    (token_loss(model, batch) + 1e-3 * penalty).backward()


def autograd_grad(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(token_loss(model, batch), params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def gradient_penalty(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    loss = token_loss(model, batch)
    params = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, params, create_graph=True)
    (loss + sum(g.square().sum() for g in grads)).backward()


def create_graph(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch: gradients keep their graph alive
        token_loss(model, batch).backward(create_graph=True)
    for param in model.parameters():
        if not isinstance(optimizer, rayzero.ZeroOptimizer):
            param.grad = param.grad.detach()


def input_penalty(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    x = model.embed(batch[0]).detach().requires_grad_()
    y = model.layers[1](model.layers[0](x))
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (y.mean() + grad.square().mean()).backward()


def some_inputs(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    chosen = [model.layers[0].up.weight, model.layers[2].down.bias]
    token_loss(model, batch).backward(inputs=chosen)


def eval_between(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.eval()
        before = token_loss(model, batch)
    model.train()
    token_loss(model, batch).backward()
    with torch.inference_mode():
        assert torch.equal(token_loss(model, batch), before)


def failed_forward(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    handle = model.layers[1].register_forward_pre_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        model(batch[0])
    handle.remove()
    token_loss(model, batch).backward()


def failed_backward(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    logits = model(batch[0])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
    hooked = model.layers[1].register_full_backward_hook(_raise)
    broken = token_loss(model, batch)
    with pytest.raises(ZeroDivisionError):
        broken.backward()
    hooked.remove()
    optimizer.zero_grad()
    loss.backward()


def caught_backward(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    """What a backward that fails half-way has left in ``.grad`` stays, as in torch."""
    hooked = model.layers[1].register_full_backward_hook(_raise)
    broken = token_loss(model, batch)
    with pytest.raises(ZeroDivisionError):
        broken.backward()
    hooked.remove()
    token_loss(model, batch).backward()


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


def set_by_hand(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.25)


@dataclass(frozen=True)
class Case:
    program: Program = plain
    model: Callable[[], nn.Module] = Net


CASES = {
    "plain": Case(),
    "dropout": Case(model=Dropped),
    "retain_graph": Case(retain_graph),
    "two losses": Case(two_losses),
    "two forwards": Case(two_forwards),
    "two micro-batches": Case(two_micro_batches),
    "weights in the loss": Case(weights_in_loss),
    "autograd.grad": Case(autograd_grad),
    "gradient penalty": Case(gradient_penalty),
    "backward(create_graph=)": Case(create_graph),
    "input penalty": Case(input_penalty),
    "backward(inputs=)": Case(some_inputs),
    "evaluation between steps": Case(eval_between),
    "exception in forward": Case(failed_forward),
    "exception in backward, discarded": Case(failed_backward),
    "exception in backward, kept": Case(caught_backward),
    "gradients set by hand": Case(set_by_hand),
    "tied across and within units": Case(model=TiedBlocks),
    "frozen parameter and unit": Case(model=Frozen),
    "unused unit and parameter": Case(model=Skipping),
    "several calls of a unit": Case(model=Recurrent),
    "tuples and dicts": Case(model=Structured),
    "odd sizes": Case(model=Odd),
    "convolution, batch norm, rnn, attention": Case(model=Normed),
    "custom function": Case(model=Custom),
    **{
        f"{how.__name__} checkpoint, {program.__name__}": Case(program, lambda how=how: Net(wrap=how))
        for how in (reentrant, non_reentrant, nested)
        for program in (plain, retain_graph, two_forwards, weights_in_loss)
        if (how, program) != (reentrant, retain_graph)
    },
    "reentrant checkpoint, dropout": Case(model=lambda: Dropped(wrap=reentrant)),
    "non-reentrant checkpoint, dropout": Case(model=lambda: Dropped(wrap=non_reentrant)),
    "non-reentrant checkpoint, autograd.grad": Case(autograd_grad, lambda: Net(wrap=non_reentrant)),
    "non-reentrant checkpoint, gradient penalty": Case(gradient_penalty, lambda: Net(wrap=non_reentrant)),
    "checkpoint inside a unit": Case(model=InnerCheckpoint),
    "checkpoint inside a unit, two forwards": Case(two_forwards, InnerCheckpoint),
    "checkpoint inside a unit, weights in the loss": Case(weights_in_loss, InnerCheckpoint),
    "reentrant checkpoint inside a unit": Case(model=InnerReentrant),
    "two blocks a checkpoint": Case(model=lambda: TwoAtOnce(num_layers=4)),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, program: Program) -> None:
    for step in range(2):
        torch.manual_seed(step)
        program(model, tokens(step), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_plain_torch(case: str, residency: str, alone: RankContext) -> None:
    expected = seeded(CASES[case].model)
    model = copy.deepcopy(expected)
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), CASES[case].program)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = rayzero.prepare(model, sgd, RESIDENCIES[residency](model), units=_is_unit)
    train(model, optimizer, CASES[case].program)
    assert same_bits(rayzero.full_state_dict(model), expected.state_dict())


def _is_unit(name: str, module: nn.Module) -> bool:
    return (name.count(".") == 1 and name.split(".")[0] in ("layers", "parts")) or isinstance(module, nn.LSTM)
