"""What was written is what is read: any owner count, any range, and complete under plain names."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from rayzero.checkpoint import CheckpointReader, export_full
from rayzero.errors import CheckpointError
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.protocol.messages import COMPUTE, MASTER

from .conftest import STATES, Written, random_values, small_layout


@pytest.mark.parametrize("num_owners", [1, 2, 3, 7])
def test_every_value_comes_back_whatever_the_number_of_owners(written, directory, num_owners):
    written.save(directory, num_owners)
    reader = CheckpointReader(directory)
    for (param, kind), values in written.values.items():
        assert torch.equal(
            reader.read_slice(param, kind, 0, values.numel()), values.float() if not values.numel() else values
        )
        assert reader.slot_step(param) == (30 if values.numel() else 0)


def test_the_digest_is_of_the_content_alone(written, directory, tmp_path):
    one = written.save(directory, num_owners=1)
    three = written.save(tmp_path / "other" / "step-000030", num_owners=3)
    assert one.digest == three.digest == CheckpointReader(directory).digest
    written.values["w", "exp_avg"][100] += 1
    assert written.save(tmp_path / "changed" / "step-000030").digest != one.digest
    written.values["w", "exp_avg"][100] -= 1
    assert written.save(tmp_path / "later" / "step-000031", step=31).digest != one.digest


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shard_numel=st.sampled_from([64, 128, 192, 1024]), num_owners=st.integers(1, 5))
def test_any_range_can_be_read_from_any_cut(tmp_path_factory, data, shard_numel, num_owners):
    layout = small_layout(shard_numel)
    written = Written(layout, random_values(layout))
    directory = tmp_path_factory.mktemp("cut") / "step-000030"
    written.save(directory, num_owners)
    reader = CheckpointReader(directory)
    for (param, kind), values in written.values.items():
        start = data.draw(st.integers(0, values.numel()))
        stop = data.draw(st.integers(start, values.numel()))
        assert torch.equal(reader.read_slice(param, kind, start, stop).to(values.dtype), values[start:stop])


def test_what_is_not_there_is_named(written, directory):
    written.save(directory)
    reader = CheckpointReader(directory)
    with pytest.raises(CheckpointError, match="no parameter 'nope'"):
        reader.read_slice("nope", MASTER, 0, 1)
    with pytest.raises(CheckpointError, match=r"no elements 0\.\.324 of 'master' of 'w'"):
        reader.read_slice("w", MASTER, 0, 324)
    with pytest.raises(CheckpointError, match=r"no elements .* of 'max_exp_avg_sq' of 'b'.*exp_avg"):
        reader.read_slice("b", "max_exp_avg_sq", 0, 7)
    with pytest.raises(CheckpointError, match="no state of rank 3: 1 rank wrote it"):
        reader.rank_state(3)


def test_a_rank_gets_its_loop_state_back(written, directory):
    written.save(directory)
    reader = CheckpointReader(directory)
    state, tensors = reader.rank_state(0)
    assert state == {"step": 30, "note": "π"}
    assert torch.equal(tensors["rng"], torch.arange(5))
    assert reader.buffers().keys() == {"running_mean"}
    assert reader.tied() == {"head.weight": "embed.weight"}


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


def test_a_state_kept_of_half_a_parameter_is_refused(written, directory):
    owners, ranks = written.stage(directory)
    name = next(name for name, c in owners[0].content.items() if c["kind"] == "exp_avg" and c["param"] == "w")
    cut = replace(owners[0], content={k: v for k, v in owners[0].content.items() if k != name})
    with pytest.raises(CheckpointError, match="exp_avg of 'w' is not complete"):
        written.commit(directory, [cut, owners[1]], ranks)
    assert not directory.exists()


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


_EXPORT_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from rayzero.checkpoint import export_full
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
