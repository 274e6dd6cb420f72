"""Saving, resuming and exporting where that cannot be: one line that says why, and nothing lost or left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.checkpoint import CheckpointReader, staging_path, write_rank_state, write_tensors
from rayzero.checkpoint import writer as writer_module
from rayzero.checkpoint.manifest import MANIFEST
from rayzero.checkpoint.tensor_file import DeferredTensor
from rayzero.checkpoint.writer import withdraw
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import CheckpointError, ConfigError, RayZeroError, UnsupportedError


def prepared(model: nn.Module, cls: Any = torch.optim.AdamW, **options: Any) -> rayzero.ZeroOptimizer:
    """The optimizer of a prepared model; its run is that of the context."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return rayzero.prepare(model, cls(trained, **{"lr": 1e-3} | options), ZeroConfig())[1]


def one_step(model: nn.Module, optimizer: rayzero.ZeroOptimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def one_line(caught: pytest.ExceptionInfo[RayZeroError]) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- where a checkpoint cannot be put


@pytest.mark.parametrize("target", ["folder", "empty", "file", "file/x", "file/deep/x", "link"])
def test_what_is_not_a_checkpoint_is_never_replaced(tmp_path: Path, target: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("data")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    before = sorted(tmp_path.rglob("*"))
    with running_in(RankContext()):
        optimizer = prepared(nn.Linear(4, 4))
        with pytest.raises(CheckpointError, match="cannot save to") as caught:
            rayzero.save_checkpoint(optimizer, tmp_path / target, {})
        one_line(caught)
        assert sorted(tmp_path.rglob("*")) == before
        rayzero.save_checkpoint(optimizer, tmp_path / "good", {})  # the run goes on
        rayzero.save_checkpoint(optimizer, tmp_path / "good", {})  # a checkpoint may be replaced
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "years"


def test_a_commit_over_something_else_is_refused_and_what_was_staged_is_gone(written, directory):
    owners, ranks = written.stage(directory)
    directory.mkdir()
    (directory / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is a folder that is not a checkpoint") as caught:
        written.commit(directory, owners, ranks)
    one_line(caught)
    assert [path.name for path in directory.parent.rglob("*")] == ["step-000030", "notes"]


def test_a_parent_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with running_in(RankContext()):
        optimizer = prepared(nn.Linear(4, 4))
        with pytest.raises(CheckpointError, match=r"cannot (save to|write) /proc/nowhere"):
            rayzero.save_checkpoint(optimizer, "/proc/nowhere/step-000000", {})


# ---- what a failed save leaves


def test_a_commit_that_fails_leaves_no_staging_directory(written, directory):
    before = written.save(directory).digest
    owners, ranks = written.stage(directory)
    with pytest.raises(CheckpointError, match="not complete"):
        written.commit(directory, owners[:1], ranks)
    assert [path.name for path in directory.parent.iterdir()] == ["step-000030"]
    assert CheckpointReader(directory).digest == before


def test_a_file_that_cannot_be_written_leaves_no_staging_directory(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="safetensors files cannot hold"):
        write_rank_state(staging_path(tmp_path / "ck"), 0, {}, {"x": torch.zeros(2, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


def test_a_file_may_be_begun_while_another_withdraws_the_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, mkdir, times = staging_path(tmp_path / "ck"), Path.mkdir, iter(range(2))

    def mkdir_and_withdraw(path: Path, *args: Any, **options: Any) -> None:
        mkdir(path, *args, **options)
        if next(times, None) is not None:
            withdraw(staging / "rank-0001.safetensors")

    monkeypatch.setattr(Path, "mkdir", mkdir_and_withdraw)
    entry = write_rank_state(staging, 0, {}, {})
    withdraw(staging / "rank-0001.safetensors")
    assert [path.name for path in staging.iterdir()] == [entry.name]


@pytest.mark.parametrize(("point", "left"), [("_take_staged", False), ("_check_staged", True)])
def test_a_file_that_is_withdrawn_during_the_commit_is_part_of_it_or_stops_it(
    written, directory, monkeypatch: pytest.MonkeyPatch, point: str, left: bool
) -> None:
    """Its rank gave up waiting, at the worst moments."""
    owners, ranks = written.stage(directory)
    usual = getattr(writer_module, point)

    def withdraw_first(*args: Any) -> Any:
        withdraw(staging_path(directory) / ranks[0].name)
        return usual(*args)

    monkeypatch.setattr(writer_module, point, withdraw_first)
    if left:
        written.commit(directory, owners, ranks)
        CheckpointReader(directory).verify()
    else:
        with pytest.raises(CheckpointError, match=r"rank-0000.safetensors should have .* it is not there"):
            written.commit(directory, owners, ranks)
    assert [path.name for path in directory.parent.iterdir()] == [directory.name] * left


def test_a_file_that_is_written_again_during_the_commit_is_whole_in_it(written, directory):
    """A rank that has come back stages its file again; the owners may have written theirs meanwhile."""
    owners, ranks = written.stage(directory)
    staged, again = staging_path(directory) / ranks[0].name, []

    def commit() -> torch.Tensor:
        if not again:
            again.append(written.commit(directory, owners, ranks))
        return torch.zeros(3)

    tensor = DeferredTensor(numel=3, dtype=torch.float32, make=commit)
    entry = write_tensors(staging_path(directory), ranks[0].name, {"a": tensor}, {})
    assert (len(again), staged.stat().st_size) == (1, entry.size_bytes)
    assert (directory / ranks[0].name).stat().st_size == ranks[0].size_bytes
    assert sorted(path.name for path in directory.iterdir()) == sorted(
        [MANIFEST, *(each.name for each in (*owners, *ranks))]
    )
    withdraw(staged)
    assert list(directory.parent.iterdir()) == [directory]


def test_a_save_that_the_lead_refuses_leaves_no_staging_directory(tmp_path: Path) -> None:
    with running_in(RankContext()):
        optimizer = prepared(nn.Linear(4, 4))
        optimizer.engine.close()
        with pytest.raises(RayZeroError):
            rayzero.save_checkpoint(optimizer, tmp_path / "ck", {})
    assert not list(tmp_path.iterdir())


# ---- what save_checkpoint and begin_checkpoint take


@pytest.mark.parametrize("function", [rayzero.save_checkpoint, rayzero.begin_checkpoint])
def test_another_optimizer_and_other_arguments_are_refused_by_name(tmp_path: Path, function: Any) -> None:
    name = function.__name__
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(UnsupportedError, match=rf"^{name} takes .* got torch.optim.sgd.SGD") as caught:
        function(plain, tmp_path / "ck", {})
    one_line(caught)
    with running_in(RankContext()):
        optimizer = prepared(nn.Linear(4, 4))
        for given, message in (
            ({"loop_state": None}, f"loop_state of {name} is NoneType; pass a dict"),
            ({"loop_state": []}, f"loop_state of {name} is list; pass a dict"),
            ({"keep_last": 0}, f"keep_last of {name} is 0; pass a number of checkpoints"),
            ({"keep_last": "2"}, f"keep_last of {name} is '2'; pass a number of checkpoints"),
            ({"keep_last": 1, "keep_every": True}, f"keep_every of {name} is True; pass a number of steps"),
            ({"keep_every": 2}, f"keep_every of {name} is 2, but .* pass both"),
            ({"upload_to": "here"}, f"upload_to of {name} is 'here'; pass a URL"),
        ):
            with pytest.raises(ConfigError, match=f"^{message}") as refused:
                function(optimizer, tmp_path / "ck", **given)
            one_line(refused)
        with pytest.raises(ConfigError, match=rf"^{name} writes to a folder, not to 's3://b/ck'"):
            function(optimizer, "s3://b/ck")
    assert not list(tmp_path.iterdir())


# ---- another model, another optimizer


def mlp(hidden: int = 8, *, bias: bool = True, frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 4, bias=bias))
    model[0].weight.requires_grad_(not frozen)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with running_in(RankContext()):
        model = mlp()
        optimizer = prepared(model)
        one_step(model, optimizer)
        rayzero.save_checkpoint(optimizer, tmp_path / "ck", {})
    return tmp_path / "ck"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({"hidden": 6}, {}, r"'0.weight' has shape \(8, 4\) in .*/ck, but \(6, 4\) in the model"),
        ({"hidden": 16}, {}, r"'0.weight' has shape \(8, 4\) in .*/ck, but \(16, 4\) in the model"),
        ({"bias": False}, {}, r"/ck has a parameter '1.bias' of shape \(4,\), but the model has none"),
        ({"frozen": True}, {}, r"'0.weight' is trained in .*/ck, but frozen in this run"),
        (
            {},
            {"cls": torch.optim.Adam},
            "with optimizer 'torch.optim.adamw:AdamW', but this run has 'torch.optim.adam:A",
        ),
        (
            {},
            {"cls": torch.optim.SGD},
            "with optimizer 'torch.optim.adamw:AdamW', but this run has 'torch.optim.sgd:SGD'",
        ),
        ({}, {"amsgrad": True}, r"states \['exp_avg', 'exp_avg_sq'\] of '0..*', but this run keeps .*'max_exp_avg_sq'"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(checkpoint: Path, model, options, message) -> None:
    with running_in(RankContext(resume=checkpoint)), pytest.raises(CheckpointError, match=message) as caught:
        prepared(mlp(**model), **options)
    one_line(caught)


def test_a_parameter_that_the_checkpoint_lacks_is_named(checkpoint: Path) -> None:
    model = mlp()
    model.append(nn.Linear(4, 3))
    message = r"has no parameter '2.weight', which the model has with shape \(3, 4\)"
    with running_in(RankContext(resume=checkpoint)), pytest.raises(CheckpointError, match=message):
        prepared(model)


def test_states_of_a_generic_optimizer_must_be_the_same(tmp_path: Path) -> None:
    """The class creates them itself, so they are known only once it has."""
    with running_in(RankContext()):
        model = mlp()
        optimizer = prepared(model, torch.optim.SGD)
        one_step(model, optimizer)
        rayzero.save_checkpoint(optimizer, tmp_path / "ck", {})
    message = r"states \[\] of '0.*', but this run keeps \['momentum_buffer'\]"
    with running_in(RankContext(resume=tmp_path / "ck")), pytest.raises(CheckpointError, match=message):
        prepared(mlp(), torch.optim.SGD, momentum=0.9)


def test_options_and_groups_may_differ(checkpoint: Path) -> None:
    with running_in(RankContext(resume=checkpoint)):
        model = mlp()
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
        _, optimizer = rayzero.prepare(model, torch.optim.AdamW(groups, lr=0.1), ZeroConfig())
        one_step(model, optimizer)
        info = rayzero.save_checkpoint(optimizer, checkpoint.with_name("next"), {})
    assert info.step == 2
    assert CheckpointReader(checkpoint.with_name("next")).slot_step("1.bias") == 2
