"""What a trained model writes: continuations of prompts that it was not trained on, for people to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rayzero.files import replace_file
from rayzero.recipes.data.batch import Corpus, Prompt
from rayzero.recipes.model import logits_of

SAMPLES = "samples.txt"


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, how the model goes on, and how the data does."""

    prompt: str
    written: str
    reference: str | None


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Prompt, *, tokens: int, window: int, temperature: float, device: torch.device
) -> list[int]:
    """At most so many tokens after a prompt, without those of its stop; the model sees the last ``window`` ones.
    ``temperature`` 0: always the likeliest token. The same tokens each time. No cache: each token is one forward."""
    generator = torch.Generator().manual_seed(0)
    known, stop, written = list(prompt.tokens) or [0], list(prompt.stop), list[int]()
    while len(written) < tokens:
        inputs = torch.tensor([(known + written)[-window:]], device=device, dtype=torch.int64)
        last = logits_of(model(inputs))[0, -1].float().cpu()
        if temperature == 0:
            written.append(int(last.argmax()))
        else:
            written.append(int(torch.multinomial((last / temperature).softmax(0), 1, generator=generator)))
        if stop and written[-len(stop) :] == stop:
            return written[: -len(stop)]
    return written


def samples_of(corpus: Corpus, texts: Sequence[str], write: Callable[[Prompt], list[int]]) -> list[Sample]:
    """What ``write`` makes of the prompts."""
    decode = corpus.tokenizer.decode
    return [Sample(one.shown, decode(write(one)), one.reference) for one in corpus.prompts(texts)]


def write_samples(run_dir: Path, step: int, samples: Sequence[Sample]) -> Path:
    """Write them for people. Raises OSError."""
    blocks = [f"after step {step}"]
    for one in samples:
        blocks.append(f"--- prompt\n{one.prompt}\n--- the model writes\n{one.written}")
        if one.reference is not None:
            blocks.append(f"--- the data has\n{one.reference}")
    path = run_dir / SAMPLES
    replace_file(path, "\n".join(blocks) + "\n")
    return path
