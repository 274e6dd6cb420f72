"""Where ZeRO's stages put elements, in written-out numbers, and parameters that no partition holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rayzero.checkpoint import CheckpointReader
from rayzero.convert.conversion import convert
from rayzero.convert.formats.content import WEIGHT
from rayzero.convert.formats.deepspeed_reader import PartitionSegment, stage3_segments, stage12_segments
from rayzero.convert.formats.model_states import ModelStates
from rayzero.errors import CheckpointError

from .foreign import TWO, States, read_all, require_same, write_zero


def test_parameters_that_are_aligned_have_gaps_between_them() -> None:
    found = stage12_segments([{"a": (5,), "b": (4,)}], [[6], [6]], [[3, 0]])
    assert found == {"a": [PartitionSegment(0, 0, 0, 5)], "b": [PartitionSegment(1, 0, 2, 6)]}
    with pytest.raises(CheckpointError, match="2 parameters and 1 paddings"):
        stage12_segments([{"a": (5,), "b": (4,)}], [[6], [6]], [[3]])


@pytest.mark.parametrize("sizes", [[[5], [4]], [[5], [6]], [[4], [4]]])
def test_partitions_of_another_size(sizes: list[list[int]]) -> None:
    with pytest.raises(CheckpointError, match="its parameters need"):
        stage3_segments([{"a": (5,), "b": (2, 2)}], sizes)


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_stay_frozen_in_their_dtype(tmp_path: Path, stage: int) -> None:
    states, world = States.random(), 2
    folder = write_zero(tmp_path / "zero", states, stage, world, TWO)
    frozen = torch.arange(9, dtype=torch.bfloat16).view(3, 3)
    pieces = torch.nn.functional.pad(frozen.view(-1), (0, 1)).view(world, -1)
    for rank, path in enumerate(sorted(folder.glob("*_model_states.pt"))):
        model = torch.load(path, weights_only=True)
        fragment = pieces[rank].clone() if stage == 3 else frozen
        model |= {"frozen_param_shapes": {"base": frozen.shape}, "frozen_param_fragments": {"base": fragment}}
        torch.save(model, path.with_name("changed"))
        path.with_name("changed").replace(path)
    reader, found = read_all(folder)
    assert not reader.content.params["base"].trained
    assert list(reader.content.params) == [*(name for group in TWO for name in group), "base"]
    assert torch.equal(found.pop(("base", WEIGHT)), frozen.float())
    require_same(found, states)
    with CheckpointReader(convert(folder, tmp_path / "start", to="rayzero").path) as start:
        assert start.kinds("base") == ["compute"]
        assert torch.equal(start.read_slice("base", "compute", 0, 9), frozen.view(-1))


def test_steps_that_fp16_skipped_are_no_updates() -> None:
    states = ModelStates([{"global_steps": 30, "skipped_steps": 4}], sharded=False)
    assert (states.steps, states.updates) == (30, 26)


def test_other_names_that_only_deepspeed_lists_come_in_its_order() -> None:
    """And so does what is written: the same source gives the same files."""
    names = [f"head.{number}" for number in range(50)]
    states = ModelStates([{"param_shapes": [{"w": (2,)}], "shared_params": dict.fromkeys(names, "w")}], sharded=False)
    assert list(states.tied) == names
