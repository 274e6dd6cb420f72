"""Small models and the unsharded oracle that the engine's tests compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero.config import ZeroConfig
from rayzero.engine.units.partition import UnitRule, build_layout
from rayzero.memory.pool import buffer_bytes

VOCAB, WIDTH = 32, 64


class Block(nn.Module):
    """A transformer block's MLP half: norm, up, down, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm and a head whose weight is the embedding's. Every size is a multiple of 64."""

    def __init__(self, num_layers: int = 3, width: int = WIDTH, wrap: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.wrap = wrap or (lambda layer, x: layer(x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.wrap(layer, x)
        return self.head(self.norm(x))


class Critic(nn.Module):
    """A score of every row of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(VOCAB, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 1, bias=False))

    def forward(self, logits: Tensor) -> Tensor:
        return self.layers(logits)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model from a seed, in the calling thread. Ranks that are threads share the generator: build outside."""
    torch.manual_seed(seed)
    return build()


def tokens(step: int, rank: int = 0, size: int = 4, length: int = 8) -> tuple[Tensor, Tensor]:
    """A batch of one rank: inputs and targets (size, length), always the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    both = torch.randint(0, VOCAB, (2, size, length), generator=generator)
    return both[0], both[1]


class Batches:
    """A loader that knows its place: batch n is always the same."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self.at += 1
            yield tokens(self.at - 1, self.rank)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of a batch."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def fit(
    model: nn.Module, optimizer: Any, steps: Iterable[int], rank: int = 0, *, max_norm: float | None = None
) -> list[Tensor]:
    """The plain loop over a rank's batches of these steps; the losses. ``max_norm``: if the model is prepared."""
    losses = []
    for step in steps:
        loss = token_loss(model, tokens(step, rank))
        loss.backward()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def plain_state(base: nn.Module, steps: int) -> dict[str, Tensor]:
    """What a copy of a model has after some steps of plain SGD."""
    model = copy.deepcopy(base)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), range(steps))
    return model.state_dict()


def prepared_copy(
    model: nn.Module, make: Any, config: ZeroConfig | None = None, *, lr: float | None = None, **sources: Any
) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    """A copy of a model, prepared with an optimizer of all its parameters: ranks that are threads share the original.
    ``make``: an optimizer's class, with ``lr`` if it is given."""
    model = copy.deepcopy(model)
    return rayzero.prepare(model, make(model.parameters(), **({} if lr is None else {"lr": lr})), config, **sources)


def tight(model: nn.Module, *, units: UnitRule = "auto", spare: int = 2, **settings: Any) -> ZeroConfig:
    """A config whose budget holds the root, the unit in use, the prefetch depth and ``spare`` units that a test may
    hold, but not the whole model: units come and go."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.get("precision", "fp32")]
    plan = build_layout(model, units=units, compute_dtype=dtype)
    sizes = [buffer_bytes(unit.size_bytes) for unit in plan.layout.units]
    root = sum(size for size, module in zip(sizes, plan.modules, strict=True) if module == "")
    others = [size for size, module in zip(sizes, plan.modules, strict=True) if module != ""]
    depth = settings.get("prefetch_buffer_size", 16) if settings.get("async_prefetch", True) else 0
    window = root + (1 + depth + spare) * max(others, default=0)
    return ZeroConfig(**{"gpu_param_memory_budget": min(sum(sizes) - 1, window)} | settings)


def averaged(replicas: Iterable[list[Tensor | None]]) -> list[Tensor | None]:
    """Per parameter the mean of the replicas' gradients, added in fp32 in rank order; None where nobody has one."""
    lists = list(replicas)
    result: list[Tensor | None] = []
    for grads in zip(*lists, strict=True):
        total = None
        for grad in grads:
            if grad is not None:
                total = grad.float() if total is None else total + grad.float()
        result.append(None if total is None else total * (1.0 / len(lists)))
    return result


def oracle(
    model: nn.Module,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    world_size: int,
    steps: int,
    max_norm: float | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Train an unsharded copy on all ranks' batches; its final state and the norms before clipping."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    norms = []
    for step in range(steps):
        replicas = []
        for rank in range(world_size):
            optimizer.zero_grad()
            token_loss(model, tokens(step, rank)).backward()
            replicas.append([p.grad for p in model.parameters()])
        for param, grad in zip(model.parameters(), averaged(replicas), strict=True):
            param.grad = grad
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return model.state_dict(), norms


def relative_difference(state: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to that tensor's largest value."""
    assert list(state) == list(expected)
    return max(
        float((state[name] - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1e-30))
        for name in expected
        if expected[name].numel()
    )


def same_bits(state: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether two states have the same names and the same bits."""
    return list(state) == list(expected) and all(torch.equal(state[name], expected[name]) for name in expected)


def frozen_base(dtype: torch.dtype = torch.float32) -> Net:
    """All but biases and norms is frozen, as in BitFit; fp32 values that no 16-bit dtype holds."""
    model = seeded(Net)
    for name, param in model.named_parameters():
        if not name.endswith("bias"):
            param.requires_grad_(False)
            param.data = param.data.to(dtype)
    return model


def prepared_frozen(model: nn.Module, config: ZeroConfig | None = None) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    """With an optimizer of what is not frozen."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return rayzero.prepare(model, torch.optim.AdamW(trained, lr=1e-2), config)
