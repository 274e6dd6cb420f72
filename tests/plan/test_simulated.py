"""A plan's simulated step: on the plan's hosts, and never faster than the plan's bound."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from rayzero.cli import app
from rayzero.config import ScalingConfig
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.plan.bound import bound_step, step_traffic
from rayzero.plan.simulated import simulate_step
from rayzero.simulation.machines import Costs, Machine, Measured
from tests.simulation.runs import moving

from .machines import CPU_HOST, GPU_HOSTS
from .test_tiers import BF16, WORK, four_layers

FREE = Costs(
    unit_s=0.0, aside_s=0.0, step_s=0.0, shard_s=0.0, message_s=0.0, latency_s=0.0, moving=moving(1e13)
)  # fmt: skip
MEASURED = Measured(
    machine=Machine(
        cores=64,
        memory=1.0,
        adam_core=1e10,
        norm_core=1e10,
        sum_core=1e10,
        host_sum_core=1e10,
        copy_core=1e10,
        owner_threads=32,
    ),
    costs={"shm": replace(FREE, latency_s=1e-5), "grpc": replace(FREE, latency_s=1e-3)},
    part_s=0.0,
)
FOUR = ScalingConfig(num_workers=4, num_optimizers=4, use_gpu=True)


def simulated(zero=BF16, hardware=GPU_HOSTS, measured=MEASURED):
    return simulate_step(four_layers(), {0}, WORK, zero, FOUR, hardware, measured, state_bytes=8)


@pytest.mark.parametrize("hardware", [GPU_HOSTS, CPU_HOST])
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_no_simulated_step_beats_the_bound(hardware, overlap: str) -> None:
    zero = BF16.replace(overlap=overlap)
    bound = bound_step(step_traffic(four_layers(), WORK, zero, FOUR, state_bytes=8), zero, FOUR, hardware)
    assert simulated(zero, hardware).seconds >= bound.seconds


def test_several_hosts_cost_what_grpc_costs() -> None:
    """Five messages between a finish and a publication."""
    base = replace(MEASURED, costs={"grpc": FREE})
    assert simulated().seconds - simulated(measured=base).seconds == pytest.approx(5e-3, rel=0.02)
    with pytest.raises(ConfigError, match="no costs of shm"):
        simulated(hardware=CPU_HOST, measured=base)


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="offload_fraction"):
        simulated(BF16.replace(offload_fraction=0.5))


def test_the_command_shows_it_beside_the_bound(tmp_path) -> None:
    (tmp_path / "here.json").write_text(json.dumps(MEASURED.to_json()))
    small = ["plan", "num_layers=2", "dim=64", "seq_len=32", "batch_size=2", "--memory", "10", "--flops", "1"]
    run = ["--measured", str(tmp_path / "here.json")]
    said = CliRunner().invoke(app, [*small, *run], catch_exceptions=False).stdout
    assert "simulated: a step takes 0." in said
    planned = json.loads(CliRunner().invoke(app, [*small, *run, "--json"], catch_exceptions=False).stdout)
    assert planned["simulated"]["seconds"] >= planned["bound"]["seconds"]
    assert "simulated" not in CliRunner().invoke(app, small, catch_exceptions=False).stdout


def test_a_file_of_something_else_is_refused(tmp_path) -> None:
    (tmp_path / "here.json").write_text('{"machine": {}}')
    done = CliRunner().invoke(app, ["plan", "--measured", str(tmp_path / "here.json")])
    assert isinstance(done.exception, ConfigError)
    assert "costs is missing" in str(done.exception)
