"""The unigram baseline, which a language model must beat: it knows only how often each token occurs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_MOST = 1 << 28  # tokens: these say enough of how often each occurs, and a mapped file may have any number
_PART = 1 << 24  # tokens; bincount widens them to int64: 128 MiB at once


def unigram_log_probs(tokens: Tensor, vocab_size: int) -> Tensor:
    """Natural logs of the tokens' shares in the training text, with add-one smoothing: (vocab_size,), fp64."""
    counts = torch.zeros(vocab_size, dtype=torch.float64, device="cpu")
    for start in range(0, min(len(tokens), _MOST), _PART):
        part = tokens[start : start + _PART]
        counts += torch.bincount(part.long() & 0xFFFF if part.dtype == torch.int16 else part, minlength=vocab_size)
    counts += 1
    return (counts / counts.sum()).log()


def unigram_loss(log_probs: Tensor, targets: Iterable[Tensor]) -> float:
    """Mean negative log-likelihood of the targets in nats, as cross-entropy counts it."""
    total, count = 0.0, 0
    for batch in targets:
        total -= float(log_probs[batch].sum())
        count += batch.numel()
    return total / count
