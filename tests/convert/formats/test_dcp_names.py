"""DCP folders that torch wrote of models whose modules have the names of an optimizer's entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from rayzero.convert.conversion import convert
from rayzero.convert.formats.content import WEIGHT

from .foreign import read_all, refusal_of, same

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns that there is one process

NAMES = ("state", "param_groups", "model", "optimizer", "optim", "module", "app", "params", "step")


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ModuleDict({name: nn.ModuleDict({"fc": nn.Linear(2, 2)}) for name in NAMES})
    optimizer = torch.optim.AdamW(model.parameters())
    torch.stack([param.square().sum() for param in model.parameters()]).sum().backward()
    optimizer.step()
    return model, optimizer


def _save(folder: Path, state: Any, **options: Any) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    return folder


def _require_weights(folder: Path, model: nn.Module, **options: Any) -> dict[tuple[str, str], torch.Tensor]:
    _, found = read_all(folder, **options)
    weights = {name: value for (name, kind), value in found.items() if kind == WEIGHT}
    wanted = model.state_dict()
    assert weights.keys() == wanted.keys()
    assert [name for name in wanted if not same(weights[name], wanted[name])] == []
    return found


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("top", ["", "app"])
def test_no_name_of_a_module_is_taken_for_an_optimizers(tmp_path: Path, states: bool, flat: bool, top: str) -> None:
    model, optimizer = _trained()
    weights, optim = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    state = {"model": weights, "optim": optim}
    found = _require_weights(_save(tmp_path / "dcp", {top: state} if top else state), model, states=states)
    if states:
        for name, param in model.named_parameters():
            assert same(found[name, "exp_avg"], optimizer.state[param]["exp_avg"]), name


@pytest.mark.parametrize("flatten", [True, False])
def test_a_plain_state_dict(tmp_path: Path, flatten: bool) -> None:
    model, _ = _trained()
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    _require_weights(_save(tmp_path / "dcp", model.state_dict(), planner=planner), model)


def test_a_model_that_was_pickled_whole_is_refused(tmp_path: Path) -> None:
    model, _ = _trained()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    for weights_only in (False, True):
        folder = _save(tmp_path / f"dcp{weights_only}", {"model": model.state_dict()}, planner=planner)
        assert "no tensors of a model; it has 'model'" in refusal_of(folder, "hf", weights_only=weights_only)


def test_what_is_no_tensor_in_a_model_is_refused_by_name_or_left_out_with_the_states(tmp_path: Path) -> None:
    folder = _save(tmp_path / "dcp", {"model": {"w": torch.ones(2), "pair": (torch.ones(1),)}, "step": 1})
    assert "'pair' in its model's state dict, which is no tensor" in refusal_of(folder, "hf")
    done = convert(folder, tmp_path / "hf", to="hf", weights_only=True)
    assert done.content.left_out == ("model.pair", "step")


LOOP = {
    "step": 7,
    "scheduler": {"last_epoch": 3, "base_lrs": [0.1]},
    "loader": {"generator": torch.arange(9, dtype=torch.uint8)},
    "ema": {"model_ema": {"w": torch.ones(2)}},
}


@pytest.mark.parametrize("top", ["", "app"])
@pytest.mark.parametrize("optimizer", [True, False])
def test_what_lies_beside_the_model_is_named(tmp_path: Path, top: str, optimizer: bool) -> None:
    """A scheduler, a loader, averaged weights: no other format can hold them, and none is dropped unsaid."""
    model, optim = _trained()
    weights, states = get_state_dict(model, optim)
    state = {"model": weights, **({"optim": states} if optimizer else {}), **LOOP}
    folder = _save(tmp_path / "saved", {top: state} if top else state)
    names = tuple(f"{top}.{name}" if top else name for name in ("ema", "loader", "scheduler", "step"))
    for to in ("hf", "dcp", "rayzero"):
        done = convert(folder, tmp_path / to, to=to)
        assert done.content.left_out == names
        assert f"; left out: {', '.join(map(repr, names))}" in str(done)


def test_what_no_tensor_is_in_a_plain_state_dict_is_named(tmp_path: Path) -> None:
    folder = _save(tmp_path / "dcp", {"w": torch.ones(2), "step": 7, "scheduler": {"last_epoch": 3}})
    done = convert(folder, tmp_path / "hf", to="hf", weights_only=True)
    assert done.content.left_out == ("scheduler", "step")
    assert list(done.content.params) == ["w"]


def test_nothing_is_said_of_a_folder_that_is_carried_whole(tmp_path: Path) -> None:
    weights, states = get_state_dict(*_trained())
    done = convert(_save(tmp_path / "dcp", {"model": weights, "optim": states}), tmp_path / "again", to="dcp")
    assert done.content.left_out == ()
    assert "left out" not in str(done)
