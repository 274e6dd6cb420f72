"""A checkpoint that an earlier commit wrote (1b1d54c: two ranks, two owners over gRPC, bf16) resumes bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks

from .kept_model import prepared, seen, steps

KEPT = Path(__file__).with_name("kept")
BF16 = ZeroConfig(precision="bf16")


def _content(checkpoint: Path) -> str:
    return str(json.loads((checkpoint / "manifest.json").read_text())["digest"])


@pytest.mark.parametrize(("owners", "transport"), [(1, "inproc"), (3, "grpc")])
def test_it_resumes_with_every_value_it_was_saved_with(owners: int, transport: Any, tmp_path: Path) -> None:
    def resumed(ctx: RankContext) -> dict[str, Any]:
        model, optimizer, schedule = prepared(ctx)
        found = seen(model, optimizer, schedule)
        assert ctx.loop_state is not None
        rayzero.save_checkpoint(optimizer, tmp_path / "again", ctx.loop_state)
        steps(model, optimizer, schedule, 3, 4, ctx.rank)
        return found

    found, _ = run_ranks(resumed, 2, owners, transport, config=BF16, resume=KEPT / "step-000003")
    assert json.loads(json.dumps(found)) == json.loads((KEPT / "values.json").read_text())
    assert _content(tmp_path / "again") == _content(KEPT / "step-000003")
