"""A run's directory: what is refused, and that its record is replaced whole."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from engine.test_whole_run import killed_once
from engine.whole_run import LINEAGE, RUN
from saved import save_checkpoint

from rayzero.cli.status import newest_run
from rayzero.cluster.continuation import States, Successor
from rayzero.cluster.files.run_dir import RunDirectory, checkpoints_of, find_start
from rayzero.cluster.files.run_record import DriverProcess, RunRecord, read_record, run_status
from rayzero.cluster.run import RunState
from rayzero.config import RunConfig
from rayzero.errors import CheckpointError, ConfigError
from rayzero.slabs.sweep import SHARED_MEMORY, sweep
from tests.support import needs


def config(tmp_path, **settings) -> RunConfig:
    return RunConfig(name="demo", storage_path=str(tmp_path), **settings)


def saved(tmp_path, *steps: int) -> list[Path]:
    """Checkpoints of the run "demo"."""
    return [save_checkpoint(tmp_path / "demo", step, {"w": (3, 5)}) for step in steps]


def killed_run(tmp_path, **entries) -> None:
    """The record that a killed driver leaves."""
    record = {"run": RUN, "state": "running", "started_at": 1.0, "driver": {"pid": 1, "host": "a"}, "members": []}
    (tmp_path / "demo").mkdir(exist_ok=True)
    (tmp_path / "demo" / "run.json").write_text(json.dumps(record | entries))


@pytest.mark.promise("recoverable", "cli")
def test_a_killed_run_without_states_goes_on_from_its_newest_checkpoint_and_says_why(tmp_path):
    (checkpoint,) = saved(tmp_path, 10)
    killed_run(tmp_path)
    successor = Successor(directory=SHARED_MEMORY, num_workers=2, num_owners=2)
    start = find_start(config(tmp_path, resume=True), successor)
    assert (start.checkpoint, start.step, start.continuation) == (checkpoint, 10, None)
    assert str(start) == (
        f"starting from step 10, with {checkpoint}; the killed run's memory is not used, because it kept no states in "
        "shared memory"
    )
    assert find_start(config(tmp_path, resume=str(checkpoint)), successor).why is None, "nobody asked for memory"
    checkpoint.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint; the killed run's memory is not used, because"):
        find_start(config(tmp_path, resume=True), successor)


@needs.shared_memory
def test_a_killed_runs_states_are_held_while_the_run_that_continues_it_starts(tmp_path):
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as folder:
        slabs = Path(folder)
        killed_once(slabs, tmp_path)
        killed_run(tmp_path, states=asdict(States.in_directory(LINEAGE, slabs)))
        successor = Successor(directory=slabs, num_workers=2, num_owners=2)
        with RunDirectory.open(config(tmp_path, resume=True), successor) as opened:
            start = opened.start
            assert (start.step, start.checkpoint, start.lineage, start.former) == (2, None, LINEAGE, LINEAGE)
            assert str(start) == "continuing at step 2, with what the killed run has left in this host's shared memory"
            assert sweep(slabs) == [], "another run starts"
        (newer,) = saved(tmp_path, 3)
        with RunDirectory.open(config(tmp_path, resume=True), successor) as opened:
            assert opened.start.checkpoint == newer
            assert opened.start.why == "it is of step 2, and a checkpoint of step 3"
            assert (opened.start.former, opened.start.lineage != LINEAGE) == (LINEAGE, True)
            assert sweep(slabs) != [], "nobody needs them"


@pytest.mark.parametrize(
    ("state", "former"), [("running", "one"), ("failed", "one"), ("stopped", "one"), ("finished", None)]
)
def test_what_a_run_that_has_failed_may_have_left_is_known_to_the_next_one(tmp_path, state, former):
    saved(tmp_path, 10)
    killed_run(tmp_path, state=state, states=asdict(States(lineage="one", directory="/dev/shm", memory="here")))
    start = find_start(config(tmp_path, resume=True))
    assert (start.step, start.former, start.why) == (10, former, None)
    assert start.is_after_kill == (state == "running"), "whose processes are waited for: they have its name"


def killed_while_replacing(checkpoint: Path) -> None:
    """The first of the two renames that replace a checkpoint; then the power went."""
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.replaced"))


@pytest.mark.parametrize("older", [(), (10,)])
@pytest.mark.parametrize("find", [find_start, lambda config: RunDirectory.open(config).start])
def test_a_checkpoint_whose_replacement_was_killed_is_what_the_run_resumes_from(tmp_path, older, find):
    newest = saved(tmp_path, *older, 20)[-1]
    killed_while_replacing(newest)
    start = find(config(tmp_path, resume=True))
    assert (start.checkpoint, start.step) == (newest, 20)


def test_a_fresh_run_does_not_overlook_a_checkpoint_whose_replacement_was_killed(tmp_path):
    killed_while_replacing(*saved(tmp_path, 20))
    with pytest.raises(ConfigError, match="already holds checkpoints of a run"):
        RunDirectory.open(config(tmp_path))


@pytest.mark.parametrize("find", [find_start, RunDirectory.open])
def test_a_run_does_not_go_on_from_an_older_checkpoint_beside_newer_ones(tmp_path, find):
    older, *newer = saved(tmp_path, 10, 20, 1_000_000)
    with pytest.raises(ConfigError, match=r"step-000010, but .* \(step-000020 to step-1000000\).*; move") as error:
        find(config(tmp_path, resume=str(older)))
    assert "\n" not in str(error.value)
    shutil.rmtree(newer[0])
    with pytest.raises(ConfigError, match=r"\(step-1000000\)"):
        find(config(tmp_path, resume=str(older)))
    shutil.rmtree(newer[1])
    assert find_start(config(tmp_path, resume=str(older))).step == 10


@pytest.mark.parametrize("find", [find_start, RunDirectory.open])
@pytest.mark.parametrize("taken", ["demo", "demo/checkpoints", "", "broken link"])
def test_a_place_that_cannot_be_a_folder_is_refused_before_anything_starts(tmp_path, find, taken):
    storage = tmp_path / "runs"
    if taken == "broken link":
        storage.symlink_to(tmp_path / "nothing" / "there")
    else:
        (storage / taken).parent.mkdir(parents=True, exist_ok=True)
        (storage / taken).touch()
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"--run-dir: cannot make .*runs.*demo.*, because .*runs.* is not a folder"):
        find(config(storage), setting="--run-dir")
    assert set(tmp_path.rglob("*")) == before


def renamed(checkpoint: Path, name: str) -> Path:
    """The same under a name of the user's."""
    return checkpoint.rename(checkpoint.with_name(name))


def run_record(state: RunState) -> RunRecord:
    """The least that a driver writes of the run "demo"."""
    return RunRecord(run="demo", state=state, started_at=1.0, driver=DriverProcess(pid=1, host="h"))


def recorded(tmp_path, *elsewhere: Path) -> None:
    """What the run "demo" left when it had reported checkpoints that lie elsewhere."""
    with RunDirectory.open(config(tmp_path)) as directory:
        for path in elsewhere:
            directory.checkpoints.note(path)
        kept = list(map(str, directory.checkpoints.elsewhere))
        directory.write_record(run_record(RunState.FINISHED).model_copy(update={"checkpoints_elsewhere": kept}))


def test_a_run_resumes_from_the_highest_step_whatever_the_names(tmp_path):
    for checkpoint, name in zip(saved(tmp_path, 10, 30, 20), ("final", "best", "step-999999"), strict=True):
        renamed(checkpoint, name)
    start = find_start(config(tmp_path, resume=True))
    assert (start.checkpoint.name, start.step) == ("best", 30)
    with pytest.raises(ConfigError, match=r"already holds checkpoints of a run \(newest: best\)"):
        RunDirectory.open(config(tmp_path))
    with pytest.raises(ConfigError, match=r"final, but .* newer checkpoints of this run \(step-999999 to best\)"):
        find_start(config(tmp_path, resume=str(tmp_path / "demo" / "checkpoints" / "final")))


def test_a_run_starts_again_from_its_newest_checkpoint_or_as_it_began(tmp_path):
    (elsewhere,) = saved(tmp_path / "other", 5)
    with RunDirectory.open(config(tmp_path, resume=str(elsewhere))) as directory:
        first = directory.start
        directory.restart()
        assert (directory.start.checkpoint, directory.start.step) == (elsewhere, 5)
        assert directory.start.lineage != first.lineage, "its states are others"
        assert directory.start.former == first.lineage, "whose slabs may still be there"
        newest = saved(tmp_path, 10, 20)[-1]
        killed_while_replacing(newest)
        directory.restart()
        assert (directory.start.checkpoint, directory.start.step) == (newest, 20)
        assert directory.checkpoints.latest == newest, "for the record, though no report said so"
        shutil.rmtree(tmp_path / "demo" / "checkpoints")
        directory.restart()
        assert (directory.start.checkpoint, directory.start.step) == (elsewhere, 5)
        shutil.rmtree(tmp_path / "other")
        with pytest.raises(CheckpointError, match="step-000005"):
            directory.restart()


def test_a_run_that_began_anew_starts_again_anew_where_no_checkpoint_is_left(tmp_path):
    with RunDirectory.open(config(tmp_path)) as directory:
        saved(tmp_path, 10)
        directory.restart()
        assert directory.start.step == 10
        shutil.rmtree(tmp_path / "demo" / "checkpoints")
        directory.restart()
        assert (directory.start.checkpoint, directory.start.step) == (None, 0)


def test_rows_stay_up_to_the_runs_own_checkpoint_and_no_others(tmp_path):
    (elsewhere,) = saved(tmp_path / "other", 5)
    with RunDirectory.open(config(tmp_path)) as directory:
        assert directory.rows_until == -1, "the loop makes its reports of step 0 again"
        saved(tmp_path, 10)
        directory.restart()
        assert directory.rows_until == 10
    with RunDirectory.open(config(tmp_path, resume=True)) as directory:
        assert directory.rows_until == 10
    shutil.rmtree(tmp_path / "demo")
    with RunDirectory.open(config(tmp_path, resume=str(elsewhere))) as directory:
        assert directory.rows_until == -1, "those of the steps before are in the other run's file"


def test_a_run_resumes_from_the_newest_that_is_not_damaged(tmp_path, caplog):
    whole, hurt = saved(tmp_path, 10, 20)
    os.truncate(hurt / "owner-000.safetensors", 10)
    assert find_start(config(tmp_path, resume=True)).checkpoint == whole
    assert f"skipping a checkpoint: {hurt}/owner-000.safetensors has 10 bytes" in caplog.text
    os.truncate(whole / "manifest.json", 10)
    with pytest.raises(CheckpointError, match=rf"nothing to resume: .*; {whole}/manifest.json is .*; {hurt}/owner-000"):
        find_start(config(tmp_path, resume=True))
    with pytest.raises(ConfigError, match=r"already holds checkpoints of a run \(newest: step-000020\)"):
        RunDirectory.open(config(tmp_path))


def test_a_checkpoint_that_was_reported_from_elsewhere_is_the_runs(tmp_path):
    elsewhere = save_checkpoint(tmp_path / "big disk", 40, {"w": (3, 5)})
    recorded(tmp_path, elsewhere)
    saved(tmp_path, 30)
    start = find_start(config(tmp_path, resume=True))
    assert (start.checkpoint, start.step) == (elsewhere, 40)
    assert checkpoints_of(tmp_path / "demo").catalog().newest() == elsewhere
    older = tmp_path / "demo" / "checkpoints" / "step-000030"
    with pytest.raises(ConfigError, match=rf"newer checkpoints of this run \({elsewhere}\)"):
        find_start(config(tmp_path, resume=str(older)))
    shutil.rmtree(older)
    with pytest.raises(ConfigError, match=rf"already holds checkpoints of a run \(newest: {elsewhere}\)"):
        RunDirectory.open(config(tmp_path))
    killed_while_replacing(elsewhere)
    with RunDirectory.open(config(tmp_path, resume=str(elsewhere))) as directory:
        assert directory.start.checkpoint == elsewhere
        assert directory.checkpoints.latest == elsewhere
        assert directory.checkpoints.elsewhere == (elsewhere,), "it is recorded again"


def test_a_checkpoint_from_elsewhere_that_is_gone_does_not_stand_in_the_way(tmp_path):
    recorded(tmp_path, tmp_path / "gone")
    with RunDirectory.open(config(tmp_path)) as directory:
        assert directory.start.checkpoint is None


def test_the_report_of_a_further_models_checkpoint_means_the_whole(tmp_path):
    [whole] = saved(tmp_path, 10)
    with RunDirectory.open(config(tmp_path, resume=True)) as directory:
        directory.checkpoints.note(whole / "model-1")
        assert directory.checkpoints.latest == whole
        assert directory.checkpoints.elsewhere == ()


def test_a_damaged_record_leaves_the_checkpoints_in_the_folder(tmp_path, caplog):
    [checkpoint] = saved(tmp_path, 10)
    (tmp_path / "demo" / "run.json").write_text('{"run": "ha')
    assert find_start(config(tmp_path, resume=True)).checkpoint == checkpoint
    assert "only checkpoints in" in caplog.text


def test_another_place_goes_on_from_an_older_checkpoint(tmp_path):
    older, _ = saved(tmp_path, 10, 20)
    with RunDirectory.open(RunConfig(name="branch", storage_path=str(tmp_path), resume=str(older))) as directory:
        assert (directory.start.checkpoint, directory.start.step) == (older, 10)


HOLD = """
import sys, time
from rayzero.cluster.files.run_dir import RunDirectory
from rayzero.config import RunConfig
held = RunDirectory.open(RunConfig(name="demo", storage_path=sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_driver_is_refused_until_the_first_is_gone_even_by_kill_9(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        staging = tmp_path / "demo" / "checkpoints" / ".step-000001.tmp"
        staging.mkdir()
        with pytest.raises(
            ConfigError, match=rf"in use by a run .*pid {first.pid} on .*another run directory"
        ) as error:
            RunDirectory.open(config(tmp_path))
        assert "\n" not in str(error.value)
        assert staging.exists(), "nothing was swept"
    finally:
        first.kill()
        first.communicate()
    with RunDirectory.open(config(tmp_path)):
        assert not staging.exists()


def test_a_closed_directory_is_free_and_a_fresh_one_can_be_withdrawn(tmp_path):
    with RunDirectory.open(config(tmp_path)) as directory:
        with pytest.raises(ConfigError, match="in use"):
            RunDirectory.open(config(tmp_path))
        directory.withdraw()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_runs_folder_has_no_record(tmp_path):
    (tmp_path / "text.txt").write_text("no run")
    assert read_record(tmp_path / "text.txt") is None


def test_a_damaged_record_among_runs_says_what_to_do_where_the_newest_is_asked_for(tmp_path):
    record = {"run": "good", "state": "finished", "started_at": 0, "driver": {"pid": 1, "host": "h"}}
    for name, text in (("good", json.dumps(record)), ("half", '{"run": "ha')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    with pytest.raises(
        ConfigError,
        match=r"the newest: .*half/run\.json is not a run's record: it is not JSON .*; name a run",
    ):
        newest_run(tmp_path)


def test_a_running_record_whose_pid_was_given_to_a_younger_process_is_a_lost_run(tmp_path):
    me = {"pid": os.getpid(), "host": socket.gethostname()}
    record = {"run": "demo", "state": "running", "started_at": time.time(), "driver": me}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert run_status(tmp_path).items() >= record.items()
    (tmp_path / "run.json").write_text(json.dumps(record | {"started_at": 1.0}))
    assert run_status(tmp_path)["state"] == "lost"
