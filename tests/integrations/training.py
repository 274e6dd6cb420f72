"""Models of Hugging Face that tests train, and what they generate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .zoo import VOCAB

adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True)


def build(make: Callable[..., nn.Module], **settings: Any) -> nn.Module:
    """A model from a seed, in the calling thread."""
    torch.manual_seed(0)
    return make(**settings)


def generate(model: Any, rank: int) -> Tensor:
    """Greedy sequences from a prompt whose length, as the number of new tokens, depends on the rank."""
    generator = torch.Generator().manual_seed(rank)
    prompt = torch.randint(2, VOCAB, (2, 3 + 4 * rank), generator=generator)
    training = model.training
    model.eval()
    result = model.generate(prompt, max_new_tokens=3 + 3 * rank, do_sample=False)
    model.train(training)
    return result
