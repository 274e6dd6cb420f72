"""``rayzero status`` on damaged and hostile records: one line, at once."""

from __future__ import annotations

import json
import os
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

RECORD = {
    "run": "demo", "state": "finished", "started_at": time.time() - 9, "ended_at": time.time(), "error": None,
    "driver": {"pid": 1, "host": "h"}, "members": [{"who": "rank 0", "pid": 1, "host": "h"}], "resumed_from": None,
    "telemetry": {"http_sd": "http://h:1/sd", "targets": [{"address": "h:1", "labels": {"a": "b"}}]},
    "routing": None, "metrics": {},
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


def fails_in_one_line(run: Path) -> bool:
    """Whether it fails at all."""
    said = ""
    try:
        shown(run)
    except RayZeroError as error:
        said = str(error)
    assert "\n" not in said
    return bool(said)


def test_a_sound_run_is_shown(run: Path) -> None:
    assert "step        3 of 9" in shown(run)


def test_nothing_that_a_run_says_reaches_the_terminal_as_a_control_character(run: Path) -> None:
    rude = "\x1b[31m\x9b2J\nstate  finished\r\u202e"
    record = RECORD | {
        "run": rude, "state": "running", "error": rude, "members": [{"who": rude, "pid": 1, "host": rude}],
        "telemetry": {"http_sd": rude, "targets": []},
    }  # fmt: skip
    described = describe_run(run) | record | {"damaged": [rude], "last": {"step": 3, rude: 1.0, "said": rude}}
    lines = format_status(described).split("\n")
    assert len(lines) == 9
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


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_values_in_a_record_are_one_line_or_shown(run: Path, data: Any) -> None:
    record, row = json.loads(FILES["run.json"]), asdict(ROW)
    value = data.draw(st.sampled_from(ODD))
    target: Any = data.draw(st.sampled_from([record, record["driver"], record["members"][0], record["telemetry"], row]))
    target[data.draw(st.sampled_from(sorted(target)))] = value
    record["state"] = data.draw(st.sampled_from([record["state"], "running"]))
    (run / "run.json").write_text(json.dumps(record))
    (run / "metrics.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(asdict(ROW))}\n{json.dumps(row)}\n")
    fails_in_one_line(run)
