"""Owners are killed while ranks clip, discard, write, average and save: the lead's successor hears again what only its
predecessor knew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.writer import staging_path, write_rank_state
from rayzero.protocol.messages import COMPUTE, MeanInput
from tests.support import needs

from .deaths import Run, differing, disturbed, random_kills, undisturbed
from .test_succession import CLIP, gradients, spec_of
from .toy import WAIT, Rank

STEPS = 18
SHARES = {"shm": (True, True), "grpc": (False, False), "mixed": (True, False)}
pytestmark = needs.signals_between_processes


class Loop:
    """A loop whose steps use everything that ranks ask the lead for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, rank: Rank) -> list[Any]:
        rank.fetch()
        return [getattr(self, kind)(rank) for kind in self.kinds(rank.step)]

    @staticmethod
    def kinds(step: int) -> tuple[str, ...]:
        """What a step does."""
        return (
            ("mean", "push", "finish"),
            ("write", "write_more", "push", "mean", "finish"),
            ("save", "mean", "push", "finish"),
            ("push", "clip", "discard", "push", "finish"),
            ("push", "clip", "discard", "push", "clip", "discard", "push", "clip", "commit"),
            ("mean", "mean", "push", "clip", "commit"),
        )[step % 6]

    def finish(self, rank: Rank) -> float:
        return rank.finish(CLIP).result(WAIT).total

    def commit(self, rank: Rank) -> float:
        return rank.commit(CLIP).result(WAIT).norm

    def push(self, rank: Rank) -> None:
        grads = gradients(rank.step, rank.rank)
        rank.push(grads, [u.index for u in rank.spec.layout.units if any(slot.name in grads for slot in u.slots)])

    def clip(self, rank: Rank) -> float:
        return rank.ask_norm().result(WAIT).total

    def discard(self, rank: Rank) -> None:
        rank.discard().result(WAIT)

    def mean(self, rank: Rank) -> tuple[float, ...]:
        given = MeanInput(names=(), shape=(), values=(rank.step * 0.1 + rank.rank,), weight=1.0 + rank.rank)
        return rank.store.mean(given).result(WAIT)

    def write(self, rank: Rank, unit: int = 0, scale: float = 0.01) -> None:
        layout = rank.spec.layout.units[unit]
        values = torch.full((layout.numel,), scale * rank.step, dtype=layout.dtype)
        rank.store.write(unit, rank.step, COMPUTE, values).result(WAIT)

    def write_more(self, rank: Rank) -> None:
        self.write(rank, 0, 0.02)
        self.write(rank, 1, 0.03)

    def save(self, rank: Rank) -> tuple[int, str]:
        directory = self._directory / f"step-{rank.step}"
        file = write_rank_state(staging_path(directory), rank.rank, {"step": rank.step}, {})
        info = rank.store.save(rank.step, directory, (file,)).result(WAIT)
        with CheckpointReader(directory) as reader:
            assert reader.step == rank.step
        return info.step, info.digest


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return undisturbed(spec_of("undisturbed"), STEPS, Loop(tmp_path_factory.mktemp("saved")))


@pytest.mark.spread(1)
@pytest.mark.parametrize(("seed", "ranks", "num_owners"), [(0, "shm", 2), (1, "grpc", 2), (2, "mixed", 1)])
def test_no_call_is_lost_with_an_owner(
    seed: int, ranks: str, num_owners: int, expected: Run, slab_dir: Path, tmp_path: Path
) -> None:
    spec = spec_of(f"called{seed}")
    kills = random_kills(seed, num_owners, STEPS, 3)
    found = disturbed(slab_dir, spec, STEPS, Loop(tmp_path), kills, num_owners=num_owners, shares=SHARES[ranks])
    assert differing(spec, found, expected) == []
    assert len(found.pauses) == len(kills)
