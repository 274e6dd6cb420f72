"""A rank that dies inside Lightning's ``fit()``: refused by name, unless nothing was decided yet."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from engine.models import same_bits

import rayzero
from rayzero.engine.context import RankContext
from rayzero.errors import StateLostError
from rayzero.testing import run_ranks

from .test_lightning import Learner, loader, state_of, trainer, zero
from .test_lightning import pytestmark as filters

pytestmark = [*filters, pytest.mark.usefixtures("forked_with_trainers"), pytest.mark.thorough]


class Mortal(Learner):
    """Rank 1's process is killed in the first life, as batch ``at`` begins or ends."""

    def __init__(self, context: RankContext, at: int, when: str, tracks: bool) -> None:
        super().__init__()
        self.fatal = when if context.rank == 1 and context.life == 0 else ""
        self.at, self.tracks = at, tracks

    def on_train_start(self) -> None:
        if self.tracks:
            rayzero.track()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self._reach("begin", index)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self._reach("end", index)

    def _reach(self, when: str, index: int) -> None:
        if self.fatal == when and index == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(context: RankContext, folder: Path, at: int = -1, when: str = "begin", tracks: bool = False) -> Any:
    module = Mortal(context, at, when, tracks)
    trainer(strategy=zero(), default_root_dir=folder, max_epochs=1).fit(module, loader())
    return context.life, state_of(module)


def run(**settings: Any) -> Any:
    return run_ranks(functools.partial(fit, **settings), 2, 2, "grpc", True, stall_timeout=60.0, max_failures=1)


@pytest.mark.parametrize("tracks", [False, True])
def test_a_rank_that_has_stepped_is_refused_by_name(tracks: bool, tmp_path: Path) -> None:
    with pytest.raises(StateLostError, match=r"rank 1 has died .* Lightning's fit\(\) .*fit\(ckpt_path=\."):
        run(folder=tmp_path, at=2, tracks=tracks)


@pytest.mark.parametrize(("when", "tracks"), [("begin", False), ("end", True)])
def test_a_rank_repeats_the_first_step(when: str, tracks: bool, tmp_path: Path) -> None:
    plain = run(folder=tmp_path)
    again = run(folder=tmp_path, at=0, when=when, tracks=tracks)
    assert [life for life, _ in again] == [0, 1]
    assert all(same_bits(mine, other) for (_, mine), (_, other) in zip(again, plain, strict=True))
