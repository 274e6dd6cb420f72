"""A plan's simulated step: on the plan's hosts, and never faster than the plan's bound."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.simulation import plan
from lab.simulation.planned_step import simulate_step
from rayzero.cli import app
from rayzero.config import ScalingConfig
from rayzero.errors import ConfigError, MemoryPlanError, UnsupportedError
from rayzero.plan.bound import bound_step, step_traffic
from tests.plan.machines import CPU_HOST, GPU_HOSTS
from tests.plan.test_tiers import BF16, WORK, four_layers

from .runs import FAST, MEASURED

FOUR = ScalingConfig(num_workers=4, num_optimizers=4, use_gpu=True)


def simulated(zero=BF16, hardware=GPU_HOSTS, measured=MEASURED):
    return simulate_step(four_layers(), {0}, WORK, zero, FOUR, hardware, measured, state_bytes=8, splits=False)


@pytest.mark.parametrize("hardware", [GPU_HOSTS, CPU_HOST])
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_no_simulated_step_beats_the_bound(hardware, overlap: str) -> None:
    zero = BF16.replace(overlap=overlap)
    bound = bound_step(step_traffic(four_layers(), WORK, zero, FOUR, state_bytes=8, splits=False), zero, FOUR, hardware)
    assert simulated(zero, hardware).seconds >= bound.seconds


def test_several_hosts_cost_what_grpc_costs() -> None:
    """Five messages between a finish and a publication."""
    base = replace(MEASURED, costs={"grpc": FAST})
    assert simulated().seconds - simulated(measured=base).seconds == pytest.approx(5e-3, rel=0.02)
    with pytest.raises(ConfigError, match="no costs of shm"):
        simulated(hardware=CPU_HOST, measured=base)


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="offload_fraction"):
        simulated(BF16.replace(offload_fraction=0.5))


def test_the_command_shows_it_beside_the_bound(tmp_path, capsys) -> None:
    (tmp_path / "here.json").write_text(json.dumps(MEASURED.to_json()))
    small = ["num_layers=2", "dim=64", "seq_len=32", "batch_size=2", "--memory", "10", "--flops", "1"]

    def said(*more: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            plan.main([*small, "--figures", str(tmp_path / "here.json"), *more])
        return capsys.readouterr().out

    *planned, simulated = said().splitlines()
    bare = CliRunner().invoke(app, ["plan", *small], catch_exceptions=False).stdout.splitlines()
    assert (len(planned), planned[0], planned[-1]) == (len(bare), bare[0], bare[-1])
    assert simulated.startswith("simulated: a step takes 0.")
    found = json.loads(said("--json"))
    assert found["simulated"]["seconds"] >= found["bound"]["seconds"]


def test_the_command_loads_no_torch_before_it_plans() -> None:
    """A plan measures what a program's imports take while it imports them."""
    code = "import sys; import lab.simulation.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0


def test_a_wrong_file_and_wrong_options_are_refused(tmp_path, capsys) -> None:
    (tmp_path / "here.json").write_text('{"machine": {}}')
    with pytest.raises(ConfigError, match="costs is missing"):
        plan.main(["--figures", str(tmp_path / "here.json")])
    (tmp_path / "here.json").write_text(json.dumps(MEASURED.to_json()))
    with pytest.raises(SystemExit, match="2"):
        plan.main(["--figures", str(tmp_path / "here.json"), "--hots", "3"])
    assert "--hots" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--memory is 0 but must be a number above 0"):
        plan.main(["--figures", str(tmp_path / "here.json"), "--memory", "0"])


def test_a_run_that_cannot_fit_is_shown_and_refused(tmp_path, capsys) -> None:
    (tmp_path / "here.json").write_text(json.dumps(MEASURED.to_json()))
    small = ["num_layers=2", "dim=64", "seq_len=32", "--memory", "10", "--flops", "1", "--host-memory", "1MiB"]
    with pytest.raises(MemoryPlanError):
        plan.main(["--figures", str(tmp_path / "here.json"), *small])
    assert "simulated: a step takes" in capsys.readouterr().out
