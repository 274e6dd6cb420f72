"""Folders that DeepSpeed 0.19.8 wrote: every value arrives under its name, or the folder is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rayzero
from rayzero.convert.conversion import convert
from rayzero.convert.formats.content import WEIGHT
from rayzero.convert.formats.pickles import load_torch_file

from .foreign import read_all, refusal_of, same
from .real_deepspeed import CASES, TAG, Case, Held, Small, groups_of, held_in, unpack

REFUSED = {
    "zero3-loose": "no values of 'loose'",
    "zero3-loose-universal": "no values of 'loose'",
    "zero3-excluded-tied": "no values of 'again.weight', 'again.bias'",
    "zero2-round-robin-universal": "ds_to_universal mixes parameters up",
}
STATES_REFUSED = "do not say which parameters they are of"
ALL = [name for case, how in CASES.items() for name in (case, f"{case}-universal")[: 1 + how.universal]]
READ = [name for name in ALL if name not in (*REFUSED, "zero1-excluded-tied", "zero2-extra", "zero0-fp32")]


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
    # stages 0 and 1 have no list of what is frozen, and that of stage 2 has parameters without elements, too
    told = {"loose"} if stage > 1 else set()
    assert {name for name, param in content.params.items() if param.trained} == trained | (told & set(wanted.loose))
    # round_robin_gradients changes a group's order
    assert [sorted(group.params) for group in content.groups] == [sorted(group["params"]) for group in wanted.groups]
    for group, options in zip(content.groups, wanted.groups, strict=True):
        assert {key: group.options[key] for key in ("lr", "weight_decay")} == {
            key: options[key] for key in ("lr", "weight_decay")
        }
        assert list(group.options["betas"]) == options["betas"]


@pytest.mark.parametrize(
    "name", ["zero0-fp16", "zero0-fp32-named", "zero1-bf16-optimizer", "zero2-fp16", "zero3", "zero3-universal"]
)
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
    assert done.content.left_out == ("down._extra_state",)


def test_stage_0_in_fp32_gives_its_weights_and_refuses_states_that_are_nobodys(folders: Path, tmp_path: Path) -> None:
    """Its optimizer numbers the parameters, and nothing says which number a name has."""
    folder = folders / "zero0-fp32" / TAG
    assert STATES_REFUSED in refusal_of(folder, "hf")
    wanted = {name: tensor for (name, kind), tensor in held(folders, "zero0-fp32").values.items() if kind == WEIGHT}
    _, found = read_all(folder, states=False)
    assert {name for name, _ in found} == wanted.keys()
    assert [name for (name, _), tensor in found.items() if not same(tensor, wanted[name].to(tensor.dtype))] == []
    assert STATES_REFUSED in refusal_of(folders / "zero0-fp32")
    start = convert(folder, tmp_path / "start", to="rayzero", weights_only=True).path
    model = Small(case_of("zero0-fp32"))
    config = rayzero.ZeroConfig(precision="fp32")
    model, _ = rayzero.prepare(model, torch.optim.AdamW(groups_of(model)), config, weights=start)
    weights = rayzero.full_state_dict(model)
    assert [name for name in wanted if not same(weights[name], wanted[name])] == []


def _flat(file: dict[str, Any]) -> None:
    saved = file["optimizer"]
    saved["fp32_groups_flat"] = [torch.cat([m.view(-1) for m in group]) for group in saved.pop("fp32_groups")]


def _equal(file: dict[str, Any]) -> None:
    """A parameter that no optimizer has gets the bits of one that it trains."""
    file["module"]["base.bias"] = file["module"]["scale"].clone()


def _unequal(file: dict[str, Any]) -> None:
    file["module"]["scale"] += 1


def _lost(file: dict[str, Any]) -> None:
    """As in a folder of stage 1 whose optimizer files are missing."""
    file["optimizer"], file["ds_config"]["zero_optimization"]["stage"] = None, 1


def _foreign(file: dict[str, Any]) -> None:
    file["optimizer"] = {"onebit": 1}


def _fewer(file: dict[str, Any]) -> None:
    file["optimizer"]["fp32_groups"][0].pop()


EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "flat": (_flat, "in one flat vector"),
    "equal": (_equal, "'scale', 'base.bias' have equal values"),
    "unequal": (_unequal, "rounds to no parameter of its module"),
    "lost": (_lost, "no *_optim_states.pt"),
    "foreign": (_foreign, "its optimizer has 'onebit'"),
    "fewer": (_fewer, "do not fit each other"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_folder_of_stage_0_that_does_not_say_whose_masters_are_is_refused(
    folders: Path, tmp_path: Path, edit: str
) -> None:
    change, says = EDITS[edit]
    name = "mp_rank_00_model_states.pt"
    file = load_torch_file(folders / "zero0-bf16" / TAG / name)
    change(file)
    (tmp_path / TAG).mkdir()
    torch.save(file, tmp_path / TAG / name)
    for weights_only in (False, True):
        assert says in refusal_of(tmp_path / TAG, "hf", weights_only=weights_only)


@pytest.mark.parametrize("name", ["zero0-fp16", "zero2-client"])
def test_what_the_loop_saved_beside_the_model_is_named(folders: Path, tmp_path: Path, name: str) -> None:
    done = convert(folders / name / TAG, tmp_path / "hf", to="hf")
    assert done.content.left_out == ("epoch", "lr_scheduler", "sampler")
    assert "; left out: 'epoch', 'lr_scheduler', 'sampler'" in str(done)


@pytest.mark.parametrize("name", ["zero1", "zero1-universal", "zero3", "zero3-universal"])
def test_nothing_is_said_of_a_folder_that_is_carried_whole(folders: Path, name: str) -> None:
    assert read_all(folders / name / TAG)[0].content.left_out == ()
