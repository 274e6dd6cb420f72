"""Hugging Face models' own switches change nothing: activation checkpointing, dropout; and they load back.

What they train and generate is in tests/programs/test_hf.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import tight
from torch import Tensor, nn

import rayzero
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks

from .training import adamw, build
from .zoo import MODELS, batch, gpt2

STEPS = 3


def set_up(model: nn.Module, reentrant: bool | None) -> None:
    """``reentrant``: how activation checkpointing does it, None for none."""
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(5)


def step_through(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        model(**batch("gpt2", step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_dropout_draws_what_it_draws_unsharded_also_when_activations_are_recomputed(reentrant: bool | None) -> None:
    base = build(gpt2, dropout=0.3, attn_implementation="eager").train()

    def train(context: RankContext) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        set_up(model, reentrant)
        config = tight(model, prefetch_buffer_size=1, spare=0)
        model, optimizer = rayzero.prepare(model, adamw(model.parameters()), config)
        verbs: list[str] = []
        optimizer.engine.cache.observers.append(lambda verb, unit: verbs.append(verb))
        step_through(model, optimizer)
        assert verbs.count("reshard") > 3 * STEPS, "units come and go"
        return rayzero.full_state_dict(model)

    (found,) = run_ranks(train, 1, 2)
    plain = copy.deepcopy(base)
    set_up(plain, reentrant)
    step_through(plain, adamw(plain.parameters()))
    for name, expected in plain.state_dict().items():
        most = float(expected.abs().max())
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6 * most, msg=name)


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
