"""The model that a recipe names: our GPT, or a transformers model from its config file. And what it writes once it is
trained: continuations of prompts that it was not trained on, for people to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.errors import ConfigError
from rayzero.files import replace_file
from rayzero.quantities import count
from rayzero.recipes.data.batch import Corpus, Prompt
from rayzero.recipes.gpt import GPT
from rayzero.recipes.recipe import HF_PREFIX, RecipeConfig

SAMPLES = "samples.txt"


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
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as exc:
        raise ConfigError(f"model='hf:{path}' needs the hf extra: pip install 'rayzero[hf]'") from exc
    if not path.is_file():
        raise ConfigError(f"model: no such file {path}; give hf:<path of a transformers config.json>")
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
