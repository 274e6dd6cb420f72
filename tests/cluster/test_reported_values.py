"""A loop's report is refused while it is made, or can be read again everywhere; a row that cannot be costs no other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayzero.cli.status import describe_run, format_status
from rayzero.cluster.files.metrics_log import (
    METRICS,
    MetricsLog,
    RowTail,
    latest_metrics,
    read_log,
    trim_log,
    written_rows,
)
from rayzero.cluster.files.run_dir import RunDirectory
from rayzero.cluster.files.run_record import RECORD, DriverProcess, RunRecord, read_record
from rayzero.cluster.run import Report, RunState
from rayzero.config import RunConfig
from rayzero.engine.context import RankContext
from rayzero.engine.loop.tracked import LoopReport
from rayzero.errors import ConfigError
from rayzero.recipes.recipe import RecipeConfig

TEXT = st.text(st.characters(exclude_categories=()))  # half of a surrogate pair, too
VALUES = st.one_of(
    st.integers(),
    st.integers(-(1 << 1100), 1 << 1100),
    st.sampled_from([(1 << 63) - 1, 1 << 63, (1 << 64) - 1, 42 * 10**21, 10**400, 10**5000]),
    st.floats(),
    st.booleans(),
    TEXT,
    st.none(),
)


def reported(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics as the run gets them from a loop."""
    made: list[LoopReport] = []
    RankContext(sink=made.append).report(metrics)
    return made[0].metrics


def strict(text: str) -> Any:
    """What a reader of JSON proper makes of a text."""

    def no_number(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=no_number)


def write_record(run_dir: Path, **more: Any) -> None:
    """Write the run.json of a run that has ended, as its driver does."""
    driver = DriverProcess(pid=1, host="h")
    record = RunRecord(
        run=run_dir.name, state=RunState.FINISHED, started_at=1.0, ended_at=9.0, driver=driver, **more
    )  # fmt: skip
    with RunDirectory.open(RunConfig(name=run_dir.name, storage_path=str(run_dir.parent))) as directory:
        directory.write_record(record)


@example(name="n", value=10**308)  # the mean of two is more than a float holds
@given(name=TEXT, value=VALUES)
def test_what_a_report_takes_is_read_again_and_shown(
    name: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    try:
        metrics = reported({name: value})
    except ConfigError as error:
        str(error).encode()  # it can be printed
        return
    log = MetricsLog(run_dir)
    log.add([Report(rank=rank, step=1, time=5.0, metrics=metrics | {"loss": value}) for rank in (0, 1)])
    log.close()
    is_finite = not isinstance(value, float) or math.isfinite(value)
    stored = f"reported_{name}" if name in ("step", "rank", "time") else name
    rows = read_log(run_dir)
    assert [row[stored] for row in rows] == [value if is_finite else None] * 2
    assert RowTail(run_dir).next() == rows
    write_record(run_dir, metrics={"0": metrics})
    described = describe_run(run_dir)
    assert format_status(described).encode()
    assert latest_metrics(rows) is not None
    trim_log(run_dir, 1)
    assert read_log(run_dir) == rows


@pytest.mark.parametrize("value", [(1 << 64) - 1, 42 * 10**21, -(10**300)])
def test_a_large_number_is_taken(value: int) -> None:
    assert reported({"n": value}) == {"n": value}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"flops": 10**400}, r"report: 'flops' is a whole number of 1,329 bits; .* at most 1\.8e\+308"),
        ({"flops": -(10**5000)}, r"report: 'flops' is a whole number of"),
        ({"sample": "a\ud800b"}, r"report: 'sample' is 'a\\ud800b', .* surrogate"),
        ({"\udcff": 1.0}, r"report: the name '\\udcff' .* surrogate"),
    ],
)
@pytest.mark.parametrize("in_run", [True, False])
def test_what_nobody_could_read_is_refused_as_it_is_reported(metrics: dict[str, Any], said: str, in_run: bool) -> None:
    made: list[LoopReport] = []
    context = RankContext(sink=made.append if in_run else None)
    with pytest.raises(ConfigError, match=said):
        context.report(metrics)
    assert (made, context.reports) == ([], [])


def test_a_row_that_cannot_be_read_costs_that_row_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = [
        b"nonsense",
        b"[]",
        b'{"loss": 1.0}',
        b'{"step": "one"}',
        b"9",
        b"\xff",
        b"",
        b'{"step": 2, "n": 1' + b"0" * 400 + b"}",
    ]
    lines = [b'{"step": 1, "rank": 0, "time": 1.0}', *bad, b'{"step": 2, "rank": 0, "time": 1.0}', b'{"step": 3, "ra']
    path = tmp_path / METRICS
    path.write_bytes(b"\n".join(lines))
    assert [row["step"] for row in read_log(tmp_path)] == [1, 2]
    [warning] = caplog.messages
    assert warning.startswith(f"8 lines of {path} cannot be read, and are left out; line 2 is not a row: ")
    assert [row["step"] for row in RowTail(tmp_path).next()] == [1, 2]
    assert written_rows(tmp_path).of_ranks == {(0, 1): 1, (0, 2): 1}
    write_record(tmp_path)
    assert describe_run(tmp_path)["last"] == {"step": 2}
    trim_log(tmp_path, 2)
    assert path.read_bytes() == b"\n".join([*lines[:-1], b""]), "no bytes are lost but those of a line cut short"
    trim_log(tmp_path, 1)
    assert path.read_bytes() == b"\n".join([*lines[:-2], b""])


def test_a_row_that_is_longer_than_is_read_at_once_holds_up_no_other(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.add([Report(rank=0, step=step, metrics={"a": "x" * size}) for step, size in enumerate((1, 3 << 20, 1))])
    log.close()
    tail = RowTail(tmp_path)
    seen: list[int] = []
    while rows := tail.next():
        seen += [row["step"] for row in rows]
    assert seen == [0, 2]
    log.add([Report(rank=0, step=3, metrics={})])
    log.close()
    assert [row["step"] for row in tail.next()] == [3]


def test_numbers_that_are_not_finite_are_null_in_what_a_run_writes_and_shows(tmp_path: Path) -> None:
    strange = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": (1.0, "half \udcff")}
    write_record(tmp_path, metrics={"0": strange}, error="no file '\udcff'")
    expected = {"a": None, "b": [None, {"c": None}], "d": [1.0, "half \\udcff"]}
    assert strict((tmp_path / RECORD).read_text())["metrics"] == {"0": expected}
    found = read_record(tmp_path)
    assert found is not None
    assert found["error"] == r"no file '\udcff'"
    (tmp_path / METRICS).write_text('{"step": 1, "loss": NaN, "norm": 1e999}\n')
    assert read_log(tmp_path) == [{"step": 1, "loss": None, "norm": None}]


def test_a_seed_that_torch_cannot_take_is_refused_in_the_recipe() -> None:
    assert RecipeConfig(seed=(1 << 64) - 1).seed == (1 << 64) - 1
    with pytest.raises(ConfigError, match="less than 18446744073709551616"):
        RecipeConfig(seed=1 << 64)
