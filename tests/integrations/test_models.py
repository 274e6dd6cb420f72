"""Hugging Face models' own switches change nothing: activation checkpointing, caches, dropout; and they load back.

What they train and generate is in tests/programs/test_hf.py."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from engine.models import tight
from torch import Tensor, nn

import rayzero
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks

from .training import Setup, adamw, assert_equal, build, train, unsharded
from .zoo import GENERATING, MODELS, batch, gpt2


def checkpointing(model: nn.Module, *, reentrant: bool) -> None:
    model.activation_checkpointing_enable({"use_reentrant": reentrant})


@pytest.mark.spread(1)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_activation_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    base = build(MODELS[name], attn_implementation="eager").train()
    setup: Setup = partial(checkpointing, reentrant=reentrant)
    ranks = run_ranks(lambda ctx: train(ctx, base, name, setup=setup), 2, 1)
    assert_equal(ranks, unsharded(base, name, world_size=2, setup=setup))


def without_cache(model: nn.Module) -> None:
    model.config.use_cache = False
    model.generation_config.use_cache = False


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", GENERATING)
def test_generates_the_same_without_a_cache(name: str) -> None:
    base = build(MODELS[name]).train()
    ranks = run_ranks(lambda ctx: train(ctx, base, name, setup=without_cache), 2, 1)
    assert_equal(ranks, unsharded(base, name, world_size=2, setup=without_cache))


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_dropout_draws_what_it_draws_unsharded(reentrant: bool | None) -> None:
    base = build(gpt2, dropout=0.3).train()

    def setup(model: nn.Module) -> None:
        if reentrant is not None:
            checkpointing(model, reentrant=reentrant)
        torch.manual_seed(5)

    ranks = run_ranks(lambda ctx: train(ctx, base, "gpt2", setup=setup), 1, 2)
    assert_equal(ranks, unsharded(base, "gpt2", world_size=1, setup=setup))


# ---- on disk ----------------------------------------------------------------------------------------------------


@pytest.mark.spread(4)
@pytest.mark.parametrize("name", MODELS)
def test_what_was_saved_loads_with_from_pretrained(name: str, tmp_path: Path) -> None:
    """Masters with ``save_pretrained(state_dict=...)``; without it the weights the model computes with."""
    base = build(MODELS[name]).train()

    def loop(ctx: RankContext) -> Tensor:
        model = copy.deepcopy(base)
        config = tight(model, prefetch_buffer_size=1, spare=0, precision="bf16")
        model, optimizer = rayzero.prepare(model, adamw(model.parameters()), config)
        model(**batch(name, 0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.save_pretrained(tmp_path / "masters", state_dict=rayzero.full_state_dict(model))
        model.save_pretrained(tmp_path / "weights")
        torch.save(rayzero.full_state_dict(model), tmp_path / "state.pt")
        with torch.no_grad():
            return model.eval()(**batch(name, 1)).logits

    (logits,) = run_ranks(loop, 1, 2)
    inputs = batch(name, 1)
    with torch.no_grad():
        plain = copy.deepcopy(base).eval()
        plain.load_state_dict(torch.load(tmp_path / "state.pt"))
        masters = type(base).from_pretrained(tmp_path / "masters", dtype=torch.float32)
        assert torch.equal(masters(**inputs).logits, plain(**inputs).logits)
        weights = type(base).from_pretrained(tmp_path / "weights")
        assert weights.dtype == torch.bfloat16
        rounded = {key: x.bfloat16() if x.is_floating_point() else x for key, x in inputs.items()}
        assert torch.equal(weights(**rounded).logits, logits)
