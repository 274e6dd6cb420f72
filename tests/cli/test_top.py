"""``rayzero top`` beside exporters that are really asked: one picture, a screen that is left, a run that ends."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from telemetry.strange_servers import nobody

from rayzero.cli.top import top
from rayzero.cluster.processes.process_exporter import Exporter
from rayzero.errors import ConfigError
from rayzero.telemetry import names
from rayzero.telemetry.metric import Role
from rayzero.telemetry.pages import Page
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.telemetry.scrape import Target, service_discovery

COMMAND = sys.modules["rayzero.cli.top"]  # rayzero.cli.top is the function
HOST = "127.0.0.1"


class FakeRun:
    """A coordinator's and a rank's exporter, and the record that a driver, this process, would write."""

    def __init__(self, path: Path, cleanup: ExitStack) -> None:
        self.path, self.rank = path, MemoryRecorder()
        self._targets: tuple[Target, ...] = ()
        page = Page("application/json", lambda: service_discovery(self._targets))
        coordinator = Exporter(MemoryRecorder(), Role.COORDINATOR, host=HOST, pages={"/sd": page})
        cleanup.callback(coordinator.close)
        self._cleanup = cleanup
        self.add(Role.COORDINATOR, None, coordinator.address)
        self.add(Role.RANK, 0, self._exporter())
        self.http_sd = f"http://{coordinator.address}/sd"
        self.write("running")

    def _exporter(self) -> str:
        exporter = Exporter(self.rank, Role.RANK, host=HOST)
        self._cleanup.callback(exporter.close)
        return exporter.address

    def add(self, role: Role, index: int | None, address: str) -> None:
        target = Target(address=address, run="demo", role=role, node=HOST, index=index)
        self._targets = (*self._targets, target)

    def fall_silent(self) -> None:
        """Every exporter closes."""
        self._cleanup.pop_all().close()

    def write(self, state: str, **more: Any) -> None:
        """Replace the record as a driver does."""
        targets = [{"address": target.address, "labels": target.labels} for target in self._targets]
        record = {
            "run": "demo", "state": state, "started_at": time.time(),
            "driver": {"pid": os.getpid(), "host": socket.gethostname()},
            "telemetry": {"http_sd": self.http_sd, "targets": targets},
        }  # fmt: skip
        (self.path / "new.json").write_text(json.dumps(record | more))
        os.replace(self.path / "new.json", self.path / "run.json")

    def step(self, steps: int = 1) -> None:
        """The rank does so many steps of 100 tokens, each half a second long by its own account."""
        for _ in range(steps):
            self.rank.observe(names.STEP_SECONDS, 0.5)
            self.rank.add(names.TOKENS, 100)
        self.rank.set(names.STEP, self.rank.timing(names.STEP_SECONDS).count)
        self.rank.set(names.TRAIN_LOSS, 2.5)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRun]:
    monkeypatch.setattr("rayzero.telemetry.http.REFRESH_S", 0.0)
    monkeypatch.setattr(COMMAND, "_ANSWER_S", 60.0)  # a busy machine answers late
    with ExitStack() as cleanup:
        yield FakeRun(tmp_path, cleanup)


def after_the_first_look(monkeypatch: pytest.MonkeyPatch, *then: Any) -> None:
    """Instead of waiting an interval, have things happen, one after each look."""
    left = list(then)
    monkeypatch.setattr(COMMAND, "sleep", lambda _: left.pop(0)())


def test_once_prints_one_picture_of_the_time_between_two_looks(run, monkeypatch, capsys) -> None:
    run.step(3)
    after_the_first_look(monkeypatch, lambda: run.step(2))
    top(str(run.path), once=True, interval=1.0)
    out = capsys.readouterr().out
    assert out.startswith("demo  running  step 5  loss 2.5000  200 tokens/s  500 ms a step")
    assert "2 steps in the last" in out
    assert out.count("demo  running") == 1


def test_off_a_terminal_it_prints_pictures_until_the_run_ends_with_its_end_state(run, monkeypatch, capsys) -> None:
    after_the_first_look(monkeypatch, run.step, lambda: run.write("failed", error="rank 0 died\nthen more"))
    top(str(run.path), once=False, interval=1.0)
    out = capsys.readouterr().out
    assert out.count("demo  running") == 2
    assert "step 1 " in out
    assert out.splitlines()[-1] == "error       rank 0 died"
    top(str(run.path), once=True, interval=1.0)  # it has ended already
    assert "state       failed" in capsys.readouterr().out


def test_deaths_that_were_outlived_and_changes_of_the_optimizers_are_shown_below(run, monkeypatch, capsys) -> None:
    changed = {
        "id": "a", "why": "asked for", "before": 2, "after": 5, "failed": None, "seconds": {"start": 2.0},
        "pause": 0.412, "moved_bytes": 7, "time": time.time() - 298,
    }  # fmt: skip
    died = {"who": "optimizer 1", "pid": 42, "seconds": 2.0, "time": time.time() - 298}
    said = "from 5 optimizers to 1: publishing what is decided"
    run.write("running", rescaling=said, rescales=[changed], recoveries=[died])
    after_the_first_look(monkeypatch, run.step)
    top(str(run.path), once=True, interval=1.0)
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "recovery  optimizer 1 died 5 min ago and was replaced by pid 42 within 2.0 s",
        "",
        "change    from 5 optimizers to 1: publishing what is decided",
        "change    2 optimizers became 5, 5 min ago; training stood for 0.41 s",
    ]


def test_a_run_that_is_starting_is_waited_for(run, monkeypatch, capsys) -> None:
    run.write("starting", telemetry=None)
    after_the_first_look(monkeypatch, lambda: None, lambda: run.write("running"), run.step)
    top(str(run.path), once=True, interval=1.0)
    told = capsys.readouterr()
    assert told.out.startswith("demo  running  step 1")
    assert told.err == "run 'demo' is starting: its processes are not up yet\n"
    run.write("starting", telemetry=None)
    after_the_first_look(monkeypatch, lambda: run.write("failed", error="no place"))
    top(str(run.path), once=True, interval=1.0)
    assert "state       failed" in capsys.readouterr().out


def test_a_run_that_starts_again_is_watched_on(run, monkeypatch, capsys) -> None:
    again = {"who": "the run", "pid": None, "seconds": 9.0, "time": time.time()}
    run.step(7)
    after_the_first_look(
        monkeypatch,
        run.step,
        lambda: run.write("starting", telemetry=None),
        lambda: run.write("running", recoveries=[again]),
        run.step,
        lambda: run.write("finished"),
    )
    top(str(run.path), once=False, interval=1.0)
    out = capsys.readouterr().out
    assert out.count("started again from a checkpoint within 9.0 s") >= 2, "a picture, and the end"
    assert "state       finished" in out


def test_processes_that_discovery_tells_of_later_are_shown_and_one_that_is_mute_is_named(
    run, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(COMMAND, "_ANSWER_S", 3.0)
    with socket.create_server((HOST, 0)) as mute:  # takes connections, answers none
        address = f"{HOST}:{mute.getsockname()[1]}"
        after_the_first_look(monkeypatch, lambda: run.add(Role.RANK, 1, address))
        top(str(run.path), once=True, interval=1.0)
    out = capsys.readouterr().out
    assert "rank 1 does not answer: no answer within 3 s" in out
    assert "\nrank 0 " in out


def test_a_run_that_is_mute_is_shown_so_at_the_second_look_because_it_may_be_ending(run, monkeypatch, capsys) -> None:
    after_the_first_look(monkeypatch, run.fall_silent, lambda: run.write("finished"))
    top(str(run.path), once=False, interval=1.0)
    assert "does not answer" not in capsys.readouterr().out
    run.write("running")
    after_the_first_look(monkeypatch, lambda: None)
    top(str(run.path), once=True, interval=1.0)
    out = capsys.readouterr().out
    assert "rank 0 does not answer: Connection refused" in out
    assert "No process answers." in out


def test_without_its_coordinator_the_record_says_who_there_is(run, monkeypatch, capsys) -> None:
    run.step()
    after_the_first_look(monkeypatch, run.step)
    with nobody() as gone:
        run.http_sd = f"http://{gone}/sd"
        run.write("running")
        top(str(run.path), once=True, interval=1.0)
    assert "step 2 " in capsys.readouterr().out


def test_what_cannot_be_watched_is_refused_in_one_line(run) -> None:
    for interval in (0.5, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"--interval is .* but must be at least 1 second"):
            top(str(run.path), once=False, interval=interval)
    run.write("running", telemetry=None)
    with pytest.raises(ConfigError, match=r"run 'demo' serves no metrics \(run.telemetry.enabled is false\)"):
        top(str(run.path), once=False, interval=1.0)
    run.write("running", telemetry={"http_sd": "http://127.0.0.1:1/sd", "targets": [{"address": "a", "labels": {}}]})
    with pytest.raises(ConfigError, match="the record of run 'demo' is damaged: the target a has no label 'role'"):
        top(str(run.path), once=False, interval=1.0)


def test_on_a_terminal_ctrl_c_leaves_the_screen_and_the_last_picture(run) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rayzero", "top", str(run.path), "--interval", "1"],
        stdin=slave, stdout=slave, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's jobs may ignore it
    )  # fmt: skip
    os.close(slave)
    said = bytearray()

    def read() -> None:
        with suppress(OSError):  # the other end is closed: the process has ended
            while part := os.read(master, 4096):
                said.extend(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        run.step()
        deadline = time.monotonic() + 120
        while said.count(b"step 1 ") < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
        reader.join(60)
        os.close(master)
    assert (process.returncode, err) == (0, "")
    _, entered, screen = bytes(said).partition(b"\x1b[?1049h")
    shown, left, after = screen.partition(b"\x1b[?1049l")
    assert entered
    assert left
    assert b"demo" in shown
    assert b"step 1 " in after


def test_ctrl_c_while_a_picture_is_drawn_waits_until_it_is_whole(run, monkeypatch) -> None:
    drawn: list[str] = []

    def update(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        drawn.append("whole")

    monkeypatch.setattr(COMMAND, "_screen", lambda console: nullcontext(update))
    console = Console(file=io.StringIO(), width=100)
    run.step()
    with pytest.raises(KeyboardInterrupt):
        COMMAND._watch_live(run.path, 1.0, console)
    assert drawn == ["whole"]
    assert "step 1 " in console.file.getvalue(), "the last picture stays"
