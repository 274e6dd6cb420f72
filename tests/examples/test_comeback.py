"""A rank that runs an example and dies in the middle of it ends with the bits of one that did not."""

from __future__ import annotations

import functools
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.context import RankContext
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.testing import run_ranks

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_with_trainers"), pytest.mark.thorough]
EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 6


def example(context: RankContext, name: str, settings: tuple[str, ...], at: tuple[int, ...]) -> Any:
    """Run an example's main(); the weights that it asked for. Each life of the rank dies in the next one of ``at``:
    before that step's optimizer.step(), or after it if the number is negative."""
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    fatal = at[context.life] if context.life < len(at) else None
    step, full_state_dict, asked = ZeroOptimizer.step, rayzero.full_state_dict, []

    def dies(optimizer: ZeroOptimizer, *args: Any) -> Any:
        done = context.step
        if done == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        value = step(optimizer, *args)
        if fatal is not None and done == -fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    def records(model: Any) -> dict[str, Tensor]:
        asked.append(full_state_dict(model))
        return asked[-1]

    ZeroOptimizer.step, rayzero.full_state_dict = dies, records  # type: ignore[method-assign]
    sys.argv = [name, "--steps", str(STEPS), *settings]
    runpy.run_path(str(EXAMPLES / name))["main"]()
    return context.life, asked[-1]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("plain_loop.py", ("--blocks", "2")), ("lora.py", ("--blocks", "2")), ("hf_finetune.py", ("--layers", "1"))],
)
def test_it_repeats_its_step(name: str, settings: tuple[str, ...]) -> None:
    def run(*at: int) -> Any:
        one = functools.partial(example, name=name, settings=settings, at=at)
        (found,) = run_ranks(one, 1, 1, "grpc", True, stall_timeout=60.0, max_failures=len(at))
        return found

    (_, plain), (life, again) = run(), run(2, -3, -5)
    assert life == 3
    assert all(torch.equal(again[key], value) for key, value in plain.items())
