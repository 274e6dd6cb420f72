"""Exports of a checkpoint: complete, bounded, cast as asked, and never to a place where something else is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint.conftest import STATES, Written, random_values, require_one_line
from checkpoint.test_refusals import one_step, prepared
from checkpoint.test_round_trip import flip_byte
from safetensors.torch import load_file
from torch import nn

import rayzero
from rayzero.checkpoint import CheckpointReader
from rayzero.cli.convert import convert, export
from rayzero.convert.conversion import export_full
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import CheckpointError
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.protocol.messages import COMPUTE, MASTER


class Tied(nn.Module):
    """A tied head, a persistent and a non-persistent buffer, a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def write_model(model: nn.Module, directory: Path) -> None:
    params = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    layout = ModelLayout(units=(lay_out_unit(0, "", torch.float32, True, params),), shard_numel=64)
    values = random_values(layout)
    values |= {(name, MASTER): param.detach().reshape(-1) for name, param in model.named_parameters()}
    tied = {"head.weight": "embed.weight"}
    Written(layout, values, buffers=dict(model.named_buffers()) | {}, tied=tied).save(directory)


def test_an_export_loads_strictly_into_the_plain_model(directory, tmp_path):
    torch.manual_seed(1)
    model = Tied()
    model.norm.running_mean.normal_()
    del model._buffers["scratch"]
    write_model(model, directory)
    out = export_full(directory, tmp_path / "out")
    assert out == tmp_path / "out" / "model.safetensors"
    fresh = Tied()
    fresh.load_state_dict(load_file(out), strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name


def test_an_export_casts_trained_parameters_only(written, directory, tmp_path):
    written.save(directory)
    exported = load_file(export_full(directory, tmp_path / "half.safetensors", dtype=torch.bfloat16))
    assert torch.equal(exported["w"], written.values["w", MASTER].view(17, 19).bfloat16())
    assert torch.equal(exported["frozen"], written.values["frozen", COMPUTE].view(9, 9))
    assert exported["running_mean"].dtype == torch.float32
    assert exported["none"].shape == (0, 3)
    assert exported["scale"].shape == ()


def test_a_buffer_with_the_name_of_a_parameter_is_exported_as_it_is(written, directory, tmp_path):
    written.buffers["w"] = torch.arange(3)
    written.save(directory)
    exported = load_file(export_full(directory, tmp_path / "half.safetensors", dtype=torch.bfloat16))
    assert exported["w"].dtype == torch.int64
    assert torch.equal(exported["w"], torch.arange(3))


def test_an_export_overwrites_only_when_asked(written, directory, tmp_path):
    written.save(directory)
    out = tmp_path / "model.safetensors"
    out.write_bytes(b"precious")
    with pytest.raises(CheckpointError, match=r"model\.safetensors exists"):
        export_full(directory, out)
    assert out.read_bytes() == b"precious"
    export_full(directory, out, overwrite=True)
    assert len(load_file(out)) == 10


def test_a_failed_export_leaves_nothing(written, directory, tmp_path):
    written.save(directory)
    flip_byte(directory / "owner-001.safetensors", -3)
    with pytest.raises(CheckpointError, match="damaged"):
        export_full(directory, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("out", ["file/x", "file/x.safetensors", "file", "folder.safetensors"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_export_to_an_impossible_place_is_one_line(written, directory, tmp_path, out, overwrite):
    written.save(directory)
    (tmp_path / "file").write_text("data")
    (tmp_path / "folder.safetensors").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        CheckpointError, match=r"cannot write .* is a file, not a folder|is a folder|cannot export to"
    ) as caught:
        export_full(directory, tmp_path / out, overwrite=overwrite)
    require_one_line(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_to_an_unwritable_folder_is_one_line(written, directory):
    written.save(directory)
    with pytest.raises(CheckpointError, match="cannot export to /proc/nowhere") as caught:
        export_full(directory, "/proc/nowhere")
    require_one_line(caught.value)


def test_buffers_of_a_module_with_two_names_are_exported_under_both(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.BatchNorm1d(4)
            self.second = self.first
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    with running_in(RankContext()):
        model = Twice()
        optimizer = prepared(model)
        one_step(model, optimizer)
        rayzero.save_checkpoint(optimizer, tmp_path / "ck", {})
    state = load_file(export_full(tmp_path / "ck", tmp_path / "out"))
    fresh = Twice()
    fresh.load_state_dict(state, strict=True)
    assert fresh.second.num_batches_tracked == 2
    assert {"first.running_mean", "second.running_mean"} <= state.keys()
    assert "scratch" not in state
    assert CheckpointReader(tmp_path / "ck").kinds("first.weight")[-1] == MASTER


_EXPORT_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from rayzero.convert.conversion import export_full
in_use = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
mapped = sum(file.stat().st_size for file in Path(sys.argv[1]).iterdir())  # torch maps files privately: counted too
resource.setrlimit(resource.RLIMIT_DATA, (in_use + mapped + (48 << 20),) * 2)
export_full(sys.argv[1], sys.argv[2])
"""


@pytest.mark.promise("bounded", "checkpoints")
def test_an_export_needs_memory_for_pieces_not_for_parameters(directory, tmp_path):
    layout = ModelLayout(units=(lay_out_unit(0, "", torch.float32, True, [("w", (24, 1 << 20))]),), shard_numel=1 << 21)
    written = Written(layout, {("w", kind): torch.ones(24 << 20) for kind in STATES})
    written.tied.clear()
    written.save(directory)
    command = [sys.executable, "-c", _EXPORT_IN_LITTLE_MEMORY, str(directory), str(tmp_path / "big.safetensors")]
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "big.safetensors").stat().st_size > 96 << 20


@pytest.mark.parametrize("act", [export, convert])
def test_of_checkpoints_that_a_run_deletes_an_open_one_is_read(act, written, tmp_path, monkeypatch, caplog):
    opened, read, lives = CheckpointReader.__init__, CheckpointReader._read, {"step-12": 1, "step-9": 2}

    def opens(reader, directory):
        """A checkpoint is gone when it is found, another one when it is opened after that."""
        lives[Path(directory).name] = left = lives.get(Path(directory).name, 9) - 1
        if not left:
            shutil.rmtree(directory)
        opened(reader, directory)

    def reads(reader, *piece):
        shutil.rmtree(reader.directory, ignore_errors=True)
        return read(reader, *piece)

    for step in (3, 6, 9, 12):
        written.save(tmp_path / "run" / "checkpoints" / f"step-{step}", step=step)
    monkeypatch.setattr(CheckpointReader, "__init__", opens)
    monkeypatch.setattr(CheckpointReader, "_read", reads)
    act(str(tmp_path / "run"), tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["w"].flatten(), written.values["w", MASTER])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-3"]
    assert caplog.text == ""
