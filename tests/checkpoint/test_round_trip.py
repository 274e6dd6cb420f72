"""What was written is what is read: any owner count, any range, and complete under plain names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayzero.checkpoint import CheckpointReader
from rayzero.errors import CheckpointError
from rayzero.protocol.messages import MASTER

from .conftest import Written, random_values, small_layout


def test_the_digest_is_of_the_content_alone(written, directory, tmp_path):
    one = written.save(directory, num_owners=1)
    three = written.save(tmp_path / "other" / "step-000030", num_owners=3)
    assert one.digest == three.digest == CheckpointReader(directory).digest
    written.values["w", "exp_avg"][100] += 1
    assert written.save(tmp_path / "changed" / "step-000030").digest != one.digest
    written.values["w", "exp_avg"][100] -= 1
    assert written.save(tmp_path / "later" / "step-000031", step=31).digest != one.digest


@settings(
    max_examples=min(settings.default.max_examples, 60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
