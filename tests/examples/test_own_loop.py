"""The loop of docs/howto/own_loop.md: killed and started again, it ends with the bits of one that never stopped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rayzero.engine.context import RankContext, running_in

pytestmark = pytest.mark.thorough

PAGE = Path(__file__).parents[2] / "docs/howto/own_loop.md"


class Killed(Exception):
    pass


def loop() -> str:
    block = re.search(r"```python title=\"loop.py\"\n(from pathlib.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    shorter = block[1].replace("1000", "12").replace("% 100 ==", "% 3 ==")
    assert shorter.count("12") == 2
    return shorter


def run(kill_at: int | None = None) -> dict[str, Tensor]:
    """The loop in a process of its own, as far as RayZero can tell."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 16))

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        if step == kill_at:
            raise Killed
        generator = torch.Generator().manual_seed(step)
        for _ in range(4):
            tokens = torch.randint(16, (2, 9), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]

    with running_in(RankContext()):
        names: dict[str, dict[str, Tensor]] = {"model": model, "batches": batches}  # type: ignore[dict-item]
        exec(loop(), names)
        return names["weights"]


def test_the_loop_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    expected = run()
    (tmp_path / "parts").mkdir()
    monkeypatch.chdir(tmp_path / "parts")
    for kill_at in (2, 8, 11):
        with pytest.raises(Killed):
            run(kill_at)
    state = run()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert sorted(path.name for path in Path("runs/mine/checkpoints").iterdir()) == [
        "step-000006",
        "step-000009",
        "step-000012",
    ]
