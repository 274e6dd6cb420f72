"""Runs a plain PyTorch loop with RayZero: a small byte model learns this repository's README.

Prints the loss, the most parameter bytes that were in the rank's memory at once, and whether the complete weights load
into a plain model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero

TEXT = Path(__file__).parents[1] / "README.md"
LENGTH, WIDTH = 32, 128


class Block(nn.Module):
    """Causal attention and an MLP, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length, width) -> the same."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.gelu(self.up(x)))


class ByteModel(nn.Module):
    """Predicts the logits of the next byte."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length) -> (batch, length, 256)."""
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--budget", type=int, default=3 << 20, help="bytes of gathered parameters on the rank")
    args = parser.parse_args()

    torch.manual_seed(0)
    text = torch.tensor(list(TEXT.read_bytes()))
    model = ByteModel(args.blocks)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())

    config = rayzero.ZeroConfig(gpu_param_memory_budget=args.budget, prefetch_buffer_size=1)
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    rayzero.track()  # on a cluster, a rank that dies repeats its step; a scheduler would be named here
    for step in range(rayzero.get_context().step, args.steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (16,))
        windows = torch.stack([text[i : i + LENGTH + 1] for i in starts.tolist()])
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, args.steps - 1) or (step + 1) % 20 == 0:
            print(f"step {step + 1:3d}  loss {loss.item():.3f}  gradient norm {norm.item():.2f}")

    gathered = rayzero.stats(model).memory.gathered_peak
    print(f"parameters: {whole:,} bytes; at most {gathered:,} were gathered at once")
    plain = ByteModel(args.blocks)
    plain.load_state_dict(rayzero.full_state_dict(model))
    print("the complete weights load into the plain model")


if __name__ == "__main__":
    main()
