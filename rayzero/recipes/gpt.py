"""A small GPT: pre-norm blocks, rotary positions, GELU feed-forward. Small enough to read, real enough to learn."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayzero.errors import ConfigError
from rayzero.quantities import count
from rayzero.recipes.recipe import GPTConfig

INIT_STD = 0.02


def rotary_tables(seq_len: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (seq_len, head_dim / 2), fp32."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head's vector by its position's angles; ``x`` (batch, heads, seq, head_dim)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention over (batch, seq, dim)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` (batch, seq, dim) → the same shape."""
        batch, seq, dim = x.shape
        heads = self.qkv(x).view(batch, seq, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # (batch, heads, seq, head_dim)
        mixed = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return joined


class Block(nn.Module):
    """One transformer block; one unit."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = nn.Sequential()
        self.mlp.add_module("up", nn.Linear(config.dim, 4 * config.dim))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("down", nn.Linear(4 * config.dim, config.dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` (batch, seq, dim) → the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class GPT(nn.Module):
    """Tokens (batch, seq), int64 → logits (batch, seq, vocab_size)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        cos, sin = rotary_tables(config.seq_len, config.dim // config.num_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights, zero biases; what writes into the residual stream starts smaller, as in GPT-2."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, param in self.named_parameters():
            if param.dim() < 2:
                continue
            nn.init.normal_(param, std=residual_std if name.endswith(("out.weight", "down.weight")) else INIT_STD)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        seq = tokens.shape[1]
        if seq > self.config.seq_len:
            raise ConfigError(f"input has {count(seq, 'token')}, the model was built for seq_len {self.config.seq_len}")
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:seq], self.sin[:seq])
        logits: Tensor = self.head(self.norm(x))
        return logits
