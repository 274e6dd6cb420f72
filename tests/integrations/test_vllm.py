"""A real vLLM follows a run: after an update it generates the tokens, with the probabilities, of one that is started
from the export of the same version. It reads whole weights in the memory of its host, or gets over the network what
changed."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from followers.on_network import describe
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.convert.conversion import convert
from rayzero.engine.context import RankContext
from rayzero.engine.prepare import COMPUTE_DTYPES
from rayzero.owner.changes import Change, ChangeLog, Form
from rayzero.testing import run_ranks
from tests.support import needs
from tests.support.waiting import until

from . import vllm_reader
from .zoo import batch, llama, mixtral, qwen3

LONG_S = 400.0  # its start takes 40 s of two cores

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1500), needs.shared_memory]

MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "tied": qwen3, "mixtral": mixtral}
VERSIONS = 1, 2, 4  # see vllm_reader.py
WAYS = {  # transport, precision, a rate at which most 16-bit weights stay what they are
    "whole": ("shm", "fp32", 3e-2),
    "changes": ("grpc", "bf16", 1e-5),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_what_vllm_generates_is_what_a_fresh_one_does(
    name: str, way: str, vllms_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    transport, precision, rate = WAYS[way]
    given: list[Change] = []  # to vLLM
    since = ChangeLog.since

    def noted(log: ChangeLog, *args: int) -> Sequence[Change] | None:
        found = since(log, *args)
        given.extend(found or ())
        return found

    monkeypatch.setattr(ChangeLog, "since", noted)
    base: Any = MODELS[name]()
    base.save_pretrained(tmp_path / "start")
    tokens: dict[str, Any] = {}
    engines: list[subprocess.Popen[bytes]] = []

    def start(run: str) -> None:
        command = [vllms_python, vllm_reader.__file__, tmp_path / "start", run, tmp_path, *map(str, VERSIONS)]
        with (tmp_path / "log").open("w") as log:
            engines.append(
                subprocess.Popen(
                    command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True
                )
            )

    def take(version: int | str) -> None:
        path = tmp_path / f"tokens-{version}.json"
        until(lambda: path.exists() or engines[0].poll() not in (None, 0), LONG_S, f"no tokens of {version}")
        assert path.exists(), (tmp_path / "log").read_text()[-4000:]
        tokens[str(version)] = json.loads(path.read_text())

    def train(context: RankContext) -> None:
        torch.set_num_threads(1)
        model = copy.deepcopy(base)
        config = ZeroConfig(precision=precision)
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=rate), config)
        if context.rank == 0:
            if way == "changes":
                describe(context, tmp_path)
            start(str(tmp_path) if way == "changes" else context.run)
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
        run_ranks(train, 2, 2, transport, stall_timeout=LONG_S)
        dtype, config = COMPUTE_DTYPES[precision], tmp_path / "start" / "config.json"
        convert(tmp_path / "checkpoint", tmp_path / "export", dtype=dtype, config=config)
        take("fresh")
        assert engines[0].wait(LONG_S) == 0
    finally:
        for engine in engines:
            with suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)  # its workers, too
            engine.wait(LONG_S)
    expected, updated = tokens.pop("fresh"), tokens[str(VERSIONS[-1])]
    for fresh, found in zip(expected, updated, strict=True):
        assert [token for token, _ in found] == [token for token, _ in fresh]
        assert [logprob for _, logprob in found] == pytest.approx([logprob for _, logprob in fresh], abs=1e-4)
    assert len({json.dumps(each) for each in tokens.values()}) == len(tokens), "every version says something else"
    assert any(change.form is Form.POSITIONS for change in given) == (way == "changes")


QUANTIZED = """
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from rayzero.integrations.vllm import InitInfo, RayZeroEngine

experts = torch.nn.Module.__new__(RoutedExperts)
torch.nn.Module.__init__(experts)
experts.quant_method = torch.nn.Identity()
config = SimpleNamespace(parallel_config=None, model_config=None)
RayZeroEngine(None, config, torch.device("cpu"), torch.nn.ModuleList([experts])).init_transfer_engine(InitInfo("none"))
"""


def test_quantized_experts_on_a_cpu_are_refused_by_name(vllms_python: Path) -> None:
    """No run is there yet: it is refused before one is looked for."""
    done = subprocess.run([vllms_python, "-c", QUANTIZED], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert "UnsupportedError: experts on a CPU are updated only unquantized, and vLLM has Identity" in done.stderr
