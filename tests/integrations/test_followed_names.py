"""A follower gives the names, shapes and bits of the folder that is exported of the same version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

import rayzero
from rayzero import ZeroConfig
from rayzero.convert.conversion import convert
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks
from tests.support import needs

from .zoo import llama, mixtral, qwen3, vit

pytestmark = needs.shared_memory


@pytest.mark.spread(2)
@pytest.mark.parametrize("build", [mixtral, qwen3, vit, llama], ids=["experts", "tied", "renamed", "as they are"])
def test_a_version_has_the_names_shapes_and_bits_of_its_export(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    base, target = build(), build().bfloat16()
    assert isinstance(base, PreTrainedModel)
    base.config.save_pretrained(tmp_path)

    def train(context: RankContext) -> None:
        model, optimizer = rayzero.prepare(
            base, torch.optim.SGD(base.parameters(), lr=0.1), ZeroConfig(precision="bf16", shard_bytes="32KiB")
        )
        sum(parameter.float().square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
        rayzero.save_checkpoint(optimizer, tmp_path / "step-1")
        convert(tmp_path / "step-1", tmp_path / "hf", dtype=torch.bfloat16)
        exported = load_file(tmp_path / "hf" / "model.safetensors")
        follower = rayzero.follow(context.run, config=tmp_path / "config.json")
        followed = dict(follower.read(1))
        assert followed.keys() == exported.keys() == follower.declared.keys()
        for name, tensor in exported.items():
            assert followed[name].dtype == tensor.dtype, name
            assert torch.equal(followed[name], tensor), name
        assert follower.into(target) == 1  # under the names of its parameters
        whole = rayzero.full_state_dict(model)
        assert all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in target.named_parameters())

    run_ranks(train, 1, 2, "shm")
