"""Every host with ranks has an owner: where none has shards there, a door, from the first step on, and after every
change of the owners."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import seeded

import rayzero
from rayzero import ZeroConfig
from rayzero.elastic.reform import hosts_without_owner, with_doors
from rayzero.engine.context import RankContext
from rayzero.layout.shard_map import Rescale
from rayzero.protocol.ownership import Ownership
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.store.owner.memory.slabs import is_control
from rayzero.testing import run_ranks
from tests.support import needs

from .disturbed import OWNERS_ELSEWHERE, another_host
from .test_scaling_cases import UNITS, Small, Training, assert_same

needs_memory = needs.shared_memory

# ---- the decision


@pytest.mark.parametrize(
    ("ranks", "owners", "doors"),
    [("aabb", "ab", []), ("aabb", "b", ["a"]), ("cabca", "b", ["c", "a"]), ("ab", "dd", ["a", "b"]), ("", "a", [])],
)
def test_a_host_with_ranks_and_no_owner_gets_a_door(ranks: str, owners: str, doors: list[str]) -> None:
    assert hosts_without_owner(ranks, owners) == doors


TWO_AND_A_DOOR = Ownership(3, doors=1)


@pytest.mark.parametrize(
    ("before", "there", "former", "owners", "change", "joining"),
    [
        # two owners and the door of c; the third owner is on another host, so the door's number moves
        (TWO_AND_A_DOOR, "abc", (0, 1, None), "abd", Rescale((0, 1, None, None), 1), {3: "c"}),
        # the third owner is on the door's host: the door parts
        (TWO_AND_A_DOOR, "abc", (0, 1, None), "abc", Rescale((0, 1, None)), {}),
        # the owner of b parts with its shards, and gives its CPUs to others; the door of c stays
        (TWO_AND_A_DOOR, "abc", (0,), "a", Rescale((0, None, 2), 2), {1: "b"}),
        # no rank's host is without an owner before, and one is afterwards
        (Ownership(3), "abc", (0, 1), "ab", Rescale((0, 1, None), 1), {2: "c"}),
        # a stale request names the door as an owner that stays
        (TWO_AND_A_DOOR, "abc", (0, 1, 2), "abc", Rescale((0, 1, None)), {}),
        # all owners move together
        (TWO_AND_A_DOOR, "abc", (None, None), "cc", Rescale((None, None, None, None), 2), {2: "a", 3: "b"}),
    ],
)
def test_a_change_keeps_an_owner_on_every_host_with_ranks(
    before: Ownership,
    there: str,
    former: tuple[int | None, ...],
    owners: str,
    change: Rescale,
    joining: dict[int, str],
) -> None:
    assert with_doors(Rescale(former), owners, ranks="abc", there=there, before=before) == (change, joining)


# ---- with processes


def owners_of(run: str, directory: Path, epoch: int = 0) -> set[int]:
    """The owners of an epoch that have a control slab there."""
    found = [slab.header for slab in list_slabs(directory) if slab.header is not None]
    return {each.facts.index for each in found if each.facts.run == run and is_control(each.facts, epoch)}


@dataclass(frozen=True)
class Watched:
    """A training that looks at the owners of rank 1's host at the end."""

    training: Training
    host: Path
    epoch: int  # the last one

    def __call__(self, context: RankContext) -> Any:
        return self.training(context), sorted(owners_of(context.run, self.host, self.epoch))


def training_of(folder: Path, **wanted: int) -> Training:
    """``wanted``: owners by step, "step_3"."""
    config = ZeroConfig(units=UNITS)
    steps = {int(step.removeprefix("step_")): owners for step, owners in wanted.items()}
    return Training(base=seeded(Small, 3), folder=folder, wanted=steps, config=config)


@needs_memory
@pytest.mark.spread(1)
@pytest.mark.parametrize("processes", [False, True])
def test_a_host_of_ranks_has_a_door_and_owners_on_another_host_write_the_checkpoint(
    tmp_path: Path, processes: bool
) -> None:
    with another_host(*OWNERS_ELSEWHERE) as hosts:
        loop = functools.partial(save, folder=tmp_path)
        found = run_ranks(loop, 2, 2, "shm", processes, hosts=hosts)
    assert found == [[2], [2]]
    assert sorted(file.name for file in (tmp_path / "saved").glob("owner-*")) == [
        "owner-000.safetensors",
        "owner-001.safetensors",
    ]


def save(context: RankContext, folder: Path) -> list[int]:
    base = seeded(Small, 3)
    _, optimizer = rayzero.prepare(base, torch.optim.AdamW(base.parameters()), ZeroConfig(units=UNITS))
    rayzero.save_checkpoint(optimizer, folder / "saved")
    return sorted(owners_of(context.run, SHARED_MEMORY))


@needs_memory
@pytest.mark.promise("scalable", "hosts")
@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("wanted", "there"),
    [({"step_2": 1}, [1]), ({"step_2": 3, "step_5": 1}, [1]), ({"step_2": 1, "step_5": 2}, [1])],
    ids=["an owner becomes a door", "two processes part", "an owner becomes a door and an owner again"],
)
def test_after_a_change_every_host_with_ranks_has_an_owner(
    wanted: dict[str, int], there: list[int], tmp_path: Path
) -> None:
    with another_host("optimizer 1", "rank 1") as hosts:
        loop = Watched(training_of(tmp_path, **wanted), hosts["rank 1"], epoch=len(wanted))
        found = run_ranks(loop, 2, 2, "shm", True, max_failures=1, hosts=hosts, run_dir=tmp_path, stall_timeout=60.0)
    assert [owners for _, owners in found] == [there, there]
    assert_same([states for states, _ in found], run_ranks(training_of(tmp_path), 2, 2))
