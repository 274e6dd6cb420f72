"""Rows of metrics.jsonl in real loggers, each once: files read back, resumed runs, loggers that fail, hang and die."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rayzero
from rayzero.cli.status import describe_run, format_status
from rayzero.cluster.files.logger_feed import Bookmark, Feed, FeedState, Loggers, begin
from rayzero.cluster.files.logger_reporter import CsvReporter, LoggedRun, flat_settings
from rayzero.cluster.files.metrics_log import METRICS, RowTail, Value, trim_log
from rayzero.config import RunConfig
from rayzero.config.choices import require_loggers
from rayzero.engine import get_context, report, save_checkpoint
from rayzero.errors import ConfigError
from tests.support.leftovers import still_there
from tests.support.waiting import until

from .tiny import tiny_steps

Steps = list[tuple[int, float]]


def write_rows(run_dir: Path, steps: range, **more: Any) -> None:
    with (run_dir / METRICS).open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": 1 / (step + 1), **more}) + "\n")


def expected(steps: range) -> Steps:
    return [(step, pytest.approx(1 / (step + 1))) for step in steps]  # type: ignore[misc]


@contextmanager
def reported(name: Any, run_dir: Path, *, anew: bool = False, told: list[Any] | None = None) -> Iterator[Loggers]:
    """A run's time between its start and its end; ``told``: gets what the coordinator would be told."""
    with Loggers([name], "demo", run_dir, {"lr": 0.1, "zero.precision": "bf16"}, anew) as loggers:
        loggers.start(lambda *what: told.append(what) if told is not None else None)
        yield loggers


def killed_and_resumed(name: Any, run_dir: Path) -> None:
    """A run reports ten steps and stops; it goes on from its checkpoint of step 6, to step 12."""
    write_rows(run_dir, range(1, 11))
    with reported(name, run_dir, anew=True) as loggers:
        loggers.state = "stopped"
    trim_log(run_dir, 6)
    write_rows(run_dir, range(7, 13))
    with reported(name, run_dir) as loggers:
        write_rows(run_dir, range(13, 15))
    (one,) = loggers.states
    assert (one.complete, one.step, one.lost, one.error) == (True, 14, 0, None)


# ---- each logger, as it is -----------------------------------------------------------------------------------------


def read_csv(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_each_step_once_and_a_column_for_each_name(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 3))
    write_rows(tmp_path, range(3, 4), validation_loss=0.5, note='two\nlines, "said"')
    run = LoggedRun(name="demo", directory=tmp_path)
    reporter = CsvReporter(run, 0)
    assert feed(tmp_path, reporter).forward()
    reporter.close("finished")
    rows = read_csv(tmp_path)
    assert list(rows[0]) == ["step", "time", "loss", "validation_loss", "note"]
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert (rows[0]["validation_loss"], rows[2]["validation_loss"]) == ("", "0.5")
    assert rows[2]["note"] == 'two\nlines, "said"'
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("4,17")  # a line that a crash cut short
    CsvReporter(run, 3).close("")
    assert [row["step"] for row in read_csv(tmp_path)] == ["1", "2"]


def test_a_resumed_run_has_each_step_once_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write_rows(tmp_path, range(0), note="text is no scalar")
    killed_and_resumed("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == expected(range(1, 15))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run's file: a log in blocks of 32 KiB, as LevelDB's."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, size, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole of a record, or its last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_a_resumed_run_is_one_run_with_each_step_once_in_wandb(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    killed_and_resumed("wandb", tmp_path)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for path in files for record in wandb_records(path)]
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.project, run.display_name) for run in runs} == {("mine", "demo")}
    assert len({run.run_id for run in runs}) == 1
    assert len(files) == 2
    steps = []
    for record in records:
        if record.HasField("history"):
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            steps.append((values["_step"], values["loss"]))
    assert steps == expected(range(1, 15))
    config = {item.key: json.loads(item.value_json) for run in runs for item in run.config.update}
    assert (config["lr"], config["zero.precision"]) == (0.1, "bf16")


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_a_resumed_run_is_one_run_with_each_step_once_in_mlflow(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("mlflow")
    store = tmp_path / "mlruns"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    killed_and_resumed("mlflow", tmp_path)
    (run,) = [path.parent for path in store.glob("*/*/meta.yaml") if (path.parent / "metrics").exists()]
    points = [line.split() for line in (run / "metrics" / "loss").read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in points] == expected(range(1, 15))
    assert (run / "params" / "zero.precision").read_text() == "bf16"
    assert "run_name: demo" in (run / "meta.yaml").read_text()
    assert "status: 3" in (run / "meta.yaml").read_text(), "FINISHED"
    assert "name: mine" in (run.parent / "meta.yaml").read_text()


# ---- what is sent ---------------------------------------------------------------------------------------------------


class Recorded:
    """A logger in memory that refuses what ``refuses`` says; what it has taken outlives it, as a server would."""

    where = "memory"

    def __init__(self, taken: list[int], refuses: Callable[[int], bool] = lambda step: False):
        self.taken, self.refuses = taken, refuses

    def log(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        if self.refuses(step):
            raise ConnectionError(f"not step {step}")
        self.taken.append(step)

    def flush(self) -> None: ...

    def close(self, state: str) -> None: ...


def feed(run_dir: Path, reporter: Any) -> Feed:
    return Feed(RowTail(run_dir), reporter, FeedState.read(run_dir / "saved.json"))


@pytest.mark.parametrize(
    ("refused", "first", "taken"),
    [
        (2, [(range(3), True), (range(3, 5), True)], [0, 1, 3, 4]),
        (0, [(range(1), False), (range(1, 3), True)], [1, 2]),  # alone, it waits for the next ones
    ],
)
def test_a_row_that_is_refused_holds_up_no_other(
    tmp_path: Path, refused: int, first: list[tuple[range, bool]], taken: list[int]
) -> None:
    found: list[int] = []
    one = feed(tmp_path, Recorded(found, lambda step: step == refused))
    for steps, forwarded in first:
        write_rows(tmp_path, steps)
        assert one.forward() == forwarded
    assert (found, one.sent, one.lost) == (taken, len(taken), 1)


def test_ranks_rows_are_shown_of_rank_0_alone_and_several_of_a_step_are_all_sent(tmp_path: Path) -> None:
    taken: list[int] = []
    for number in range(3):
        for rank in (1, 0):
            write_rows(tmp_path, range(4, 5), rank=rank, number=number, time=1.0)
        feed(tmp_path, Recorded(taken)).forward()  # each time from its bookmark
    assert taken == [4, 4, 4]
    assert FeedState.read(tmp_path / "saved.json").bookmark == Bookmark(4, 3)


def test_a_row_is_read_once_it_is_whole_and_a_line_that_is_none_is_skipped(tmp_path: Path) -> None:
    tail = RowTail(tmp_path)
    assert tail.next() == []
    for part, steps in (('{"step": 1', []), (', "a": 2}\n{"st', [1]), ('ep": 2}\nno row\n{"step": 3}\n', [2, 3])):
        with (tmp_path / METRICS).open("a") as file:
            file.write(part)
        assert [row["step"] for row in tail.next()] == steps


@given(data=st.data())
def test_whatever_fails_and_ends_between_each_row_is_taken_once_and_in_order(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir, taken, steps = tmp_path_factory.mktemp("run"), list[int](), 0
    replaces = data.draw(st.booleans())

    def start(refuses: Callable[[int], bool]) -> Feed:
        saved = FeedState.read(run_dir / "saved.json")
        first = begin(saved, run_dir, replaces=replaces)
        if replaces:
            taken[:] = [step for step in taken if step < first]
        return Feed(RowTail(run_dir), Recorded(taken, refuses), saved)

    for _ in range(data.draw(st.integers(1, 5))):  # starts of the run
        down = [False]
        one = start(lambda step, down=down: down[0])  # type: ignore[misc]
        for _ in range(data.draw(st.integers(1, 4))):
            more = data.draw(st.integers(0, 3))
            write_rows(run_dir, range(steps, steps + more))
            steps += more
            down[0] = data.draw(st.booleans())
            one.forward()
        cut = data.draw(st.integers(0, steps))  # the run goes on from a checkpoint
        if data.draw(st.booleans()):
            trim_log(run_dir, cut - 1)
            steps = cut
    last = max(steps, len(taken))
    write_rows(run_dir, range(steps, last))
    start(lambda step: False).forward()
    assert taken == list(range(last))


def test_a_run_that_begins_anew_has_no_bookmark(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 4))
    with reported("csv", tmp_path, anew=True):
        pass
    assert FeedState.read(tmp_path / ".loggers" / "csv.json").bookmark == Bookmark(3, 1)
    (tmp_path / METRICS).unlink()
    with reported("csv", tmp_path, anew=True):
        write_rows(tmp_path, range(1, 3))
    assert [row["step"] for row in read_csv(tmp_path)] == ["1", "2"]


# ---- loggers that do not do what they should ------------------------------------------------------------------------

STUBBORN = """
import time

class TensorBoardReporter:
    where = "nowhere"
    def __init__(self, run, first_step):
        {opens}
    def log(self, step, time_, values):
        {logs}
    def flush(self): pass
    def close(self, state): pass
"""


@pytest.fixture
def stubborn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``stubborn(opens, logs)``: the package tensorboard does this instead, once there is a file called go."""

    def make(opens: str = "pass", logs: str = "pass") -> None:
        code = STUBBORN.format(opens=opens, logs=logs)
        patch = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        patch += "import rayzero.cluster.files.logger_reporter as p; named = {}\n"
        patch += f"exec({code!r}, named); p.REPORTERS['tensorboard'] = named['TensorBoardReporter']\n"
        (tmp_path / "sitecustomize.py").write_text(patch)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(rayzero.__file__).parents[1])]))

    monkeypatch.setattr("rayzero.cluster.files.logger_feed._END_S", {"finished": 1.0})
    return make


@pytest.mark.parametrize(
    ("what", "warned"),
    [
        ({"logs": "time.sleep(1000)"}, "has not got the rows after step 0 (it did not end in time)"),
        ({"logs": "import os; os._exit(7)"}, "has not got the rows after step 0 (its process ended with code 7)"),
        ({"logs": "raise ConnectionError('no route')"}, "after step 0 (ConnectionError: no route)"),
        ({"opens": "raise PermissionError('no key')"}, "does not take rows of this run (PermissionError: no key)"),
    ],
)
def test_a_logger_that_hangs_dies_or_refuses_is_a_warning_and_holds_up_nobody(
    tmp_path: Path, stubborn: Any, caplog: Any, what: dict[str, str], warned: str
) -> None:
    stubborn(**what)
    write_rows(tmp_path, range(1, 4))
    with caplog.at_level(logging.WARNING), reported("tensorboard", tmp_path) as loggers:
        (tmp_path / "go").touch()  # a start that waited for a logger would never end
        began = time.monotonic()
        (process,) = [child.process for child in loggers._children]
        until = time.monotonic() + 60
        while "tensorboard" not in caplog.text and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
            if "sleep" in str(what) and time.monotonic() - began > 2:
                break
    assert warned in caplog.text
    assert process.poll() is not None
    assert len(caplog.records) <= 2
    assert not loggers.states[0].complete


def test_what_a_hanging_library_has_started_ends_with_it(tmp_path: Path, stubborn: Any) -> None:
    """It also holds the line to the driver open."""
    pid = tmp_path / "pid"
    started = "import subprocess; p = subprocess.Popen(['sleep', '1000'], close_fds=False)"
    stubborn(logs=f"{started}; open({str(pid)!r}, 'w').write(str(p.pid)); time.sleep(1000)")
    write_rows(tmp_path, range(1, 2))
    (tmp_path / "go").touch()
    with reported("tensorboard", tmp_path):
        until(lambda: pid.exists() and pid.read_text(), 60)
        started = psutil.Process(int(pid.read_text()))
        ends = time.monotonic()
    assert time.monotonic() - ends < 60, "it would hang for 1000 s"
    assert still_there([started], timeout_s=20) == []


def test_a_logger_outlives_a_killed_driver_until_it_has_its_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 4))
    code = (
        "import os, sys, time; from pathlib import Path; from rayzero.cluster.files.logger_feed import Loggers\n"
        f"loggers = Loggers(['csv'], 'demo', Path({str(tmp_path)!r}), {{}}, True); loggers.start(lambda *told: None)\n"
        "print(loggers._children[0].process.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    with reported("csv", tmp_path):  # waits for the lock of the one before
        write_rows(tmp_path, range(4, 6))
    assert [row["step"] for row in read_csv(tmp_path)] == ["1", "2", "3", "4", "5"]


def test_what_was_sent_is_counted(tmp_path: Path) -> None:
    told: list[Any] = []
    with reported("csv", tmp_path, told=told):
        write_rows(tmp_path, range(1, 4))
        until(lambda: sum(sent for _, sent, _ in told) >= 3)
    assert [sum(rows) for rows in zip(*[(sent, lost) for _, sent, lost in told], strict=True)] == [3, 0]


# ---- names ----------------------------------------------------------------------------------------------------------


def test_report_to_takes_a_name_a_list_all_and_none() -> None:
    assert RunConfig(report_to="csv").report_to == ("csv",)
    assert RunConfig(report_to=["csv", "tensorboard", "csv"]).report_to == ("csv", "tensorboard")
    assert RunConfig(report_to="none").report_to == RunConfig().report_to == ()
    assert "csv" in RunConfig(report_to="all").report_to
    with pytest.raises(ConfigError, match="report_to is 'tensorbored' but must be 'tensorboard', 'wandb', 'mlflow' or"):
        RunConfig(report_to="tensorbored")


def test_a_logger_that_is_not_installed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rayzero.config.choices.find_spec", lambda name: None)
    require_loggers(("csv",))
    assert RunConfig(report_to="all").report_to == ("csv",)
    from rayzero.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rayzero", "train", "--report-to", "wandb", "--report-to", "csv"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "run.report_to has 'wandb', but the package wandb is not installed; pip install 'rayzero[wandb]'" in (
        capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "has_database", "said"),
    [
        (None, False, "MLFLOW_TRACKING_URI is not set, and mlflow-skinny cannot open MLflow's own database; set"),
        ("sqlite:///x.db", False, "MLFLOW_TRACKING_URI is 'sqlite:///x.db', and mlflow-skinny cannot open a database"),
        ("postgresql+psycopg2://me:secret@h/x", False, "MLFLOW_TRACKING_URI is 'postgresql', and mlflow-skinny"),
        (None, True, None),
        ("http://mlflow:5000", False, None),
        ("file:///mlruns", False, None),
        ("databricks", False, None),
    ],
)
def test_mlflow_without_a_store_that_it_can_open_is_refused_in_one_line(
    uri: str | None, has_database: bool, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"mlflow"} | ({"sqlalchemy"} if has_database else set())
    found = {name: ModuleSpec(name, None, origin=name) for name in there}
    monkeypatch.setattr("rayzero.config.choices.find_spec", found.get)
    monkeypatch.chdir(tmp_path)
    if uri is None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert ("mlflow" in RunConfig(report_to="all").report_to) == (said is None)
    if said is None:
        require_loggers(("mlflow",))
        return
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        require_loggers(("csv", "mlflow"))
    assert "pip install mlflow, or leave 'mlflow' out" in str(caught.value)
    assert "secret" not in str(caught.value)
    (tmp_path / "mlruns").mkdir()  # which MLflow uses instead
    assert ("mlflow" in RunConfig(report_to="all").report_to) == (uri is None)


def test_settings_are_shown_by_dotted_names() -> None:
    nested = {"lr": 0.1, "zero": {"precision": "bf16", "units": ["Block"]}, "clip": None}
    assert flat_settings(nested) == {"lr": 0.1, "zero.precision": "bf16", "zero.units": "['Block']", "clip": None}


# ---- a run ----------------------------------------------------------------------------------------------------------


def learn(config: dict[str, Any]) -> None:
    context = get_context()
    for _, _, optimizer in tiny_steps():
        report({"loss": 1 / (context.step + 1)})
        if context.step in config["saves"]:
            save_checkpoint(optimizer, Path(context.run_dir or "") / "checkpoints" / f"step-{context.step}")
        if context.step == config["end"]:
            return


@pytest.mark.thorough
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_run_that_is_resumed_reports_each_step_once_and_says_where(trainer: Any, nothing_left: None) -> None:
    first = trainer(learn, {"saves": [2], "end": 4}, run={"report_to": "csv"}).fit()
    assert [int(row["step"]) for row in read_csv(first.path)] == [1, 2, 3, 4]
    trainer(learn, {"saves": [], "end": 5}, run={"report_to": "csv", "resume": True}).fit()
    assert [(int(row["step"]), float(row["loss"])) for row in read_csv(first.path)] == expected(range(1, 6))
    lines = format_status(describe_run(first.path)).splitlines()
    assert f"logger      csv: {first.path / 'metrics.csv'}, until step 5" in lines
