"""Bad input is one line on stderr and exit code 2, found before Ray is started, with nothing written."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray
import torch
from safetensors.torch import save_file

from rayzero import errors
from rayzero.cli import ERRORS, exit_code, main, section_of
from rayzero.cli.train import stopped
from rayzero.cluster.files.metrics_log import MetricsLog
from rayzero.cluster.nodes.local_ray import LocalRay
from rayzero.cluster.run import Report
from rayzero.convert.remote_checkpoints import newest_checkpoint
from rayzero.elastic.scaling import take
from rayzero.errors import ConfigError, RankLeftError, RayZeroError
from rayzero.recipes.lm import train_loop
from rayzero.recipes.recipe import RecipeConfig
from rayzero.testing import run_ranks

PUBLIC = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RayZeroError)]
FINISHED = {"run": "r", "state": "finished", "started_at": 1.0, "driver": {"pid": 1, "host": "h"}}
SMALL = ["dim=16", "num_layers=1", "num_heads=2", "seq_len=16", "batch_size=2", "eval_batches=1"]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


class Begun(LocalRay):
    """In place of a Ray that begins to start, whose process would import it."""

    begun: ClassVar[list[Begun]] = []

    def __init__(self) -> None:
        self.ended = False
        self.begun.append(self)

    def close(self) -> None:
        self.ended = True


def rayzero(*arguments: str, cwd: Path) -> Ended:
    """Run a command line in this process; none of these joins Ray, and what has begun to start is ended."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rayzero", *arguments])
        patch.setattr("rayzero.cluster.nodes.local_ray.LocalRay", Begun)
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    assert not ray.is_initialized()
    assert all(begun.ended for begun in Begun.begun)
    return Ended(code, out.getvalue(), err.getvalue())


def in_a_process(*arguments: str, cwd: Path, **environment: str) -> Ended:
    """The same as ``python -m rayzero``."""
    command = [sys.executable, "-m", "rayzero", *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def refused(*arguments: str, cwd: Path) -> str:
    """The one line with which a command refuses; nothing may have been written."""
    before = sorted(path for path in cwd.rglob("*"))
    ended = rayzero(*arguments, cwd=cwd)
    assert ended.code == 2, ended
    assert ended.err.count("\n") == 1, ended
    assert ended.err.startswith("rayzero: ")
    assert sorted(path for path in cwd.rglob("*")) == before
    return ended.err


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint of step 2, made without Ray; returns its parent."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_bytes(b"to be or not to be. " * 100)
    recipe = RecipeConfig(
        data=str(folder / "text.txt"), dim=16, num_layers=1, num_heads=2, seq_len=16, batch_size=2, eval_batches=1,
        steps=2, scaling={"num_workers": 1, "num_optimizers": 1},
    )  # fmt: skip
    run = folder / "runs" / "r"
    run_ranks(lambda ctx: train_loop(recipe.model_dump(mode="json")), world_size=1, num_optimizers=2, run_dir=run)
    (run / "config.yaml").write_text(recipe.to_yaml())
    return folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    """A copy of that for one test."""
    shutil.copytree(trained_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.promise("refused", "cli")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stepz=3"], "unknown setting 'stepz' = 3; did you mean 'steps'?"),
        (["num_worker=3"], "unknown setting 'num_worker' = 3; did you mean 'scaling.num_workers'?"),
        (["run.certificate=x"], "unknown setting 'certificate' = 'x'; did you mean 'security.certificate'?"),
        (
            ["run.security.certificate=x", "run.security.key=x", "run.security.authority=x"],
            "run.security.certificate: cannot read x: No such file",
        ),
        (["stpes"], "stpes is neither a recipe nor a setting; did you mean steps=VALUE?"),
        (["--steps", "0"], "steps is 0 but must be greater than 0"),
        (["--workers", "0"], "num_workers is 0 but must be greater than 0"),
        (["zero.cpu_memory_budget=0"], "cpu_memory_budget is 0"),
        (["zero.cpu_memory_budget=16KiB"], "optimizer 0 of 2 needs "),
        (["lr=fast"], "lr is 'fast' but must be a valid number"),
        (["nowhere.yaml"], "cannot read nowhere.yaml: No such file or directory"),
        (["one.yaml", "two.yaml"], "give one recipe at a time"),
        (["lr"], "lr is a setting and has no value: write lr=VALUE"),
        (["zero.precision", "lr=1"], "zero.precision is a setting and has no value: write zero.precision=VALUE"),
        (["data=nowhere"], "no such file, folder or glob"),
        (["data=empty.txt"], "the training split has 0 tokens"),
        (["tokenizer=nowhere.json"], "no such file"),
        (["model=hf:nowhere.json"], "no such file"),
        (["init_from=nowhere"], "no weights at"),
        (["init_from=."], "has neither model.safetensors nor model.safetensors.index.json; it has empty.txt"),
        (["init_from=of_another.safetensors"], "does not fit this GPT: it lacks"),
        (["zero.overlap=backward"], "overlap is 'backward' but must be 'none' or 'forward'"),
        (["zero.transport=inproc", "--run-dir", "tin"], "transport='inproc' only reaches owners in the same process"),
        (["zero=hello"], "zero must be a group of settings"),
        (["run=5"], "run must be a group of settings"),
        (["zero=hello", "precision=bf16"], "zero must be a group of settings"),
        (["--run-dir", "/"], "--run-dir is '/' but must be"),
        (["--run-dir", ""], "--run-dir is '' but must be"),
        (["--workers", "99999999"], "num_workers is 99999999 but must be less than or equal to 16384"),
        (["--run-dir", "text.txt/run"], "--run-dir: cannot make"),
        (["data=unreadable"], "unreadable/mem: Input/output error"),
        (["data=" + "x" * 300], "data: cannot read"),
        (["--resume"], "no runs in"),
        (["--resume", "--run-dir", "runs/x"], "nothing to resume"),
        (["--resume", "--run-dir", "text.txt"], "text.txt is not a folder"),
        (["run.resume=text.txt"], "text.txt is a file; give a checkpoint's folder, which has a manifest.json"),
        (["run.resume=nowhere/step-000001"], "no checkpoint at"),
    ],
)
def test_train_refuses(tmp_path, arguments, message):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "mem").symlink_to("/proc/self/mem")  # opens, and cannot be read even by root
    (tmp_path / "text.txt").write_bytes(b"to be or not to be. " * 100)
    save_file({"a": torch.ones(2)}, tmp_path / "of_another.safetensors")
    defaults = [] if any("data=" in a for a in arguments) else ["data=text.txt"]
    assert message in refused("train", *arguments, *defaults, *SMALL, cwd=tmp_path)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["train", "dry run"])
def test_a_run_is_not_written_over(trained, dry):
    message = refused("train", "runs/r/config.yaml", "--run-dir", "runs/r", *dry, cwd=trained)
    assert "already holds" in message
    assert "--run-dir" in message
    assert "run_config" not in message


@pytest.mark.parametrize("resumed", [False, True])
def test_a_dry_run_shows_the_plan_and_writes_nothing(trained, resumed):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    again = ["--resume", "--run-dir", "runs/r"] if resumed else ["data=text.txt", *SMALL, "--run-dir", "new"]
    ended = rayzero("train", *again, "--steps", "30", "--dry-run", cwd=trained)
    assert (ended.code, ended.err) == (0, "")
    model, memory, bound, last = ended.out.splitlines()
    start = " from step 2" if resumed else ""
    assert model.startswith(f"gpt, 11,440 parameters, on 1 file (0.0 MB): 30 steps{start}, ")
    assert memory.startswith("memory     a CPU rank at most ")
    assert re.search(rf" s \(bound by [a-z]+\): {28 if resumed else 30} steps at least 0:00:\d\d$", bound)
    where = trained / ("runs/r" if resumed else "new")
    assert last.endswith(f" and write to {where}; nothing was started or written")
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_a_dry_run_refuses_a_ray_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    (tmp_path / "text.txt").write_bytes(b"to be or not to be. " * 100)
    message = refused("train", "--dry-run", "data=text.txt", *SMALL, cwd=tmp_path)
    assert "RAY_ADDRESS is '127.0.0.1:1', but no Ray answers there" in message


def test_train_refuses_what_typer_refuses_with_the_same_code(tmp_path):
    assert rayzero("train", "--steps", "many", cwd=tmp_path).code == 2
    mistyped = rayzero("trian", cwd=tmp_path)
    assert mistyped.code == 2
    assert "Did you mean 'train'" in mistyped.err


def test_a_file_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, capsys):
    """Such as another user's; root, who may run this, has the right to all of those."""
    monkeypatch.setattr("rayzero.cli.app", lambda: (tmp_path / ("x" * 300)).stat())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = f"rayzero: cannot use {tmp_path}/{'x' * 300}: File name too long (see {ERRORS}#configerror)\n"
    assert capsys.readouterr().err == said


def test_an_error_of_the_system_that_is_about_no_file_keeps_its_traceback(monkeypatch):
    def fail():
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr("rayzero.cli.app", fail)
    with pytest.raises(ConnectionResetError):
        main()


@pytest.mark.parametrize("kind", PUBLIC)
def test_every_public_error_has_a_section_that_the_command_line_names(kind, monkeypatch, capsys):
    def fail():
        raise kind("this went wrong\nand its traceback")

    monkeypatch.setattr("rayzero.cli.app", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    address = f"{ERRORS}#{kind.__name__.lower()}"
    assert capsys.readouterr().err == f"rayzero: this went wrong (see {address})\n"
    assert ended.value.code == exit_code(kind())
    page = (Path(__file__).parents[2] / ERRORS).read_text()
    assert f"\n## {kind.__name__}\n\n" in page


def test_an_error_of_one_module_alone_has_the_section_of_its_base():
    class Inner(RankLeftError):
        pass

    assert section_of(Inner) == "ranklefterror"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_before_ray_starts_has_the_shells_code_and_leaves_nothing(tmp_path, monkeypatch, number, code):
    monkeypatch.setattr("rayzero.recipes.data.text.WindowCorpus.baseline", lambda *_: os.kill(os.getpid(), number))
    (tmp_path / "text.txt").write_bytes(b"to be or not to be. " * 100)
    ended = rayzero("train", "data=text.txt", *SMALL, cwd=tmp_path)
    assert ended.code == code, ended
    assert Begun.begun[-1].ended
    assert "stopped before its first checkpoint" in ended.err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["text.txt"]


def test_resume_refuses_a_damaged_checkpoint(trained):
    checkpoint = newest_checkpoint(trained / "runs" / "r" / "checkpoints")
    manifest = checkpoint / "manifest.json"
    described = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(described | {"sha256": "0" * 64}))
    resume = ["train", "--resume", "--run-dir", "runs/r", "--steps", "4"]
    assert "manifest.json is damaged: it says its hash is 000000000000" in refused(*resume, cwd=trained)


def test_resume_refuses_another_model_and_a_run_that_is_done(trained):
    resume = ["train", "--resume", "--run-dir", "runs/r"]
    assert "steps is 2 and " in refused(*resume, cwd=trained)
    assert "is of another model: 'blocks.0.attention.out.weight' is (16, 16) there, but (32, 32) here" in refused(
        *resume, "--steps", "4", "dim=32", cwd=trained
    )


def test_export_writes_a_file_and_refuses_to_write_over_it(trained):
    ended = rayzero("export", "runs/r", "out", cwd=trained)
    assert ended.code == 0, ended
    assert "out/model.safetensors" in ended.out
    assert "exists" in refused("export", "runs/r", "out", cwd=trained)
    assert rayzero("export", "runs/r", "out", "--overwrite", "--dtype", "bfloat16", cwd=trained).code == 0
    assert "no checkpoint at" in refused("export", "runs/nowhere", "out2", cwd=trained)
    assert "dtype 'int3'" in refused("export", "runs/r", "out2", "--dtype", "int3", cwd=trained)
    wrong_kind = refused("export", "runs/r", "x.bin", cwd=trained)
    assert "x.bin ends in .bin, but an export is a .safetensors file" in wrong_kind
    (trained / "taken").write_text("")
    for out in ("taken", "taken/x.safetensors", "taken/deep/er"):
        message = refused("export", "runs/r", out, cwd=trained)
        assert ": taken is a file, not a folder; " in message
        assert "Errno" not in message
    (trained / "named.bin").mkdir()
    assert rayzero("export", "runs/r", "named.bin", cwd=trained).code == 0
    assert rayzero("export", "runs/r", "v1.2", cwd=trained).code == 0
    assert (trained / "v1.2" / "model.safetensors").is_file()
    os.truncate(trained / "runs" / "r" / "checkpoints" / "step-000002" / "rank-0000.safetensors", 5)
    assert "rank-0000.safetensors has 5 bytes" in refused("export", "runs/r", "out2", cwd=trained)


def test_convert_writes_a_folder_and_refuses_what_is_there(trained):
    ended = rayzero("convert", "runs/r", "as-dcp", "--to", "dcp", cwd=trained)
    assert ended.code == 0, ended
    assert "with optimizer states" in ended.out
    assert rayzero("convert", "as-dcp", "again", "--to", "rayzero", "--max-shard-size", "100KB", cwd=trained).code == 0
    assert rayzero("convert", "again", "hf", "--dtype", "bfloat16", cwd=trained).code == 0
    assert "as-dcp exists" in refused("convert", "runs/r", "as-dcp", cwd=trained)
    assert "no weights at nowhere" in refused("convert", "nowhere", "x", cwd=trained)
    assert "choose one of hf, dcp, rayzero" in refused("convert", "hf", "x", "--to", "onnx", cwd=trained)
    assert "--max-shard-size is 'big'" in refused("convert", "hf", "x", "--max-shard-size", "big", cwd=trained)
    assert not (trained / "x").exists()


@pytest.mark.parametrize("broken", ["run.json", "checkpoints/step-000002/manifest.json"])
def test_convert_refuses_in_one_line_whatever_else_is_damaged(trained, broken):
    (trained / "runs" / "r" / broken).write_text("{")
    assert "choose one of hf, dcp, rayzero" in refused("convert", "runs/r", "x", "--to", "onnx", cwd=trained)
    if "manifest" in broken:
        assert "manifest.json is not JSON" in refused("convert", "runs/r", "x", cwd=trained)


@pytest.mark.parametrize("arguments", [["status"], ["top"], ["trace"], ["scale", "--optimizers", "2"]])
def test_a_file_in_place_of_a_run_is_called_one(tmp_path, arguments):
    (tmp_path / "run.json").write_text("{}")
    assert "'run.json' is a file; give the run's folder" in refused(*arguments, "run.json", cwd=tmp_path)


def test_a_file_in_place_of_a_checkpoint_is_called_one(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be")
    assert "text.txt is a file; give a checkpoint's folder" in refused("export", "text.txt", "x", cwd=tmp_path)
    said = refused("convert", "text.txt", "x", cwd=tmp_path)
    assert "text.txt cannot be read as safetensors" in said
    assert "give a safetensors file, or a checkpoint's folder" in said


@pytest.mark.parametrize("command", ["status", "top"])
def test_a_run_that_is_not_there_is_named(tmp_path, command):
    assert "no runs in" in refused(command, cwd=tmp_path)
    assert "no such run: 'x'" in refused(command, "x", cwd=tmp_path)
    (tmp_path / "x").mkdir()
    assert "holds no run" in refused(command, "x", cwd=tmp_path)


def running(folder: Path, **config: dict[str, Any]) -> None:
    """Leave the record of a run "r" that goes on: its driver is on another host."""
    record = {
        "run": "r", "state": "running", "started_at": 1.0, "driver": {"pid": 1, "host": "another"},
        "config": {"zero": {}, "scaling": {"num_workers": 2}, "run": {"max_failures": 3}} | config,
    }  # fmt: skip
    (folder / "runs" / "r").mkdir(parents=True)
    (folder / "runs" / "r" / "run.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero": {"transport": "grpc"}}, "with zero.transport='grpc' owners have memory of their own"),
        ({"run": {"max_failures": 0}}, "run.max_failures is 0, so its processes do not follow other optimizers"),
    ],
)
def test_scale_refuses_a_run_whose_optimizers_cannot_change(tmp_path, config, message):
    running(tmp_path, **config)
    said = refused("scale", "r", "--optimizers", "3", cwd=tmp_path)
    assert said.startswith("rayzero: the optimizers of run 'r' cannot change: ")
    assert message in said


def test_scale_names_a_run_that_is_not_there_or_does_not_go_on_and_a_number_that_cannot_be(tmp_path):
    scale = ("scale", "r", "--optimizers")
    assert "no runs in" in refused("scale", "--optimizers", "3", cwd=tmp_path)
    assert "no such run: 'r'" in refused(*scale, "3", cwd=tmp_path)
    running(tmp_path)
    for number in ("0", "-1"):
        assert f"num_optimizers is {number} but must be greater than 0" in refused(*scale, number, cwd=tmp_path)
    assert rayzero("scale", "r", cwd=tmp_path).code == 2, "how many?"
    path = tmp_path / "runs" / "r" / "run.json"
    record = json.loads(path.read_text())
    for state in ("finished", "failed", "stopped"):
        path.write_text(json.dumps(record | {"state": state}))
        assert f"run 'r' does not go on, because it has {state}: " in refused(*scale, "3", cwd=tmp_path)
    path.write_text(json.dumps(record | {"driver": {"pid": 2**22 + 1, "host": socket.gethostname()}}))
    assert "run 'r' does not go on, because its driver is gone: " in refused(*scale, "3", cwd=tmp_path)
    (path.parent / "run.json").unlink()
    assert "holds no run" in refused(*scale, "3", cwd=tmp_path)


@pytest.mark.promise("scalable", "cli")
def test_a_request_is_left_for_the_driver_which_may_be_on_another_host(tmp_path):
    running(tmp_path)
    ended = rayzero("scale", "r", "--optimizers", "3", "--avoid", "10.0.0.7", "--no-wait", cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "asked; rayzero status says what comes of it\n")
    (left,) = take(tmp_path / "runs" / "r")
    assert (left.num_optimizers, left.avoid) == (3, ("10.0.0.7",))


def test_status_names_a_broken_record_and_no_broken_checkpoint(trained):
    run = trained / "runs" / "r"
    (run / "run.json").write_text("{}")
    assert "run.json is not a run's record" in refused("status", "r", cwd=trained)
    assert "run.json is not a run's record" in refused("status", cwd=trained)
    (run / "run.json").write_text(json.dumps(FINISHED | {"state": "asleep", "rayzero": "99.1"}))
    newer = refused("status", "r", cwd=trained)
    assert "run.json is not a run's record of this RayZero, 0.1.0: state is 'asleep' but " in newer
    assert "; use RayZero 99.1, which wrote it" in newer
    (run / "run.json").write_text(json.dumps(FINISHED))
    whole = json.loads(rayzero("status", "r", "--json", cwd=trained).out)
    assert whole["checkpoint"].endswith("step-000002")
    broken = run / "checkpoints" / "step-000009"
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    described = json.loads(rayzero("status", "r", "--json", cwd=trained).out)
    assert described["checkpoint"] == whole["checkpoint"]
    assert len(described["damaged"]) == 1
    assert "damaged     " in rayzero("status", "r", cwd=trained).out


def test_status_shows_what_a_loop_of_the_users_reports(tmp_path):
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(FINISHED))
    log = MetricsLog(run)
    log.add([Report(rank=rank, step=12, metrics={"loss": 2.0 + rank, "accuracy": 0.5}) for rank in (0, 1)])
    log.add([Report(rank=0, step=12, metrics={"phase": "evaluated", "norm": float("nan")})])
    log.close()
    described = json.loads(rayzero("status", "r", "--json", cwd=tmp_path).out)
    assert described["last"] == {"step": 12, "loss": 2.5, "accuracy": 0.5, "phase": "evaluated", "norm": None}
    shown = rayzero("status", "r", cwd=tmp_path).out
    assert "step        12\nloss        2.5000 train\n" in shown
    assert "reported    accuracy 0.5, phase evaluated, norm nan" in shown


def test_a_stopped_run_is_told_to_resume_only_where_there_is_a_checkpoint(trained):
    assert "--resume --run-dir" in stopped(trained / "runs" / "r")
    assert "--resume" not in stopped(trained / "runs" / "nothing")


def test_as_a_process_it_is_one_line_and_with_debug_a_traceback(tmp_path, monkeypatch):
    plain = in_a_process("train", "stepz=3", cwd=tmp_path)
    assert (plain.code, plain.out, plain.err.count("\n")) == (2, "", 1)
    monkeypatch.setenv("RAYZERO_DEBUG", "1")
    with pytest.raises(ConfigError, match="unknown setting 'stepz'"):
        rayzero("train", "stepz=3", cwd=tmp_path)
