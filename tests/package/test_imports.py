"""What ``import rayzero`` and the command line's quick answers load: modules are counted, because seconds depend on the
machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "torch",
    "numpy",
    "ray",
    "grpc",
    "google.protobuf",
    "matplotlib",
    "cryptography",
    "rayzero.config",
    "rayzero.recipes",
}


COMMAND = "import sys; sys.argv = {!r}.split(); from rayzero.cli import main; main()"


def run(code: str, cwd: Path, **environment: str) -> tuple[set[str], str]:
    """The modules that a new process has after ``code``, which may end the process; and what it printed."""
    whole = f"import atexit, json, sys\natexit.register(lambda: print('\\n' + json.dumps(sorted(sys.modules))))\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", whole], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    said, _, modules = done.stdout.rstrip().rpartition("\n")
    return set(json.loads(modules)), said


@pytest.mark.promise("installs", "cli")
def test_a_python_without_the_packages_is_named_with_what_it_lacks() -> None:
    """Each Python finds rayzero in a clone; -S leaves out what is installed."""
    command = [sys.executable, "-S", "-m", "rayzero", "doctor"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env={}, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"rayzero: {sys.executable} has no typer; type scripts/setup, then .venv/bin/rayzero (docs/install.md)\n"
    )


def test_ctrl_c_while_the_command_is_imported_is_one_line() -> None:
    code = """
import sys

class CtrlC:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
import rayzero.__main__
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (130, "rayzero: stopped before it began\n")


def test_import_loads_nothing_else(tmp_path: Path) -> None:
    bare, ours = (run(code, tmp_path)[0] for code in ("", "import rayzero; dir(rayzero); rayzero.__version__"))
    standard = {name for name in ours - bare if name.partition(".")[0] in sys.stdlib_module_names}
    assert ours - bare - standard == {"rayzero"}
    assert len(standard) < 60


@pytest.mark.thorough
def test_prepare_loads_neither_ray_nor_grpc(tmp_path: Path) -> None:
    assert run("import rayzero; rayzero.prepare", tmp_path)[0] & {"ray", "grpc"} == set()


@pytest.mark.parametrize("option", ["--version", "--help", "--show-completion bash", "train --help"])
def test_quick_answers_load_neither_torch_nor_ray(option: str, tmp_path: Path) -> None:
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # the shell is what the option says, not an ancestor
    assert run(COMMAND.format(f"rayzero {option}"), tmp_path, **named)[0] & HEAVY == set()


def test_completion_knows_commands_and_runs_and_loads_neither_torch_nor_ray(tmp_path: Path) -> None:
    for name in ("demo", "deep", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "runs" / "detritus").mkdir()

    def completed(typed: str) -> list[str]:
        asked = {"_RAYZERO_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        modules, said = run(COMMAND.format("rayzero"), tmp_path, **asked)
        assert modules & HEAVY == set()
        return said.split()

    assert completed("rayzero tra") == ["train", "trace"]
    assert completed("rayzero status de") == ["deep", "demo"]


@pytest.mark.promise("installs", "cli")
def test_training_loads_no_format_of_other_systems(tmp_path: Path) -> None:
    """torch.distributed.checkpoint imports all of DTensor: a second of processor time."""
    modules, _ = run("import rayzero.recipes.training", tmp_path)
    assert {"torch.distributed.checkpoint", "torch.distributed.tensor"} & modules == set()


@pytest.mark.parametrize(
    "module", ["rayzero.cluster.janitor", "rayzero.slabs.sweep", "rayzero.cluster.files.logger_feed"]
)
def test_processes_that_outlive_others_load_neither_torch_nor_ray(module: str, tmp_path: Path) -> None:
    assert run(f"import {module}", tmp_path)[0] & {"torch", "numpy", "ray", "grpc"} == set()


def test_a_coordinator_loads_no_torch(tmp_path: Path) -> None:
    assert "torch" not in run("import rayzero.cluster.processes.coordinator", tmp_path)[0]


COLLECTIONS = """
import gc, ray, sys
{before}
enabled, began = gc.isenabled(), []
gc.callbacks.append(lambda phase, info: began.append(info["generation"]) if phase == "start" else None)
import rayzero.cluster.processes.{module}
gc.callbacks.clear()
print(sorted(generation for generation in began if generation == 2), gc.isenabled() == enabled, "torch" in sys.modules)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("module", "before"),
    [
        ("rank_worker", ""),
        ("owner_process", ""),
        ("rank_worker", "gc.disable()"),
    ],
)
def test_a_process_of_a_run_looks_for_no_garbage_among_what_it_imports(
    module: str, before: str, tmp_path: Path
) -> None:
    """It would find none, and look through all of torch many times: a sixth of the import's processor time."""
    _, said = run(COLLECTIONS.format(module=module, before=before), tmp_path)
    assert said.split() == ["[]", "True", "True"]
