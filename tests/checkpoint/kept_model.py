"""The model of the checkpoint in ``kept/``, and what is compared of it."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero.engine.context import RankContext


class Small(nn.Module):
    """A tied head, a buffer, a frozen layer, and a layer that the first step does not use."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.norm = nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.late = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, late: bool) -> Tensor:
        """tokens: (batch,) -> (batch, 24)."""
        self.seen += len(tokens)
        hidden = self.frozen(self.norm(self.embed(tokens)))
        return self.head(self.late(hidden) if late else hidden)


def prepared(ctx: RankContext) -> tuple[nn.Module, rayzero.ZeroOptimizer, Any]:
    """The model with two parameter groups and a scheduler."""
    torch.manual_seed(7 if ctx.rank == 0 else 8)
    model = Small()
    decayed = [model.embed.weight, model.late.weight]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [model.late.bias, *model.norm.parameters()]}]
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(groups, lr=1e-2))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=10)
    if ctx.loop_state is not None:
        schedule.load_state_dict(ctx.loop_state["schedule"])
    return model, optimizer, schedule


def steps(model: nn.Module, optimizer: rayzero.ZeroOptimizer, schedule: Any, start: int, stop: int, rank: int) -> None:
    """Train; each rank sees tokens of its own."""
    for step in range(start, stop):
        tokens = torch.randint(24, (8,), generator=torch.Generator().manual_seed(10 * step + rank))
        F.cross_entropy(model(tokens, late=step > 0).float(), tokens.roll(1)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def seen(model: nn.Module, optimizer: rayzero.ZeroOptimizer, schedule: Any) -> dict[str, Any]:
    """Digests of every master, buffer and optimizer state, step counts, and the options of each group."""
    state = optimizer.state_dict()
    found: dict[str, Any] = {
        f"state {index} {kind}": _digest(value)
        for index, kinds in state["state"].items()
        for kind, value in kinds.items()
    }
    found |= {f"weight {name}": _digest(value) for name, value in rayzero.full_state_dict(model).items()}
    found["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
    found["schedule"] = schedule.state_dict()
    return found


def _digest(value: Tensor) -> str:
    shape = "x".join(map(str, value.shape))
    return f"{value.dtype} {shape} {xxhash.xxh3_64_hexdigest(value.contiguous().reshape(-1).view(torch.uint8).numpy())}"
