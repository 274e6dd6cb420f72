"""Weights and moments go from any format to any other with every bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import rayzero
from rayzero.checkpoint import CheckpointReader
from rayzero.convert.conversion import convert
from rayzero.convert.formats import dcp_writer
from rayzero.convert.formats.content import WEIGHT

from .foreign import (
    MOMENTS,
    OPTIONS,
    SHAPES,
    TWO,
    UPDATES,
    States,
    read_all,
    require_same,
    same,
    write_grid,
    write_hf,
    write_zero,
)

SOURCES: dict[str, Callable[[Path, States], Path]] = {
    **{
        f"ZeRO-{stage} of {world}": lambda path, states, stage=stage, world=world: write_zero(
            path, states, stage, world, TWO
        )
        for stage in (1, 2, 3)
        for world in (1, 2, 3, 8)
    },
}


@pytest.mark.promise("exact", "checkpoints")
@pytest.mark.parametrize("source", SOURCES)
def test_deepspeed_reads_bit_equal(tmp_path: Path, states: States, source: str) -> None:
    reader, found = read_all(SOURCES[source](tmp_path / "global_step30", states))
    require_same(found, states)
    assert {param.updates for param in reader.content.params.values()} == {UPDATES}
    assert reader.content.tied == {"head.weight": "embed.weight"}
    assert reader.content.step == UPDATES


@pytest.mark.parametrize("num_files", [1, 3])
def test_hugging_face_reads_bit_equal(tmp_path: Path, states: States, num_files: int) -> None:
    _, found = read_all(write_hf(tmp_path / "hf", states, num_files))
    require_same(found, states, [WEIGHT])


@pytest.mark.parametrize("cuts", [1, 2, 3, 7])
def test_a_mesh_of_dcp_chunks_reads_bit_equal(tmp_path: Path, states: States, cuts: int) -> None:
    _, found = read_all(write_grid(tmp_path / "dcp", states.of(WEIGHT) | states.buffers, cuts))
    require_same(found, states, [WEIGHT])


@pytest.mark.parametrize("source", ["ZeRO-3 of 3", "ZeRO-2 of 2"])
@pytest.mark.parametrize("ways", [["dcp"], ["rayzero"], ["dcp", "rayzero"], ["rayzero", "dcp", "rayzero"]])
def test_moments_survive_every_way(tmp_path: Path, states: States, source: str, ways: list[str]) -> None:
    path = SOURCES[source](tmp_path / "source", states)
    for number, way in enumerate(ways):
        path = convert(path, tmp_path / f"{number}", to=way, max_bytes=3000).path
    reader, found = read_all(path)
    if "dcp" in ways:  # DCP has no ties: both names have the values
        assert same(found["head.weight", WEIGHT], states.values["embed.weight", WEIGHT])
    require_same({key: value for key, value in found.items() if key[0] != "head.weight"}, states)
    assert reader.content.params["w"].updates == UPDATES
    assert dict(reader.content.groups[0].options) == OPTIONS


@pytest.mark.parametrize("max_bytes", [1, 3000, 1 << 30])
def test_hugging_face_files_hold_the_weights_for_any_size_of_a_file(
    tmp_path: Path, states: States, max_bytes: int
) -> None:
    source = write_zero(tmp_path / "zero", states, 3, 2, TWO)
    done = convert(source, tmp_path / "hf", to="hf", max_bytes=max_bytes)
    files = sorted(done.path.glob("*.safetensors"))
    loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    wanted = states.of(WEIGHT) | states.buffers
    wanted["head.weight"] = wanted["embed.weight"]
    assert loaded.keys() == wanted.keys()
    assert all(same(loaded[name], wanted[name]) for name in wanted)
    assert len(files) == {1: len(wanted), 3000: 2, 1 << 30: 1}[max_bytes]
    assert not done.states


def test_a_cast_rounds_weights_and_nothing_else(tmp_path: Path, states: States) -> None:
    source = write_zero(tmp_path / "source", states, 2, 2, TWO)
    convert(source, tmp_path / "dcp", to="dcp", dtype=torch.bfloat16)
    reader, found = read_all(tmp_path / "dcp")
    assert reader.content.params["w"].decl.dtype == "bfloat16"
    assert same(found["w", WEIGHT], states.values["w", WEIGHT].bfloat16().float())
    assert same(found["w", "exp_avg"], states.values["w", "exp_avg"])
    assert same(found["count", WEIGHT], states.buffers["count"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("elements", [1 << 20, 50])
def test_torch_loads_a_dcp_folder_and_turns_it_into_a_file(
    tmp_path: Path, states: States, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose tensors are in many chunks."""
    monkeypatch.setattr(dcp_writer, "PART", elements)
    folder = convert(write_zero(tmp_path / "zero", states, 2, 2, TWO), tmp_path / "dcp", to="dcp", max_bytes=2000).path
    target: dict[str, Any] = {
        "model": {name: torch.zeros(shape) for name, shape in SHAPES.items()},
        "optim": {
            "state": {n: {k: torch.zeros(s) for k in MOMENTS} | {"step": torch.zeros(())} for n, s in SHAPES.items()},
            "param_groups": [{**dict.fromkeys(OPTIONS, 0.0), "params": group} for group in TWO],
        },
    }
    dcp.load(target, checkpoint_id=folder, no_dist=True)
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for held in (target, whole):
        for name in SHAPES:
            assert same(held["model"][name], states.values[name, WEIGHT])
            assert all(same(held["optim"]["state"][name][kind], states.values[name, kind]) for kind in MOMENTS)
            assert held["optim"]["state"][name]["step"] == UPDATES
        assert held["optim"]["param_groups"] == [{**OPTIONS, "params": group} for group in TWO]
    assert len(list(folder.glob("*.distcp"))) > 1


def test_weights_alone_begin_with_adams_zeros(tmp_path: Path, states: States) -> None:
    convert(write_hf(tmp_path / "hf", states, 2), tmp_path / "start", to="rayzero")
    with CheckpointReader(tmp_path / "start") as reader:
        reader.verify()
        assert reader.step == 0
        assert reader.slot_step("w") == 0
        assert reader.read_slice("w", "exp_avg", 0, 17 * 19).count_nonzero() == 0
        assert same(reader.read_slice("w", "master", 0, 17 * 19).view(17, 19), states.values["w", WEIGHT])
        assert same(reader.buffers()["count"], states.buffers["count"])


def test_a_checkpoint_of_owners_passes_through(tmp_path: Path, states: States) -> None:
    first = convert(write_zero(tmp_path / "source", states, 2, 2, TWO), tmp_path / "one", to="rayzero").path
    many = convert(first, tmp_path / "many", to="rayzero", max_bytes=1000).path
    with CheckpointReader(first) as one, CheckpointReader(many) as other:
        other.verify()
        assert one.digest == other.digest
        assert len(other.manifest.owner_files) > len(one.manifest.owner_files) == 1


def test_tracked_objects_that_no_other_format_holds_are_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()), rayzero.ZeroConfig())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    rayzero.track(scheduler=scheduler)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    rayzero.save_checkpoint(optimizer, tmp_path / "step-000001")
    done = convert(tmp_path / "step-000001", tmp_path / "hf", to="hf")
    assert done.content.left_out == ("scheduler",)
    assert "; left out: 'scheduler'" in str(done)
