"""``rayzero status`` on damaged and hostile records: one line, at once."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayzero.cli.status import describe_run, format_status
from rayzero.errors import RayZeroError
from rayzero.recipes.run_log import StepRow
from rayzero.slabs.sweep import Hold
from rayzero.store.shm.signals import host_identity, why_no_sharing

RECORD = {
    "run": "demo", "state": "finished", "started_at": time.time() - 9, "ended_at": time.time(), "error": None,
    "driver": {"pid": 1, "host": "h"}, "members": [{"who": "rank 0", "pid": 1, "node": "n", "host": "h"}],
    "resumed_from": None,
    "telemetry": {"http_sd": "http://h:1/sd", "targets": [{"address": "h:1", "labels": {"a": "b"}}]},
    "addresses": [], "metrics": {},
    "recoveries": [{"who": "rank 0", "pid": 7, "seconds": 2.0, "time": time.time()}],
    "rescales": [
        {
            "id": "a", "why": "asked for", "before": 2, "after": 3, "failed": None, "seconds": {}, "pause": 0.4,
            "moved_bytes": 7, "time": time.time(),
        }
    ],
    "replacing": [],
    "rescaling": None,
    "states": {"lineage": "mine", "directory": "/dev/shm", "memory": "boot"},
}  # fmt: skip
ROW = StepRow(
    step=3, loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, tokens_per_second=9.0, step_seconds=0.5, fetch_wait_seconds=0.0,
    optimizer_exposed_seconds=0.0, memory_bytes=5,
)  # fmt: skip
FILES = {
    "run.json": json.dumps(RECORD),
    "metrics.jsonl": (json.dumps(asdict(ROW)) + "\n") * 2,
    "plan.json": '{"steps": 20, "compared": []}',
    "config.yaml": "steps: 9\n",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def shown(run: Path) -> str:
    """What the command prints, in both of its forms."""
    described = describe_run(run)
    return format_status(described).encode().decode() + json.dumps(described)


def lines_of(run: Path) -> list[str]:
    """What people see."""
    return format_status(describe_run(run)).splitlines()


def fails_in_one_line(run: Path) -> bool:
    """Whether it fails at all."""
    said = ""
    try:
        shown(run)
    except RayZeroError as error:
        said = str(error)
    assert "\n" not in said
    return bool(said)


@pytest.mark.promise("observable", "cli")
def test_a_sound_run_is_shown(run: Path) -> None:
    assert "step        3 of 9" in shown(run)


def recovery(who: str, seconds_ago: float) -> dict[str, Any]:
    return {"who": who, "pid": 42, "seconds": 2.04, "time": time.time() - seconds_ago}


def test_recoveries_are_shown_the_newest_first_and_the_oldest_are_counted(run: Path) -> None:
    many = [recovery(f"rank {number}", 7200.0 - 600 * number) for number in range(6)]
    (run / "run.json").write_text(json.dumps(RECORD | {"recoveries": [*many, recovery("optimizer 1", 299)]}))
    lines = [line for line in lines_of(run) if line.startswith("recovery ")]
    assert lines[0] == "recovery    optimizer 1 died 5 min ago and was replaced by pid 42 within 2.0 s"
    assert lines[4] == "recovery    rank 2 died 1.7 h ago and was replaced by pid 42 within 2.0 s"
    again = recovery("the run", 299) | {"pid": None}
    (run / "run.json").write_text(json.dumps(RECORD | {"recoveries": [again]}))
    assert "recovery    the run failed 5 min ago and started again from a checkpoint within 2.0 s" in lines_of(run)
    assert lines[5:] == ["recovery    and 2 earlier deaths: see run.json"]


def rescale(before: int, after: int, seconds_ago: float, **more: Any) -> dict[str, Any]:
    """A change of the optimizers, as a driver records it."""
    told = {"id": "a", "why": "asked for", "failed": None, "seconds": {"start": 3.0}, "pause": 0.412, "moved_bytes": 7}
    return told | {"before": before, "after": after, "time": time.time() - seconds_ago} | more


def changes_of(run: Path, **record: Any) -> list[str]:
    """The lines of changes, for a record with these entries."""
    (run / "run.json").write_text(json.dumps(RECORD | record))
    return [line for line in lines_of(run) if line.startswith("change ")]


def test_changes_of_the_optimizers_are_shown_the_newest_first_with_what_they_took_or_why_they_were_given_up(
    run: Path,
) -> None:
    full = "ranks wait 20% of a step for updates, above the target of 10%"
    some = [
        rescale(1, 2, 7200, why=full),
        rescale(2, 2, 600),
        rescale(2, 5, 181),
        rescale(5, 5, 60, failed="a node is missing", pause=0.0),
        rescale(5, 5, 30, seconds={}, pause=0.0),
    ]
    assert changes_of(run, rescales=some) == [
        "change      5 optimizers were asked for, 30 s ago, and there already",
        "change      5 optimizers stayed, 60 s ago: a node is missing",
        "change      2 optimizers became 5, 3 min ago; training stood for 0.41 s",
        "change      optimizers moved to other nodes, 10 min ago; training stood for 0.41 s",
        f"change      1 optimizer became 2, 2.0 h ago, because {full}; training stood for 0.41 s",
    ]
    assert describe_run(run)["rescales"] == some
    assert changes_of(run, rescales=[*some, *some])[5:] == ["change      and 5 earlier changes: see run.json"]
    (run / "run.json").write_text(json.dumps({key: value for key, value in RECORD.items() if key != "rescales"}))
    assert describe_run(run)["rescales"] == [], "no driver wrote them then"


def killed(run: Path, slabs: Path, **states: str) -> dict[str, Any]:
    """A record as a driver leaves it that was killed: its states were in ``slabs``."""
    driver = {"pid": 2**22 + 1, "host": socket.gethostname()}  # no process has so high a pid
    where = {"lineage": "mine", "directory": str(slabs), "memory": host_identity(slabs)} | states
    record = RECORD | {"state": "running", "ended_at": None, "driver": driver, "states": where}
    (run / "run.json").write_text(json.dumps(record))
    return record


@pytest.fixture
def slabs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why_no_sharing() is not None:
        pytest.skip("no shared memory here")
    return tmp_path_factory.mktemp("slabs")


def test_a_killed_runs_states_are_shown_while_they_are_held_with_what_continues_it(run: Path, slabs: Path) -> None:
    killed(run, slabs)
    hold = Hold(slabs, "mine", time.time() + 600)
    assert "memory      not kept: the run's processes have not ended yet; ask again in a few seconds" in lines_of(run)
    hold.tell(41, time.time() + 299)
    told = lines_of(run)
    assert told[1].startswith("state       lost, ")
    assert f"memory      kept in {slabs} for another 5 min: step 41 is next" in told
    assert f"continue    rayzero train --resume --run-dir {run}" in told
    assert describe_run(run)["memory"]["step"] == 41
    (run / "config.yaml").unlink()
    assert f"continue    RunConfig(name='{run.name}', storage_path='{run.parent}', resume=True)" in lines_of(run)
    hold.close()
    assert "memory      not kept: their time is over, or they were not enough to go on from" in lines_of(run)
    assert describe_run(run)["continue_with"] is None, "there is no checkpoint"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"states": None}, "not kept: the run kept no states in shared memory"),
        ({"memory": "boot:1:2:0"}, "on another host, or this host has been restarted"),
        ({"directory": "/nowhere\0"}, "on another host, or this host has been restarted"),
        ({"lineage": "another's"}, "not kept: their time is over, or they were not enough to go on from"),
    ],
)
def test_states_that_are_not_this_runs_or_this_hosts_are_not_kept(
    run: Path, slabs: Path, change: dict[str, Any], why: str
) -> None:
    if "states" in change:
        (run / "run.json").write_text(json.dumps(killed(run, slabs) | change))
    else:
        killed(run, slabs, **change)
    hold = Hold(slabs, "mine", time.time() + 600)
    hold.tell(41, time.time() + 600)
    assert why in shown(run)
    assert describe_run(run)["continue_with"] is None
    hold.close()


def test_states_that_another_run_takes_over_are_not_offered(run: Path, slabs: Path) -> None:
    killed(run, slabs)
    hold = Hold(slabs, "mine")
    assert "memory      not kept: another run is taking them over" in lines_of(run)
    hold.close()


def test_a_run_that_was_not_killed_says_nothing_of_memory(run: Path) -> None:
    assert describe_run(run)["memory"] is None
    assert "memory " not in shown(run)


@pytest.mark.promise("safe", "cli")
def test_nothing_that_a_run_says_reaches_the_terminal_as_a_control_character(run: Path) -> None:
    rude = "\x1b[31m\x9b2J\nstate  finished\r\u202e"
    record = RECORD | {
        "run": rude, "state": "running", "error": rude,
        "members": [{"who": rude, "pid": 1, "node": rude, "host": rude}],
        "telemetry": {"http_sd": rude, "targets": []}, "recoveries": [recovery(rude, 1)], "rescaling": rude,
        "replacing": [rude],
        "rescales": [rescale(2, 3, 1, why=rude), rescale(3, 4, 1, failed=rude)],
    }  # fmt: skip
    described = describe_run(run) | record | {"damaged": [rude], "last": {"step": 3, rude: 1.0, "said": rude}}
    lines = format_status(described).split("\n")
    assert len(lines) == 14
    assert all(line.isprintable() for line in lines)
    assert f"run         \\x1b[31m\\x9b2J\\nstate  finished\\r\\u202e ({run})" in lines


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "place",
    [
        os.mkfifo, sparse, link("/dev/zero"), link("/dev/stdin"), lambda path: path.symlink_to(path.name),
        lambda path: path.mkdir(), text("[" * 100_000), text('{"a": ' * 100_000), text("\0"), text("null\nnull\n"),
        text('{"step": "x"}\n{}\n'), text("[]"), text('{"steps": {"a": 1}}'),
        lambda path: path.write_bytes(b"\xff\xfe"),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_file_that_is_something_else_is_one_line(run: Path, name: str, place: Any) -> None:
    (run / name).unlink()
    place(run / name)
    if name == "plan.json":
        shown(run)  # it is left out
    elif name == "metrics.jsonl":
        fails_in_one_line(run)  # one line alone may be one that was cut short
    else:
        assert fails_in_one_line(run)


ODD: list[Any] = [
    None, True, 0, -1, 2**64, 10**400, 0.5, float("nan"), float("inf"), "", "\0", "\ud800", "../..", [], [None], {},
    {"a": []},
]  # fmt: skip


@settings(
    max_examples=3 * settings.default.max_examples,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_odd_values_in_a_record_are_one_line_or_shown(run: Path, data: Any) -> None:
    record, row = json.loads(FILES["run.json"]), asdict(ROW)
    value = data.draw(st.sampled_from(ODD))
    target: Any = data.draw(
        st.sampled_from(
            [
                record,
                record["driver"],
                record["members"][0],
                record["telemetry"],
                record["recoveries"][0],
                record["rescales"][0],
                record["states"],
                row,
            ]
        )
    )
    target[data.draw(st.sampled_from(sorted(target)))] = value
    record["state"] = data.draw(st.sampled_from([record["state"], "running"]))
    (run / "run.json").write_text(json.dumps(record))
    (run / "metrics.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(asdict(ROW))}\n{json.dumps(row)}\n")
    fails_in_one_line(run)


def test_processes_stand_by_name_and_number_whenever_they_joined(run: Path) -> None:
    names = ["optimizer 9", "rank 10", "rank 2", "optimizer 10", "optimizer 1"]
    members = [{"who": who, "pid": 1, "host": "h"} for who in names]
    told = format_status(describe_run(run) | {"state": "running", "members": members})
    shown = re.findall(r"^process +(.*): pid 1 on h$", told, re.M)
    assert shown == ["optimizer 1", "optimizer 9", "optimizer 10", "rank 2", "rank 10"]


OWN_HOST = {"driver": {"pid": os.getpid(), "host": socket.gethostname()}, "started_at": time.time()}
(MEMBER,) = RECORD["members"]


@pytest.mark.parametrize(
    ("entries", "begin", "lines"),
    [
        (
            {"state": "running", "members": [MEMBER, MEMBER | {"who": "optimizer 3", "has_shards": False}]},
            "process",
            ["process     optimizer 3: pid 1 on h, without shards", "process     rank 0: pid 1 on h"],
        ),
        (
            {
                "loggers": [
                    {"logger": "csv", "where": "demo.csv", "sent": 7, "lost": 0, "step": 7, "error": None},
                    {"logger": "mlflow", "where": None, "sent": 0, "lost": 1, "step": -1, "error": "OSError: no route"},
                ]
            },
            "logger",
            [
                "logger      csv: demo.csv, until step 7",
                "logger      mlflow: not open, 1 row refused (OSError: no route)",
            ],
        ),
        (
            OWN_HOST | {"state": "running", "telemetry": RECORD["telemetry"] | {"page": "http://127.0.0.1:1/"}},
            "live page",
            ["live page   http://127.0.0.1:1/"],
        ),
        (
            OWN_HOST | {"state": "running", "recoveries": [], "replacing": ["rank 0", "optimizer 1"]},
            "recovery",
            [f"recovery    {who} died; another process is taking its place" for who in ("rank 0", "optimizer 1")],
        ),
        (OWN_HOST | {"state": "running", "recoveries": [], "replacing": []}, "recovery", []),
        (
            OWN_HOST | {"state": "running", "rescales": [], "rescaling": "from 2 optimizers to 5: 1 of 3 are up"},
            "change",
            ["change      from 2 optimizers to 5: 1 of 3 are up"],
        ),
        ({"rescales": [], "rescaling": "the run has ended"}, "change", []),
    ],
    ids=["without shards", "loggers", "live page", "replacing", "not replacing", "changing", "ended"],
)
def test_what_a_record_says_has_lines(run: Path, entries: dict[str, Any], begin: str, lines: list[str]) -> None:
    (run / "run.json").write_text(json.dumps(RECORD | entries))
    assert [line for line in lines_of(run) if line.startswith(begin + " ")] == lines
