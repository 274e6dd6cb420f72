"""A small model's states, written as K owners would write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rayzero.checkpoint import commit_checkpoint, owner_file_name, staging_path, write_rank_state, write_tensors
from rayzero.layout.model_layout import ModelLayout, UnitLayout, lay_out_unit
from rayzero.protocol.messages import COMPUTE, MASTER, CheckpointInfo, FileEntry, ModelSpec

STATES = (MASTER, "exp_avg", "exp_avg_sq")


def small_layout(shard_numel: int = 128, precision: torch.dtype = torch.float32) -> ModelLayout:
    """Matrices across shards, odd sizes, a 0-dim and an empty parameter, and frozen units, one with a master."""
    first = lay_out_unit(0, "embed", precision, True, [("embed.weight", (10, 30))])
    second = lay_out_unit(1, "block", precision, True, [("w", (17, 19)), ("b", (7,)), ("scale", ()), ("none", (0, 3))])
    frozen = lay_out_unit(2, "block:frozen", torch.bfloat16, False, [("frozen", (9, 9))])
    params = [("exact", (5, 40)), ("none_exact", (0,))]
    exact = lay_out_unit(3, "block:frozen:master", torch.bfloat16, False, params, frozen_master=True)
    return ModelLayout(units=(first, second, frozen, exact), shard_numel=shard_numel)


def kinds_of(unit: UnitLayout) -> tuple[str, ...]:
    """What an owner stores of a unit."""
    return STATES if unit.trainable else (MASTER,) if unit.frozen_master else (COMPUTE,)


def random_values(layout: ModelLayout, seed: int = 0) -> dict[tuple[str, str], Tensor]:
    """(parameter, kind) -> flat values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (slot.name, kind): torch.randn(math.prod(slot.shape), generator=generator).to(unit.initial_dtype)
        for unit in layout.units
        for slot in unit.slots
        for kind in kinds_of(unit)
    }


@dataclass
class Written:
    """A model's values and how to write them."""

    layout: ModelLayout
    values: dict[tuple[str, str], Tensor]
    buffers: dict[str, Tensor] = field(default_factory=lambda: {"running_mean": torch.tensor([1.5, -2.0])})
    tied: dict[str, str] = field(default_factory=lambda: {"head.weight": "embed.weight"})

    @property
    def spec(self) -> ModelSpec:
        """What ranks of this model would have sent."""
        groups = tuple(tuple(0 for _ in unit.slots) for unit in self.layout.units)
        return ModelSpec(
            run="r", layout=self.layout, world_size=1, optimizer="torch.optim.adamw:AdamW", hyper=({"lr": 1e-3},),
            group_of=groups,
        )  # fmt: skip

    def owner_tensors(self, owner: int, num_owners: int, step: int) -> tuple[dict[str, Tensor], dict[str, dict]]:
        """One owner's pieces: every ``num_owners``-th shard."""
        tensors: dict[str, Tensor] = {}
        content: dict[str, dict] = {}
        for shard in self.layout.shards[owner::num_owners]:
            unit = self.layout.units[shard.unit]
            for part in self.layout.slices(shard):
                slot = unit.slots[part.slot]
                start, stop = part.param_start, part.param_start + part.numel
                for kind in kinds_of(unit):
                    name = f"{slot.name}/{kind}/{start}"
                    tensors[name] = self.values[slot.name, kind][start:stop]
                    content[name] = {
                        "param": slot.name, "kind": kind, "start": start, "stop": stop, "shape": list(slot.shape),
                        "step": step,
                    }  # fmt: skip
        return tensors, content

    def stage(self, directory: Path, num_owners: int = 2, step: int = 30) -> tuple[list[FileEntry], list[FileEntry]]:
        """Write every file but the manifest."""
        staging = staging_path(directory)
        owners = [
            write_tensors(staging, owner_file_name(k), *self.owner_tensors(k, num_owners, step))
            for k in range(num_owners)
        ]
        rank = write_rank_state(
            staging, 0, {"step": step, "note": "π"}, {"rng": torch.arange(5)}, buffers=self.buffers, tied=self.tied
        )
        return owners, [rank]

    def save(self, directory: Path, num_owners: int = 2, step: int = 30) -> CheckpointInfo:
        """A complete checkpoint."""
        owners, ranks = self.stage(directory, num_owners, step)
        return self.commit(directory, owners, ranks, step)

    def commit(
        self, directory: Path, owners: Sequence[FileEntry], ranks: Sequence[FileEntry], step: int = 30
    ) -> CheckpointInfo:
        """The manifest and the rename."""
        return commit_checkpoint(
            directory, step=step, spec=self.spec, hyper=self.spec.hyper, slot_steps={}, owner_files=owners,
            rank_files=ranks,
        )  # fmt: skip


def require_one_line(error: Exception) -> str:
    """The message of an error, which is one line."""
    assert "\n" not in str(error)
    return str(error)


@pytest.fixture
def written() -> Written:
    layout = small_layout()
    return Written(layout, random_values(layout))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "step-000030"
