"""Parameters: where they are registered, who else uses them, of which size, dtype and layout, trained or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.models import VOCAB, WIDTH, Block, Net, token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .case import Case, Run, steps, train
from .engines import Setting

# ---- tied -------------------------------------------------------------------------------------------------------


class TiedInside(Net):
    """A block that ties two of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].down.bias = self.layers[1].norm.bias


class TiedAcross(Net):
    """The first and the last block share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight


class TiedThreeWays(Net):
    """Three of four blocks share a weight, and two another one."""

    def __init__(self) -> None:
        super().__init__(num_layers=4)
        self.layers[2].up.weight = self.layers[3].up.weight = self.layers[0].up.weight
        self.layers[3].norm.weight = self.layers[1].norm.weight


class SharedBlock(Net):
    """One block registered at three places."""

    def __init__(self) -> None:
        super().__init__(num_layers=3)
        self.layers[2] = self.layers[0]
        self.again = self.layers[0]

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.head(self.again(self.embed(tokens)))


# ---- used elsewhere ---------------------------------------------------------------------------------------------


class Borrowing(Net):
    """Blocks' weights used by the root: another module's, and through F.linear."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, other in zip(self.layers, reversed(self.layers), strict=True):
            x = layer(x) + F.linear(F.linear(x, other.up.weight), layer.down.weight)
        return F.linear(self.norm(x) * self.layers[1].norm.weight, self.embed.weight)


class Bare(Net):
    """Parameters that the root itself holds, also in a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.gates = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(3))
        self.named = nn.ParameterDict({"first": torch.ones(WIDTH), "last": torch.ones(WIDTH)})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.named["first"] + self.shift
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = layer(x) * gate
        return self.head(self.norm(x * self.named["last"]))


@steps
def weights_in_the_loss(run: Run, step: int) -> Tensor:
    penalty = sum(p.square().sum() for p in run.model.parameters())
    loss = token_loss(run.model, run.batch(step)) + 1e-3 * penalty
    loss.backward()
    return loss.detach()


@steps
def one_weight_in_the_loss(run: Run, step: int) -> None:
    (token_loss(run.model, run.batch(step)) + run.model.layers[1].up.weight.abs().mean()).backward()


# ---- frozen, unused ---------------------------------------------------------------------------------------------


class FrozenParameter(Net):
    """Single frozen parameters inside units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].up.weight.requires_grad_(False)
        self.layers[2].norm.bias.requires_grad_(False)


class FrozenUnit(Net):
    """Frozen embedding and frozen blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[1].requires_grad_(False)


def only_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def frozen_then_unfrozen(run: Run) -> list[Tensor]:
    """Freezing after prepare, and unfreezing again."""
    losses = []
    for step in range(4):
        run.model.layers[1].requires_grad_(step % 2 == 0)
        run.model.layers[0].up.weight.requires_grad_(step != 1)
        loss = token_loss(run.model, run.batch(step))
        loss.backward()
        losses.append(loss.detach())
        run.update()
    return losses


def unfrozen_later(run: Run) -> None:
    train(run)
    run.model.layers[0].requires_grad_(True)
    train(run)


class Unused(Net):
    """One unit is never used, one parameter of another neither."""

    def __init__(self) -> None:
        super().__init__(num_layers=4)
        self.layers[1].spare = nn.Parameter(torch.ones(64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](self.embed(tokens)))
        return self.head(self.norm(self.layers[3](x)))


class Optional(Net):
    """Parameters that only some ranks use: the rank comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor, rank: int = 0) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            h = layer.up(layer.norm(x) if rank == 0 else x)
            x = x + layer.down(h)
        return self.head(self.norm(x * self.gate if rank == 1 else x))


@steps
def optional_on_ranks(run: Run, step: int) -> None:
    inputs, targets = run.batch(step)
    F.cross_entropy(run.model(inputs, run.rank).flatten(0, 1).float(), targets.flatten()).backward()


class Lora(Net):
    """A frozen model whose linears have adapters of rank 2."""

    class Adapted(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear.requires_grad_(False)
            self.a = nn.Linear(linear.in_features, 2, bias=False)
            self.b = nn.Linear(2, linear.out_features, bias=False)
            nn.init.normal_(self.b.weight, std=0.02)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + 2.0 * self.b(self.a(x))

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for layer in self.layers:
            layer.up = self.Adapted(layer.up)
            layer.down = self.Adapted(layer.down)


# ---- sizes and layouts ------------------------------------------------------------------------------------------


class Scalars(Net):
    """0-dim parameters, in blocks and on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        for layer in self.layers:
            layer.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x) * layer.gain
        return self.head(self.norm(x))


class Small(nn.Module):
    """Sizes that nothing divides: one element, 7, 7 × 5, empty."""

    def __init__(self, one: bool = True, empty: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        for layer in self.layers:
            layer.one = nn.Parameter(torch.ones(1)) if one else None
            layer.empty = nn.Parameter(torch.empty(0, 5)) if empty else None
        self.head = nn.Linear(7, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x if layer.one is None else x * layer.one
            x = x if layer.empty is None else x + layer.empty.sum()
        return self.head(x)


class Convolutions(nn.Module):
    """A small image model; its input is made of tokens."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm(4), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.images(tokens).to(self.layers[0][0].weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1).flatten(1))[:, None].expand(*tokens.shape, VOCAB)

    def images(self, tokens: Tensor) -> Tensor:
        return torch.sin(tokens.float() @ torch.arange(8 * 64.0).view(8, 64)).view(-1, 4, 4, 4)


class ChannelsLast(Convolutions):
    """With weights and images in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)

    def images(self, tokens: Tensor) -> Tensor:
        return super().images(tokens).to(memory_format=torch.channels_last)


class Transposed(Net):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).mul_(0.1).t())


class Huge(Net):
    """One parameter of more than a shard, and more than the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].up = nn.Linear(WIDTH, 64 * WIDTH)
        self.layers[1].down = nn.Linear(64 * WIDTH, WIDTH)


class Tiny(nn.Module):
    """2,000 parameters of one to three elements in ten blocks."""

    class Part(nn.Module):
        def __init__(self, each: int) -> None:
            super().__init__()
            self.shifts = nn.ParameterList(nn.Parameter(torch.ones(1 + i % 3)) for i in range(each))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x + 0.01 * torch.cat(list(self.shifts)).sum())

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(self.Part(200) for _ in range(10))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---- dtypes -----------------------------------------------------------------------------------------------------


class MixedUnit(Net):
    """Blocks with parameters of two dtypes, which cast what they compute with."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm.bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            h = layer.norm(x.to(layer.norm.weight.dtype)).to(layer.up.weight.dtype)
            x = x + layer.down(F.gelu(layer.up(h)))
        return self.head(self.norm(x))


class Complex(Net):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))


# ---- parametrized -----------------------------------------------------------------------------------------------


class Parametrized(Net):
    """Blocks whose up-projection's weight is computed from other parameters."""

    def __init__(self, how: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        for layer in self.layers:
            how(layer.up)


def old_weight_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(module)


class Doubled(nn.Module):
    """A parametrization of one's own, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(2.0))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.by


def own_parametrization(module: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(module, "weight", Doubled())


def cached(run: Run) -> Any:
    with nn.utils.parametrize.cached():
        return train(run)


@steps
def cached_forward(run: Run, step: int) -> None:
    with nn.utils.parametrize.cached():
        (token_loss(run.model, run.batch(step)) + token_loss(run.model, run.batch(step + 5))).backward()


# ---- buffers ----------------------------------------------------------------------------------------------------


class Rotary(Net):
    """Attention blocks with rotary tables that are not saved."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)
            angles = torch.outer(torch.arange(16.0), 10000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH))
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k = self.turn(q), self.turn(k)
            return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))

        def turn(self, x: Tensor) -> Tensor:
            a, b = x.float().chunk(2, -1)
            cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Attention() for _ in range(3))


class Averaging(Net):
    """Blocks that keep a running mean of their input in a buffer, and add it."""

    class Part(Block):
        def __init__(self) -> None:
            super().__init__(WIDTH)
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.lerp_(x.float().mean((0, 1)), 0.1)
                self.calls += 1
            return super().forward(x + self.mean.to(x.dtype))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Part() for _ in range(3))


# ---- torch's own modules ----------------------------------------------------------------------------------------


class Recurrences(nn.Module):
    """LSTM, GRU and attention as torch has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(
            [nn.LSTM(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True, bidirectional=True)]
        )
        self.attend = nn.ModuleList([nn.MultiheadAttention(32, 4, batch_first=True)])
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(self.attend[0](x, x, x, need_weights=False)[0])


class Encoder(nn.Module):
    """torch's transformer encoder, which has a fast path of its own in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


def train_and_evaluate(run: Run) -> list[Any]:
    """Losses in training and in evaluation, step by step."""
    seen = []
    for step in range(2):
        seen.append(train(run))
        run.model.eval()
        with torch.no_grad():
            seen.append(token_loss(run.model, run.batch(step)))
        with torch.inference_mode():
            seen.append(float(token_loss(run.model, run.batch(step))))
        run.model.train()
    return seen


class SparseEmbedding(Net):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB)
        self.embed = nn.Embedding(VOCAB, WIDTH, sparse=True)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


CASES = [
    Case("tied inside a unit", build=TiedInside),
    Case("tied across units", build=TiedAcross),
    Case("tied three ways", build=TiedThreeWays, spare=1),
    Case("a block registered three times", build=SharedBlock),
    Case("weights of other modules in forward", build=Borrowing),
    Case("parameters of the root, in lists and dicts", build=Bare),
    Case("all weights in the loss", weights_in_the_loss),
    Case("one weight in the loss", one_weight_in_the_loss),
    Case("frozen parameters", build=FrozenParameter),
    Case("frozen units", build=FrozenUnit, optimizer=only_trained),
    Case("frozen and unfrozen after prepare", frozen_then_unfrozen),
    Case(
        "unfrozen after prepare, frozen before",
        unfrozen_later,
        build=FrozenUnit,
        refused=r"'layers.0.norm.weight' was given requires_grad=True .* and freeze it then",
    ),
    Case("no gradient on any rank", build=Unused),
    Case("no gradient on some ranks", optional_on_ranks, build=Optional),
    Case("LoRA adapters on a frozen model", build=Lora, optimizer=only_trained),
    Case("0-dim", build=Scalars),
    Case("one element", build=lambda: Small(empty=False)),
    Case("odd sizes", build=lambda: Small(one=False, empty=False)),
    Case("empty", build=Small),
    Case("convolutions", build=Convolutions),
    Case("channels_last", build=ChannelsLast),
    Case("not contiguous", build=Transposed),
    Case("bigger than a shard", build=Huge),
    Case(
        "bigger than the budget",
        build=Huge,
        settings={"gpu_param_memory_budget": 1 << 18},
        refused=r"gpu_param_memory_budget=262,144 bytes has no room for unit 'layers.1' .* set it to at least",
    ),
    Case("thousands of tiny ones", build=Tiny),
    Case("modules kept in fp32", build=Net, settings={"keep_fp32": ("*norm",)}),
    Case("two dtypes in a block", build=MixedUnit),
    Case("complex", build=Complex, refused=r"'layers.1.phase' is complex64, which is not supported; hold its real"),
    Case("weight_norm", build=lambda: Parametrized(parametrizations.weight_norm)),
    Case("weight_norm, the old one", build=lambda: Parametrized(old_weight_norm)),
    Case(
        "spectral_norm", build=lambda: Parametrized(parametrizations.spectral_norm), settings={"keep_fp32": ("*.up",)}
    ),
    Case("orthogonal", build=lambda: Parametrized(parametrizations.orthogonal), precisions=("fp32",)),
    Case("a parametrization of one's own", build=lambda: Parametrized(own_parametrization)),
    Case("parametrizations, cached", cached_forward, build=lambda: Parametrized(own_parametrization), ranks=(1,)),
    Case(
        "BatchNorm",
        train_and_evaluate,
        build=lambda: Convolutions(nn.BatchNorm2d),
        settings={"keep_fp32": ("layers.*.1",)},
    ),
    Case("rotary tables", build=Rotary),
    Case("buffers that forward writes", build=Averaging),
    Case("LSTM, GRU, attention", train_and_evaluate, build=Recurrences),
    Case("torch's transformer encoder", train_and_evaluate, build=Encoder),
    Case("sparse gradients", build=SparseEmbedding, optimizer=plain_sgd, tolerance=1e-5),
]


@pytest.mark.spread(15, second=50)
def test_trains_as_unsharded(case: Case, setting: Setting, check: Callable[[Case, Setting], None]) -> None:
    check(case, setting)
