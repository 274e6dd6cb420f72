"""The model that a recipe names: our GPT (pre-norm blocks, rotary positions, GELU feed-forward; small enough to read,
real enough to learn), or a transformers model from its config file. And what it writes once it is trained:
continuations of prompts that it was not trained on, for people to see."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayzero.errors import ConfigError
from rayzero.files import replace_file
from rayzero.quantities import count
from rayzero.recipes.data.text import Corpus, Prompt
from rayzero.recipes.recipe import HF_PREFIX, GPTConfig, RecipeConfig

SAMPLES = "samples.txt"
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


# ---- the model a recipe names ---------------------------------------------------------------------------------------


def build_model(recipe: RecipeConfig, vocab_size: int) -> nn.Module:
    """A model with the same weights on every rank: they come from ``recipe.seed`` alone.

    Raises ConfigError when a transformers config is missing, unknown, or too small for the text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if recipe.model.startswith(HF_PREFIX):
            return _build_hf(Path(recipe.model.removeprefix(HF_PREFIX)), recipe.seq_len, vocab_size)
        return GPT(recipe.gpt(vocab_size))


def logits_of(output: Any) -> Tensor:
    """Logits (batch, seq, vocabulary) from a model's output, plain or with a ``logits`` field."""
    logits = output if isinstance(output, Tensor) else output.logits
    if not isinstance(logits, Tensor):
        raise ConfigError(f"the model returned {type(output).__name__} without a tensor of logits")
    return logits


def _build_hf(path: Path, seq_len: int, vocab_size: int) -> nn.Module:
    if not path.is_file():  # said first: the import takes seconds
        raise ConfigError(f"model: no such file {path}; give hf:<path of a transformers config.json>")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as exc:
        raise ConfigError(f"model='hf:{path}' needs the hf extra: pip install 'rayzero[hf]'") from exc
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        _check_hf_sizes(config, path, seq_len, vocab_size)
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as exc:
        first = str(exc).strip().partition("\n")[0] or type(exc).__name__
        raise ConfigError(f"model: {path} is not the config of a causal language model: {first}") from exc
    return model


def _check_hf_sizes(config: Any, path: Path, seq_len: int, vocab_size: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < seq_len:
        raise ConfigError(f"model: {path} has {positions} positions, but seq_len is {seq_len}; lower seq_len")
    if config.vocab_size < vocab_size:
        raise ConfigError(
            f"model: {path} has vocab_size {config.vocab_size}, the tokenizer has {count(vocab_size, 'token')}"
        )


# ---- what it writes ---------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(model: nn.Module, prompt: Prompt, recipe: RecipeConfig, device: torch.device) -> list[int]:
    """The tokens that follow a prompt, without those of its stop; the model sees the last ``seq_len`` ones. The same
    tokens each time. No cache: each token is one forward."""
    temperature = recipe.sample_temperature
    generator = torch.Generator().manual_seed(0)
    known, stop, written = list(prompt.tokens) or [0], list(prompt.stop), list[int]()
    while len(written) < recipe.sample_tokens:
        inputs = torch.tensor([(known + written)[-recipe.seq_len :]], device=device, dtype=torch.int64)
        last = logits_of(model(inputs))[0, -1].float().cpu()
        if temperature == 0:
            written.append(int(last.argmax()))
        else:
            written.append(int(torch.multinomial((last / temperature).softmax(0), 1, generator=generator)))
        if stop and written[-len(stop) :] == stop:
            return written[: -len(stop)]
    return written


def write_samples(path: Path, model: nn.Module, corpus: Corpus, recipe: RecipeConfig, device: torch.device) -> None:
    """Write, for people, how the model goes on from the recipe's prompts, and how the data does. Raises OSError."""
    blocks = [f"after step {recipe.steps}"]
    for prompt in corpus.prompts(recipe.sample_prompts):
        written = corpus.tokenizer.decode(generate(model, prompt, recipe, device))
        blocks.append(f"--- prompt\n{prompt.shown}\n--- the model writes\n{written}")
        if prompt.reference is not None:
            blocks.append(f"--- the data has\n{prompt.reference}")
    replace_file(path, "\n".join(blocks) + "\n")
