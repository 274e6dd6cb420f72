"""A real vLLM follows a run: what it generates after an update is what one generates that is started from the export of
the same version. On CPUs, so experts are refused."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.convert.conversion import convert
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks
from tests.support import needs
from tests.support.waiting import until

from . import vllm_reader
from .zoo import batch, llama, mixtral, qwen3

LONG_S = 400.0  # its start takes 40 s of two cores

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1500), needs.shared_memory]

MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "tied": qwen3}
VERSIONS = 1, 2, 4


@pytest.mark.parametrize("name", MODELS)
def test_what_vllm_generates_is_what_a_fresh_one_does(name: str, vllms_python: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base: Any = MODELS[name]()
    base.save_pretrained(tmp_path / "start")
    tokens: dict[str, Any] = {}
    engines: list[subprocess.Popen[bytes]] = []

    def start(run: str) -> None:
        command = [vllms_python, vllm_reader.__file__, tmp_path / "start", run, tmp_path, *map(str, VERSIONS)]
        with (tmp_path / "log").open("w") as log:
            engines.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}))

    def take(version: int | str) -> None:
        path = tmp_path / f"tokens-{version}.json"
        until(lambda: path.exists() or engines[0].poll() not in (None, 0), LONG_S, f"no tokens of {version}")
        assert path.exists(), (tmp_path / "log").read_text()[-4000:]
        tokens[str(version)] = json.loads(path.read_text())

    def train(context: RankContext) -> None:
        torch.set_num_threads(1)
        model = copy.deepcopy(base)
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-2), ZeroConfig())
        if context.rank == 0:
            start(context.run)
            take("start")
        for step in range(VERSIONS[-1]):
            model(**batch(name, step, context.rank)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == VERSIONS[-1]:
                rayzero.save_checkpoint(optimizer, tmp_path / "checkpoint")
            if context.rank == 0 and step + 1 in VERSIONS:
                take(step + 1)

    try:
        run_ranks(train, 2, 2, "shm", stall_timeout=LONG_S)
        convert(tmp_path / "checkpoint", tmp_path / "export", config=tmp_path / "start" / "config.json")
        take("fresh")
        assert engines[0].wait(LONG_S) == 0
    finally:
        for engine in engines:
            engine.kill()
    assert tokens.pop("fresh") == tokens[str(VERSIONS[-1])]
    assert len({json.dumps(each) for each in tokens.values()}) == len(tokens), "every version says something else"


def test_experts_on_a_cpu_are_refused_by_name(vllms_python: Path, tmp_path: Path) -> None:
    """No run is there yet: it is refused before one is looked for."""
    model: Any = mixtral()
    model.save_pretrained(tmp_path / "start")
    command = [vllms_python, vllm_reader.__file__, tmp_path / "start", "none", tmp_path, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode != 0
    assert "on a CPU generates something else once a mixture of experts is reloaded" in done.stdout + done.stderr
