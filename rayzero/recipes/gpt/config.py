"""The shape of our GPT. Imports no torch: a recipe is checked before that."""

from __future__ import annotations

from dataclasses import dataclass

from rayzero.errors import ConfigError

__all__ = ["GPTConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a :class:`~rayzero.recipes.gpt.model.GPT`."""

    vocab_size: int
    seq_len: int  # longest input, in tokens
    num_layers: int
    num_heads: int
    dim: int
    tie_embeddings: bool = False  # the head's weight is the embedding's

    def __post_init__(self) -> None:
        for name in ("vocab_size", "seq_len", "num_layers", "num_heads", "dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ConfigError(
                f"dim {self.dim} must split into {self.num_heads} heads of an even size (rotary positions turn pairs)"
            )
