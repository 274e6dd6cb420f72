"""Control flow: what runs, how often and in which order is each rank's own business, and may differ each step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.models import VOCAB, WIDTH, Block, Net, token_loss
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Program, Run, steps, train
from .engines import Setting


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Path(Net):
    """Goes through the blocks that it is told, in that order."""

    def __init__(self) -> None:
        super().__init__(num_layers=5)

    def forward(self, tokens: Tensor, path: list[int]) -> Tensor:
        x = self.embed(tokens)
        for i in path:
            x = self.layers[i](x)
        return self.head(self.norm(x))


def along(path: Callable[[int, int], list[int]]) -> Program:
    """The plain loop; ``path(rank, step)``: the blocks that a rank goes through."""

    @steps
    def program(run: Run, step: int) -> Tensor:
        inputs, targets = run.batch(step)
        loss = loss_of(run.model(inputs, path(run.rank, step)), targets)
        loss.backward()
        return loss.detach()

    return program


def stochastic_depth(rank: int, step: int) -> list[int]:
    return [i for i in range(5) if random.Random(100 * step + 10 * rank + i).random() < 0.6]


# ---- calls ------------------------------------------------------------------------------------------------------


@steps
def two_forwards(run: Run, step: int) -> None:
    (token_loss(run.model, run.batch(step)) + token_loss(run.model, run.batch(step + 5))).backward()


@steps
def forward_alone(run: Run, step: int) -> list[Tensor]:
    """Every rank runs another number of forwards that it throws away, with and without a graph."""
    seen = [token_loss(run.model, run.batch(step + i)).detach() for i in range(run.rank)]
    with torch.no_grad():
        seen += [token_loss(run.model, run.batch(step + i)) for i in range(2 - run.rank)]
    token_loss(run.model, run.batch(step)).backward()
    return seen


@steps
def no_batch_on_some_ranks(run: Run, step: int) -> None:
    """A rank that has run out of batches steps all the same."""
    if run.rank != 1:
        token_loss(run.model, run.batch(step)).backward()


class Rolled(Net):
    """One block, applied as often as the rank and the step say."""

    def forward(self, tokens: Tensor, times: int) -> Tensor:
        x = self.embed(tokens)
        for _ in range(times):
            x = self.layers[1](x)
        return self.head(self.norm(self.layers[2](x)))


@steps
def rolled(run: Run, step: int) -> None:
    inputs, targets = run.batch(step)
    loss_of(run.model(inputs, 1 + run.rank + step), targets).backward()


class Cell(nn.Module):
    """A recurrent cell of its own over the sequence: each block is called at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(nn.GRUCell(16, 16) for _ in range(3))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        states = [x.new_zeros(len(tokens), 16) for _ in self.layers]
        outputs = []
        for t in range(tokens.shape[1]):
            h = x[:, t]
            for i, layer in enumerate(self.layers):
                h = states[i] = layer(h, states[i])
            outputs.append(h)
        return self.head(torch.stack(outputs, 1))


# ---- experts ----------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Blocks of four experts, each token routed to one, by its own content; experts without tokens do not run."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 4, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.gate(x).float().softmax(-1).max(-1)
            y = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                mine = chosen == i
                if mine.any():
                    y[mine] = expert(x[mine]) * weight[mine, None].to(x.dtype)
            return x + y

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(self.Routed() for _ in range(2))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@steps
def few_tokens(run: Run, step: int) -> Tensor:
    """Three tokens on each rank: most experts have none."""
    inputs, targets = (part[:1, :3] for part in run.batch(step))
    loss = loss_of(run.model(inputs), targets)
    loss.backward()
    return loss.detach()


def _is_expert(name: str, module: nn.Module) -> bool:
    return ".experts." in name and isinstance(module, nn.Sequential)


class Early(Net):
    """Leaves at the first block whose output is sure enough, which differs from batch to batch."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, int]:
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if int(tokens[0, 0]) % len(self.layers) == i:
                break
        return self.head(self.norm(x)), i


@steps
def early_exit(run: Run, step: int) -> int:
    inputs, targets = run.batch(step)
    logits, left_at = run.model(inputs)
    loss_of(logits, targets).backward()
    return left_at


# ---- entry points -----------------------------------------------------------------------------------------------


class Generator(Net):
    """A model with entry points beside forward."""

    @torch.no_grad()
    def generate(self, tokens: Tensor, length: int) -> Tensor:
        while tokens.shape[1] < length:
            tokens = torch.cat((tokens, self(tokens)[:, -1:].argmax(-1)), 1)
        return tokens

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.head(self.encode(inputs)), targets)


@steps
def generate_then_train(run: Run, step: int) -> list[list[int]]:
    """Each rank generates another length."""
    generated = run.model.generate(run.batch(step)[0][:1, :2], 4 + 2 * run.rank)
    token_loss(run.model, run.batch(step)).backward()
    return generated.tolist()


@steps
def custom_entry(run: Run, step: int) -> Tensor:
    loss = run.model.loss(*run.batch(step))
    loss.backward()
    return loss.detach()


@steps
def parts_called(run: Run, step: int) -> None:
    """The loop calls the model's parts itself."""
    inputs, targets = run.batch(step)
    x = run.model.embed(inputs)
    for layer in run.model.layers[: 1 + run.rank]:
        x = layer(x)
    loss_of(run.model.head(run.model.norm(x)), targets).backward()


@steps
def keyword_arguments(run: Run, step: int) -> None:
    inputs, targets = run.batch(step)
    loss_of(run.model(tokens=inputs), targets).backward()


# ---- where units are --------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Blocks of blocks, where both have parameters of their own."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.inner = nn.ModuleList(Block(WIDTH) for _ in range(2))
            self.mix = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            for layer in self.inner:
                y = layer(y)
            return x + self.mix(y)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(self.Outer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _outer_and_inner(name: str, module: nn.Module) -> bool:
    return isinstance(module, Nested.Outer | Block)


class Contained(nn.Module):
    """Blocks in a dict, in a list of lists, in a Sequential, and in a plain Python list and dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.named = nn.ModuleDict({"left": Block(16), "right": Block(16)})
        self.grid = nn.ModuleList(nn.ModuleList(Block(16) for _ in range(2)) for _ in range(2))
        self.chain = nn.Sequential(Block(16), nn.GELU(), Block(16))
        self.order = [self.named["right"], self.grid[1][0], {"again": self.chain[2]}]
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.named["left"](x) + self.named["right"](x)
        for row in self.grid:
            for layer in row:
                x = layer(x)
        x = self.order[2]["again"](self.order[1](self.order[0](self.chain(x))))
        return self.head(x)


def _blocks(name: str, module: nn.Module) -> bool:
    return isinstance(module, Block)


class Replaced(Net):
    """A module replaced by one that uses its parameters, before prepare."""

    class Twice(nn.Module):
        def __init__(self, block: Block) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = self.Twice(self.layers[1])


def rebound_forward(run: Run) -> Any:
    """A forward that is exchanged after prepare, as patching libraries do."""
    layer = run.model.layers[1]
    before = layer.forward
    layer.forward = lambda x: before(x) * 0.5
    return train(run)


def moved_between_lists(run: Run) -> Any:
    """Blocks that change places after prepare."""
    seen = train(run)
    run.model.layers = nn.ModuleList(reversed(run.model.layers))
    inputs, targets = run.batch(7)
    loss_of(run.model(inputs), targets).backward()
    run.update()
    run.model.layers = nn.ModuleList(reversed(run.model.layers))
    return seen


CASES = [
    Case("plain"),
    Case("called twice before backward", two_forwards),
    Case("forwards without backward, another number on each rank", forward_alone),
    Case("no batch on some ranks", no_batch_on_some_ranks),
    Case("units skipped on some ranks", along(lambda rank, step: [[0, 1, 2, 3, 4], [0, 2, 4], [3]][rank]), build=Path),
    Case("different branches on ranks", along(lambda rank, step: [rank, 3, 4]), build=Path),
    Case("no unit on some ranks", along(lambda rank, step: [1] if rank == 0 else []), build=Path),
    Case("different orders on ranks", along(lambda rank, step: [0, 1, 2] if rank else [2, 1, 0]), build=Path),
    Case("another order each step", along(lambda rank, step: [[0, 1, 2], [4, 3, 0]][step]), build=Path),
    Case("stochastic depth", along(stochastic_depth), build=Path),
    Case("a unit called out of order, again and again", along(lambda rank, step: [0, 1, 0, 2, 0, 1]), build=Path),
    Case("different numbers of calls on ranks", rolled, build=Rolled),
    Case("recurrent cells", build=Cell),
    Case("experts by token", build=Experts),
    Case("experts that only some ranks use", few_tokens, build=Experts),
    Case("experts as units", few_tokens, build=Experts, units=_is_expert, spare=1),
    Case("early exit", early_exit, build=Early),
    Case("generate, another length on each rank", generate_then_train, build=Generator),
    Case("an entry point beside forward", custom_entry, build=Generator),
    Case("parts called by the loop", parts_called),
    Case("keyword arguments", keyword_arguments),
    Case("units inside units", build=Nested, units=_outer_and_inner, spare=1),
    Case("blocks in dicts, lists of lists and plain lists", build=Contained, units=_blocks),
    Case("blocks in dicts and lists, units found by themselves", build=Contained),
    Case("a block wrapped by another", build=Replaced),
    Case("a forward exchanged after prepare", rebound_forward),
    Case("blocks that change places after prepare", moved_between_lists),
]


@pytest.mark.spread(11, second=36)
def test_trains_as_unsharded(case: Case, setting: Setting, check: Callable[[Case, Setting], None]) -> None:
    check(case, setting)
