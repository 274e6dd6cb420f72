"""Writes through ``.data``, wherever they come: inside a forward, in its recomputation, between forward and backward.

Torch does not count them, so autograd raises no error: a backward computes with what was written since."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.errors import UnsupportedError

from .models import WIDTH, Block, Net, prepared_copy, same_bits, seeded, tight, token_loss, tokens

STEPS = 3
Write = Callable[[Block], object]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _rows(block: Block) -> None:
    block.up.weight.data[:2] = 0.02
    block.up.weight.data.view(-1)[-5:].zero_()


def _held(block: Block) -> None:
    if not hasattr(block, "held"):
        block.held = block.down.weight.data
    block.held.mul_(0.9)


def _assign(block: Block) -> None:
    block.up.weight.data = block.up.weight.data * 0.9
    block.down.bias.data = torch.full((WIDTH,), 0.25)


IN_PLACE: dict[str, Write] = {
    "clamp_": lambda block: block.up.weight.data.clamp_(-0.05, 0.05),
    "add_ to all": lambda block: [param.data.add_(0.01) for param in block.parameters()],
    "rows": _rows,
    "a held alias": _held,
}
WHEN = ["before use", "between two uses", "after use"]
CONFIGS: dict[str, Callable[[nn.Module], ZeroConfig]] = {
    "all up": lambda model: ZeroConfig(),
    "tight": lambda model: tight(model, prefetch_buffer_size=1),
}


class Writing(Block):
    """A block whose forward writes to its own weights."""

    def __init__(self, write: Write, when: str) -> None:
        super().__init__(WIDTH)
        self.write, self.when = write, when

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "before use":
            self.write(self)
        x = super().forward(x)
        if self.when == "between two uses":
            self.write(self)
            x = super().forward(x)
        if self.when == "after use":
            self.write(self)
        return x


def net(write: Write, when: str = "before use", wrap: Callable[..., Tensor] | None = None) -> nn.Module:
    """Of its three blocks, the second one writes."""

    def build() -> nn.Module:
        model = Net(wrap=wrap)
        model.layers[1] = Writing(write, when)
        return model

    return seeded(build)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[nn.Module], object] = lambda model: None
) -> list[Tensor]:
    losses = []
    for step in range(STEPS):
        before(model)
        loss = token_loss(model, tokens(step))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check(base: nn.Module, config: str = "tight", before: Callable[[nn.Module], object] = lambda model: None) -> None:
    """Losses and weights are those of plain PyTorch."""
    plain, model = copy.deepcopy(base), copy.deepcopy(base)
    losses = train(plain, sgd(plain.parameters()), before)
    model, optimizer = rayzero.prepare(model, sgd(model.parameters()), CONFIGS[config](model))
    assert train(model, optimizer, before) == losses
    assert same_bits(rayzero.full_state_dict(model), plain.state_dict())


# ---- inside forward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", IN_PLACE)
def test_data_written_inside_forward_is_trained_on(name: str, when: str, config: str, alone: RankContext) -> None:
    check(net(IN_PLACE[name], when), config)


def _hold_then_assign(block: Block) -> None:
    if not hasattr(block, "held"):
        block.held = block.up.weight.data
        block.held.mul_(0.9)
    else:
        block.up.weight.data = block.up.weight.data * 0.9


def _clamp(block: Block) -> None:
    block.up.weight.data = block.up.weight.data.clamp(-0.05, 0.05)


def _in_place(block: Block) -> None:
    """As torch counts it."""
    with torch.no_grad():
        block.up.weight.clamp_(-0.05, 0.05)
        block.down.bias.add_(0.01)


class Scaling(nn.Module):
    """Writes to two weights. Backward unpacks the first one before it unpacks what needs a recomputation."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.block, self.counted = Block(WIDTH), counted
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.last = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for param in (self.scale, self.last):
            with torch.no_grad():
                (param if self.counted else param.data).mul_(1.5)
        return (self.scale * self.block(x)) @ self.last


def scaling(counted: bool, reentrant: bool) -> nn.Module:
    def build() -> nn.Module:
        model = Net(wrap=lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))
        model.layers[1] = Scaling(counted)
        return model

    return seeded(build)


NETS: dict[str, Callable[[], nn.Module]] = {
    "assigned before its use": lambda: net(_assign),
    # the write that counted through what others hold must not make up for the later assignment
    "assigned while others hold it": lambda: net(_hold_then_assign),
    "the same assigned again": lambda: net(lambda block: (_clamp(block), _clamp(block))),
    "the same assigned again in another call": lambda: net(_clamp, wrap=lambda layer, x: layer(layer(x))),
    "in place": lambda: net(_in_place),
    **{
        f"read as recomputed, {'in place' if counted else 'data'}, {reentrant=}": (partial(scaling, counted, reentrant))
        for counted in (False, True)
        for reentrant in (False, True)
    },
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", NETS)
def test_what_a_forward_writes_is_trained_on(name: str, config: str, alone: RankContext) -> None:
    check(NETS[name](), config)


def test_units_whose_data_was_assigned_while_others_held_it_still_come_and_go(alone: RankContext) -> None:
    """What autograd saves of the new memory is found there, so that it pins nothing."""

    def assign(block: Block) -> None:
        held = block.up.weight.data
        block.up.weight.data = held * 0.9
        block.held = held

    def build() -> nn.Module:
        model = Net()
        model.layers = nn.ModuleList(Writing(assign, "before use") for _ in range(3))
        return model

    plain = seeded(build)
    model = copy.deepcopy(plain)
    losses = train(plain, sgd(plain.parameters()))
    config = tight(model, prefetch_buffer_size=1, spare=0)
    model, optimizer = rayzero.prepare(model, sgd(model.parameters()), config)
    assert train(model, optimizer) == losses
    loss = token_loss(model, tokens(0))
    assert not [unit for unit in optimizer.engine.units if unit.buffer is not None and unit.pinned_slots()]
    loss.backward()


def test_data_assigned_after_its_use_is_torchs_error(alone: RankContext) -> None:
    """Autograd has saved views of the old memory, which plain torch keeps."""
    model = net(_assign, "after use")
    model, _ = rayzero.prepare(model, sgd(model.parameters()), tight(model, prefetch_buffer_size=1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        token_loss(model, tokens(0)).backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("when", WHEN)
def test_data_written_in_a_checkpoint_is_written_again(when: str, reentrant: bool, alone: RankContext) -> None:
    def wrap(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=reentrant)

    check(net(lambda block: block.up.weight.data.mul_(1.05), when, wrap))
    if when == "before use":
        check(net(_assign, when, wrap))


@pytest.mark.parametrize(
    ("write", "mode"),
    [
        (IN_PLACE["add_ to all"], torch.no_grad),
        (IN_PLACE["add_ to all"], torch.inference_mode),
        (_assign, torch.no_grad),
    ],
)
def test_data_written_in_an_evaluation_is_kept(
    write: Write, mode: Callable[[], AbstractContextManager[None]], alone: RankContext
) -> None:
    def evaluate(model: nn.Module) -> None:
        with mode():
            model(tokens(9)[0])

    check(net(lambda block: write(block) if not torch.is_grad_enabled() else None), before=evaluate)


# ---- outside of it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_data_written_between_forward_and_backward_is_what_backward_reads(config: str, alone: RankContext) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(STEPS):
            loss = token_loss(model, tokens(step))
            for param in model.parameters():
                param.data.mul_(0.9)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = seeded(Net)
    model = copy.deepcopy(plain)
    train(plain, sgd(plain.parameters()))
    model, optimizer = rayzero.prepare(model, sgd(model.parameters()), CONFIGS[config](model))
    train(model, optimizer)
    assert same_bits(rayzero.full_state_dict(model), plain.state_dict())


def test_another_parameters_data_is_refused(alone: RankContext) -> None:
    """Plain torch would let the two share memory from there on."""
    model = seeded(Net)
    model, _ = rayzero.prepare(model, sgd(model.parameters()), tight(model, prefetch_buffer_size=1))
    with pytest.raises(UnsupportedError, match=r"'layers.1.up.weight' was given the memory of 'layers.0.up.weight'"):
        model.layers[1].up.weight.data = model.layers[0].up.weight.data


def test_a_tensor_given_as_data_is_copied(alone: RankContext) -> None:
    """docs/reference/differences.md says so."""
    model = seeded(Net)
    model, _ = rayzero.prepare(model, sgd(model.parameters()), tight(model, prefetch_buffer_size=1))
    weight, given = model.layers[1].up.weight, torch.ones(2 * WIDTH, WIDTH)
    weight.data = given
    given.zero_()
    assert weight.sum() == weight.numel()


def test_a_numpy_write_inside_forward_never_reaches_the_owners(alone: RankContext) -> None:
    """The one write that is not seen; docs/reference/differences.md says so."""

    def double(block: Block) -> None:
        array = block.up.weight.detach().numpy()
        array *= 2

    base = net(double)
    model, _ = prepared_copy(base, sgd, tight(base, prefetch_buffer_size=1))
    with torch.no_grad():
        doubled = token_loss(model, tokens(0))
        base.layers[1].write = lambda block: None
        assert doubled != token_loss(base, tokens(0))
    assert same_bits(rayzero.full_state_dict(model), base.state_dict())
