"""``rayzero plan``: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from rayzero.cli import app, main
from rayzero.cluster.nodes.resources import files_of_owner, files_of_rank
from rayzero.plan.hardware import Hardware
from rayzero.recipes import planning

MEASURED: dict[str, Hardware] = {}  # by slab_dir: what this host can do, measured once for all tests
SMALL = ["num_layers=2", "dim=64", "seq_len=32", "batch_size=2"]


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan measures for a second or two."""
    measure = planning.recipe_hardware

    def measured(work: planning.RecipeWork) -> Hardware:
        where = str(work.recipe.zero_config.slab_dir)
        if where not in MEASURED:
            MEASURED[where] = measure(work)
        return MEASURED[where]

    monkeypatch.setattr(planning, "recipe_hardware", measured)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def rayzero(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """``rayzero plan`` in this process."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["rayzero", "plan", *SMALL, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_a_plan_for_this_host_as_json(rayzero: Callable[..., Ended]) -> None:
    done = rayzero("--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["units"] == 3
    assert found["inventory"]["total_elements"] == found["parameters"]
    assert 0 < found["inventory"]["min_parameter_size"] < found["inventory"]["median_parameter_size"]
    assert [host["ranks"] for host in found["bytes"]["hosts"]] == [2]
    assert found["bytes"]["device"]["peak"] > found["bytes"]["device"]["parameters"] > 4 * 64 * 64
    assert found["bound"]["seconds"] == max(found["bound"][name] for name in ("compute", "update"))


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"]])
def test_a_coordinator_is_measured_before_torch_which_it_does_not_import(command: list[str]) -> None:
    program = """
        import sys
        from rayzero.cluster.processes import program_memory
        measure = program_memory.coordinator_memory
        def measured():
            measure()
            print("torch" in sys.modules)
            sys.exit()
        program_memory.coordinator_memory = measured
        from rayzero.cli import app
        app()
    """
    ran = [sys.executable, "-c", textwrap.dedent(program), *command, *SMALL]
    assert subprocess.run(ran, capture_output=True, text=True, timeout=60).stdout == "False\n"


@pytest.mark.parametrize(
    ("slab_dir", "why"), [("/nowhere", "No such file or directory"), ("/dev/null", "Not a directory")]
)
def test_a_slab_dir_that_is_not_there_is_refused_in_one_line(
    rayzero: Callable[..., Ended], slab_dir: str, why: str
) -> None:
    done = rayzero(f"zero.slab_dir={slab_dir}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"zero.slab_dir is {slab_dir!r}: {why}; name a folder in memory" in done.stderr


def planned(*arguments: str) -> str:
    """What a plan says that ends well."""
    done = CliRunner().invoke(app, ["plan", *SMALL, *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_an_optimizer_without_shards_has_a_line_and_is_counted() -> None:
    options = ["scaling.num_workers=2", "scaling.num_optimizers=1", "--hosts", "2", "--network", "10"]
    options += ["--flops", "1", "--memory", "50", "--host-memory", "64GiB"]
    said = planned(*options)
    assert "optimizer 1: no shards, for the ranks of host 1\n" in said
    assert re.search(r"^host 1: .* 2 programs", said, re.MULTILINE)
    of_rank, of_owner = files_of_rank(2, 1, 1), files_of_owner(2, 2, 1, 1)
    assert f"(ulimit -n): {of_rank:,} of a rank, {of_owner:,} of an optimizer actor" in said


def test_what_muons_updates_cost_is_a_line() -> None:
    options = ["optimizer=muon", "scaling.num_optimizers=2", "--host-flops", "0.0001"]
    said = planned(*options)
    found = re.search(
        r"^Muon's updates: (\S+) to (\S+) TFLOP an optimizer actor, at least (\S+) s of", said, re.MULTILINE
    )
    assert found is not None
    least, most, seconds = map(float, found.groups())
    assert 0 < least <= most
    assert seconds == pytest.approx((least + most) / 0.0001, rel=1e-3), "both are on this host"
    assert "these CPUs bound the step" in said
    assert "Muon" not in planned()


def test_what_ranks_multiply_is_a_line_and_bytes_of_owners_and_devices() -> None:
    options = ["optimizer=muon", "scaling.num_workers=2", "--host-flops", "0.0001"]
    on_gpus = [*options, "--gpus", "2", "--gpu-memory", "80GiB", "--flops", "989", "--link", "55", "--memory", "300"]
    said = planned(*on_gpus)
    assert "these CPUs bound the step: let the ranks' GPUs multiply (zero.matrix_updates=rank), spread" in said
    assert "let the ranks' GPUs" not in planned(*options)
    assert "products" not in said.replace("products of", "")
    for given in (options, [*on_gpus, "zero.precision=bf16"]):
        said = planned(*given, "zero.matrix_updates=rank")
        assert re.search(
            r"^Muon's products: at most \S+ TFLOP a rank, at least \S+ s of its device$", said, re.MULTILINE
        )
        assert "Muon's updates" not in said
        assert re.search(r"^optimizer 0: .* \+ products [\d.]+ [KM]iB", said, re.MULTILINE)
        assert re.search(r"^ +at most .* \+ products for owners [\d.]+ [KM]iB", said, re.MULTILINE)


def test_more_hosts_than_processes_are_one_line() -> None:
    options = ["--hosts", "1000000", "--network", "10", "--memory", "10", "--flops", "1"]
    said = planned(*options)
    assert "999,998 more hosts: without a rank or an optimizer actor\n" in said
    assert said.count("\nhost ") == 2


def test_gpus_that_no_rank_uses_are_idle() -> None:
    here = ["--gpu-memory", "80GiB", "--flops", "1", "--link", "1", "--memory", "1"]
    said = planned("--gpus", "8", *here)
    assert "6 of 8 GPUs idle: scaling.num_workers is 2, one rank a GPU\n" in said
    said = planned("--gpus", "2", *here)
    assert "idle" not in said


def test_gpus_that_are_not_here_must_be_described(rayzero: Callable[..., Ended]) -> None:
    done = rayzero("--gpus", "8", "--link", "50")
    assert done.returncode == 2
    assert done.stderr == (
        "rayzero: --gpus is 8 but this host has no GPU to measure; give --flops, --memory, --gpu-memory as its maker "
        "states them (see docs/reference/errors.md#configerror)\n"
    )


def test_a_run_that_cannot_fit_is_refused_after_its_sums(rayzero: Callable[..., Ended]) -> None:
    done = rayzero(
        "--hosts", "2", "--network", "1", "--gpus", "1", "--gpu-memory", "1MiB", "--flops", "1", "--link", "1",
        "--memory", "1", "scaling.use_gpu=true",
    )  # fmt: skip
    assert done.returncode == 2
    assert "bytes of each GPU" in done.stdout
    assert "a rank needs" in done.stderr
    assert "on its GPU, which has 1 MiB" in done.stderr


GPUS = [
    "--hosts", "2", "--network", "1", "--gpus", "1", "--flops", "1", "--link", "1", "--memory", "1",
    "scaling.use_gpu=true", "num_layers=8", "batch_size=8",
]  # fmt: skip


@pytest.mark.thorough
def test_a_run_that_fits_because_activations_leave_is_not_refused(rayzero: Callable[..., Ended]) -> None:
    leaving = ['zero.offload_activations=["blocks.?"]', "zero.activation_min_bytes=4096"]
    ample = [*GPUS, "--json", "--gpu-memory", "80GiB"]
    stays, leaves = (json.loads(rayzero(*ample, *some).stdout)["bytes"] for some in ([], leaving))
    assert leaves["device"]["peak"] < 0.7 * stays["device"]["peak"]
    assert [host["activations"] for host in stays["hosts"]] == [0, 0]
    assert leaves["hosts"][0]["activations"] >= stays["device"]["peak"] - leaves["device"]["peak"]
    between = str((leaves["device"]["peak"] + stays["device"]["peak"]) // 2)
    assert rayzero(*GPUS, "--gpu-memory", between).returncode == 2
    fits = rayzero(*GPUS, "--gpu-memory", between, *leaving)
    assert fits.returncode == 0
    assert "offloaded activations" in fits.stdout


@pytest.mark.parametrize(
    ("option", "value", "wrong"),
    [
        ("--flops", "0", "is 0 but must be a number above 0"),
        ("--memory", "-1", "is -1 but must be a number above 0"),
        ("--host-flops", "0", "is 0 but must be a number above 0"),
        ("--network", "nan", "is nan but must be a number above 0"),
        ("--link", "inf", "is inf but must be a number above 0"),
        ("--host-memory", "lots", "is 'lots' but must be bytes: a whole number"),
        ("--shm", "-1GiB", "is '-1GiB' but must be bytes: a whole number"),
        ("--gpu-memory", "0.3B", "is '0.3B' but must be a whole number of bytes"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_by_its_option(
    option: str, value: str, wrong: str, rayzero: Callable[..., Ended]
) -> None:
    done = rayzero(option, value)
    assert done.returncode == 2
    assert done.stderr.startswith(f"rayzero: {option} {wrong}")
    assert done.stderr.count("\n") == 1
