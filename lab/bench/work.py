"""Defines what every contestant of the step benchmarks trains: the same GPT, tokens and optimizer options."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayzero.recipes.model import GPT
from rayzero.recipes.recipe import GPTConfig

CLIP = 1.0
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
_HEAD = 64  # elements of the widest head; a head's size must be even
_PERIOD = 97  # of the token patterns; prime, so that every stride reaches all of it

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The model and the batches; ``batch`` sequences of ``seq`` tokens a rank and step."""

    dim: int = 512
    layers: int = 8
    vocab: int = 8192
    seq: int = 256
    batch: int = 2
    precision: Precision = "fp32"
    checkpointing: bool = False  # recompute blocks in backward

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and gradients in forward and backward; masters and moments are fp32."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    def model(self, device: str | torch.device = "cpu") -> GPT:
        """The model in fp32 on ``device``, with the same values on every rank and for every contestant."""
        torch.manual_seed(0)
        heads = max(1, self.dim // _HEAD)
        config = GPTConfig(
            vocab_size=self.vocab, seq_len=self.seq, num_layers=self.layers, num_heads=heads, dim=self.dim
        )
        with torch.device(device):
            model = GPT(config)
        if self.checkpointing:
            for i, block in enumerate(model.blocks):
                model.blocks[i] = Recomputed(block)
        return model

    def count_params(self) -> int:
        """Number of parameters of the model."""
        return sum(p.numel() for p in self.model("meta").parameters())

    def batch_of(self, step: int, rank: int) -> Tensor:
        """The rank's tokens of a step, (batch, seq + 1) int64: sequences with a random start and stride, so that the
        loss can fall."""
        draw = random.Random(1000 * step + rank)
        starts = torch.tensor([[draw.randrange(_PERIOD)] for _ in range(self.batch)], dtype=torch.int64, device="cpu")
        strides = torch.tensor(
            [[draw.randrange(1, _PERIOD)] for _ in range(self.batch)], dtype=torch.int64, device="cpu"
        )
        tokens = (starts + strides * torch.arange(self.seq + 1, dtype=torch.int64, device="cpu")) % _PERIOD
        return tokens % self.vocab


class Recomputed(nn.Module):
    """A block that is recomputed in backward instead of keeping its activations."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Tensor) -> Tensor:
        """The block's own forward."""
        out: Tensor = checkpoint(self.block, *args, use_reentrant=False)
        return out


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, a 0-dim fp32 tensor. ``tokens``: (batch, seq + 1) int64."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def lower_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters to ``dtype``; buffers (rotary tables) stay fp32."""
    for param in model.parameters():
        param.data = param.data.to(dtype)
