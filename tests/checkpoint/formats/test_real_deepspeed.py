"""Folders that DeepSpeed 0.19.8 wrote: every value arrives under its name, or the folder is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import rayzero
from rayzero.checkpoint.convert import convert
from rayzero.checkpoint.formats.content import WEIGHT

from .foreign import read_all, refusal_of, same
from .real_deepspeed import CASES, TAG, Case, Held, Small, groups_of, held_in, unpack

REFUSED = {
    "zero3-loose": "no values of 'loose'",
    "zero3-loose-universal": "no values of 'loose'",
    "zero3-excluded-tied": "no values of 'again.weight', 'again.bias'",
    "zero2-round-robin-universal": "ds_to_universal mixes parameters up",
}
ALL = [name for case, how in CASES.items() for name in (case, f"{case}-universal")[: 1 + how.universal]]
READ = [name for name in ALL if name not in (*REFUSED, "zero1-excluded-tied", "zero2-extra")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("deepspeed"))


def case_of(name: str) -> Case:
    return CASES[name.removesuffix("-universal")]


def held(folders: Path, name: str) -> Held:
    """What the folder must hold: without what DeepSpeed was told to leave out."""
    found, case = held_in(folders / name), case_of(name)
    if case.excluded:
        found = found.without(found.frozen)
    if case.amsgrad and name.endswith("universal"):
        found = found.without(["max_exp_avg_sq"])
    return found


@pytest.mark.parametrize("name", READ)
def test_every_value_arrives(folders: Path, name: str) -> None:
    wanted = held(folders, name)
    reader, found = read_all(folders / name / TAG)
    content, stage = reader.content, case_of(name).stage
    assert found.keys() == wanted.values.keys()
    assert [key for key in found if not same(found[key], wanted.values[key].to(found[key].dtype))] == []
    assert all(found[name, WEIGHT].dtype == wanted.values[name, WEIGHT].dtype for name in wanted.buffers)
    assert content.tied == wanted.tied
    assert content.buffers.keys() == set(wanted.buffers)
    trained = {name for group in wanted.groups for name in group["params"]}
    assert {n: (p.updates, p.decl.dtype) for n, p in content.params.items() if n in trained} == dict.fromkeys(
        trained, (wanted.updates, "float32")
    )
    dtypes = {n: wanted.values[n, WEIGHT].dtype for n in {*wanted.frozen, *wanted.loose}}
    assert {n: p.decl.torch_dtype(n) for n, p in content.params.items() if n not in trained} == dtypes
    # stage 1 has no list of what is frozen, and that of stage 2 has parameters without elements, too
    told = {"loose"} if stage > 1 else set()
    assert {name for name, param in content.params.items() if param.trained} == trained | (told & set(wanted.loose))
    # round_robin_gradients changes a group's order
    assert [sorted(group.params) for group in content.groups] == [sorted(group["params"]) for group in wanted.groups]
    for group, options in zip(content.groups, wanted.groups, strict=True):
        assert {key: group.options[key] for key in ("lr", "weight_decay")} == {
            key: options[key] for key in ("lr", "weight_decay")
        }
        assert list(group.options["betas"]) == options["betas"]


@pytest.mark.parametrize("name", ["zero1", "zero1-universal", "zero1-excluded", "zero2", "zero3", "zero3-universal"])
def test_hugging_face_gets_every_tensor(folders: Path, tmp_path: Path, name: str) -> None:
    wanted = held(folders, name)
    loaded = load_file(convert(folders / name / TAG, tmp_path / "hf", to="hf").path / "model.safetensors")
    weights = {n: tensor for (n, kind), tensor in wanted.values.items() if kind == WEIGHT}
    weights |= {alias: weights[n] for alias, n in wanted.tied.items()}
    assert loaded.keys() == weights.keys()
    assert [n for n in loaded if not same(loaded[n], weights[n])] == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["zero1", "zero2-universal", "zero3-universal"])
def test_dcp_gets_every_tensor(folders: Path, tmp_path: Path, name: str) -> None:
    wanted = held(folders, name)
    path = convert(folders / name / TAG, tmp_path / "dcp", to="dcp").path
    target = {
        "model": {n: torch.zeros_like(t) for (n, kind), t in wanted.values.items() if kind == WEIGHT},
        "optim": {"state": {n: {k: torch.zeros_like(t)} for (n, k), t in wanted.values.items() if k == "exp_avg_sq"}},
    }
    dcp.load(target, checkpoint_id=path, no_dist=True)
    for (n, kind), tensor in wanted.values.items():
        if kind == WEIGHT:
            assert same(target["model"][n], tensor), n
        if kind == "exp_avg_sq":
            assert same(target["optim"]["state"][n][kind], tensor), n


@pytest.mark.parametrize("name", ["zero1-bf16-optimizer", "zero2-fp16", "zero3", "zero3-universal"])
def test_a_run_resumes_with_every_value(folders: Path, tmp_path: Path, name: str) -> None:
    wanted, case = held(folders, name), case_of(name)
    start = convert(folders / name / TAG, tmp_path / "start", to="rayzero").path
    torch.manual_seed(7)
    model = Small(case)
    optimizer = torch.optim.AdamW(groups_of(model), lr=5.0)
    model, optimizer = rayzero.prepare(model, optimizer, rayzero.ZeroConfig(precision="bf16"), resume=start)
    weights = rayzero.full_state_dict(model)
    for n in {n for n, kind in wanted.values if kind == WEIGHT}:
        assert same(weights[n], wanted.values[n, WEIGHT].to(weights[n].dtype)), n
    assert same(weights["head.weight"], wanted.values["embed.weight", WEIGHT])
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 2e-3]
    states = optimizer.state_dict()["state"]
    order = [n for group in wanted.groups for n in group["params"]]
    for number, n in enumerate(order):
        assert states[number]["step"] == wanted.updates
        for kind in ("exp_avg", "exp_avg_sq"):
            assert same(states[number][kind], wanted.values[n, kind]), (n, kind)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("weights_only", [False, True])
def test_what_is_nowhere_or_mixed_up_is_refused_by_name(folders: Path, name: str, weights_only: bool) -> None:
    assert REFUSED[name] in refusal_of(folders / name / TAG, "hf", weights_only=weights_only)


def test_every_case_is_in_the_archive(folders: Path) -> None:
    assert {path.name for path in folders.iterdir()} == set(ALL)


def test_a_second_name_of_what_was_left_out_keeps_its_values(folders: Path) -> None:
    """exclude_frozen_parameters leaves a frozen parameter's first name out, and not its others."""
    whole = held_in(folders / "zero1-excluded-tied")
    _, found = read_all(folders / "zero1-excluded-tied" / TAG)
    assert same(found["again.weight", WEIGHT], whole.values["base.weight", WEIGHT].float())


def test_an_extra_state_is_refused_by_name_or_left_out_with_the_states(folders: Path, tmp_path: Path) -> None:
    folder = folders / "zero2-extra" / TAG
    assert "'down._extra_state' in its state dict, which is no tensor" in refusal_of(folder, "hf")
    done = convert(folder, tmp_path / "hf", to="hf", weights_only=True)
    assert "down.weight" in done.content.params
