"""What every process of a run can say about its host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rayzero.cluster.processes.owner_process import MemberProcess, OptimizerActor
from rayzero.cluster.processes.rank_worker import RankWorker

NOBODY = 65534


@contextmanager
def without_roots_rights() -> Iterator[None]:
    """Root may look into every folder."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("kind", [OptimizerActor, RankWorker])
def test_a_process_sees_what_it_may_look_at(kind: type[MemberProcess], tmp_path: Path) -> None:
    process = kind.__new__(kind)  # it may be no owner yet
    file, shut = tmp_path / "run.json", tmp_path / "shut"
    shut.mkdir()
    (shut / "run.json").touch()
    file.touch()
    assert process.sees(str(file))
    assert not process.sees(str(tmp_path / "other.json"))
    shut.chmod(0)
    with without_roots_rights():
        assert not process.sees(str(shut / "run.json"))
