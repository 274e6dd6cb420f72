"""Trains LoRA adapters on a frozen bf16 base with RayZero: only the adapters cost masters and moments.

The owners hold the base's parameters once, in bf16, and ranks fetch them as they need them. Only the adapters cost 16
bytes per parameter (master, two moments, gradient). Prints the loss and the bytes of both kinds.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero

WIDTH, CLASSES = 128, 16


class LoRA(nn.Module):
    """A frozen bf16 linear layer plus a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, in) -> (batch, out)."""
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def build(num_blocks: int, rank: int) -> nn.Module:
    """A frozen random net with adapters in every layer, and a trained head."""
    blocks = [nn.Sequential(LoRA(nn.Linear(WIDTH, WIDTH), rank), nn.GELU()) for _ in range(num_blocks)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rank", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = build(args.blocks, args.rank)
    frozen_before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    inputs = torch.randn(256, WIDTH)  # before prepare(), which sets the generators in a rank that has come back
    targets = inputs[:, :CLASSES].argmax(dim=1)

    config = rayzero.ZeroConfig(precision="bf16")
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(trained, lr=1e-2), config)
    rayzero.track()  # on a cluster, a rank that dies repeats its step
    for step in range(rayzero.get_context().step, args.steps):
        loss = F.cross_entropy(model(inputs).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, args.steps - 1):
            print(f"step {step + 1:3d}  loss {loss.item():.3f}")

    state = rayzero.full_state_dict(model)
    units = optimizer.engine.layout.units
    frozen = [unit for unit in units if not unit.trainable]
    masters = sum(4 * unit.numel for unit in frozen if unit.has_master)  # only for an fp32 base, which bf16 would round
    adapters = sum(unit.numel for unit in units if unit.trainable)
    base = sum(unit.size_bytes for unit in frozen)
    print(f"frozen base: {base:,} bytes in bf16, {f'{masters:,} bytes of' if masters else 'no'} masters, no moments")
    print(f"adapters and head: {adapters:,} parameters with fp32 masters and moments")
    print(f"the base is as it was: {all(torch.equal(state[name], value) for name, value in frozen_before.items())}")


if __name__ == "__main__":
    main()
