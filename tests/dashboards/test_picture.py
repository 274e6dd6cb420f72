"""The picture of a dashboard, from written-out answers of Prometheus: no server."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from .queries import BOARDS, ROOT, board, panels

_spec = importlib.util.spec_from_file_location("picture", ROOT / "picture.py")  # "dashboards" is these tests here
picture = importlib.util.module_from_spec(_spec)
sys.modules["picture"] = picture
_spec.loader.exec_module(picture)

SPAN = picture.Span(1_700_000_000.0, 1_700_000_120.0, 1.0, "15s")
LABELS = {"__name__": "x", "run": "demo", "rank": "0", "role": "rank", "actor": "1", "param_group": "0"}


def answer(what: str, parameters: dict[str, str]) -> dict[str, Any]:
    """Two series of three points, one of them not a number, as the HTTP API writes them."""
    start = SPAN.start
    if what == "query":
        return {"resultType": "vector", "result": [{"metric": LABELS, "value": [SPAN.end, "1"]}]}
    assert float(parameters["step"]) == SPAN.step
    values = [[start, "0.25"], [start + 1, "NaN"], [start + 60, "0.5"]]
    others = [{"metric": LABELS | {"rank": rank}, "values": values} for rank in ("0", "1")]
    return {"resultType": "matrix", "result": others}


def nothing(what: str, parameters: dict[str, str]) -> dict[str, Any]:
    return {"resultType": "matrix", "result": []}


@pytest.mark.spread(3)
@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_panel_has_a_place_in_the_picture_with_its_title_and_no_two_share_one(path: Path) -> None:
    described = board(path)
    figure = picture.draw(described, answer, SPAN, "")
    places = [one for one in figure.axes if not one.get_label().startswith("lines of")]
    assert [one.get_label() for one in places] == [one["title"] for one in panels(described)]
    assert all(one.get_label() in {text.get_text() for text in one.texts} for one in places)
    boxes = [one.get_position() for one in places]
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= 1 and box.y1 <= 1 for box in boxes)
    for a, b in itertools.combinations(boxes, 2):
        assert a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0


def test_rows_are_named_and_panels_lie_as_in_the_grid() -> None:
    described = board(next(path for path in BOARDS if path.stem == "rayzero-run"))
    figure = picture.draw(described, answer, SPAN, "of the 5th of May")
    said = {text.get_text() for text in figure.texts}
    assert {"At a glance", "Learning", "What runs", "RayZero / Run", "of the 5th of May"} <= said
    at = {one.get_label(): one.get_position() for one in figure.axes}
    assert at["Step"].y0 > at["Loss"].y1
    assert at["Loss"].x1 < at["Gradient norm"].x0
    assert at["Loss"].y0 == at["Gradient norm"].y0


def test_lines_have_the_legends_and_the_unit_of_the_panel() -> None:
    described = board(next(path for path in BOARDS if path.stem == "rayzero-run"))
    lines = {one.get_label(): one for one in picture.draw(described, answer, SPAN, "").axes}
    throughput = lines["lines of Throughput"]
    assert [text.get_text() for text in throughput.get_legend().get_texts()] == ["demo rank 0", "demo rank 1"]
    clipped = lines["lines of Clipped and skipped steps"]
    assert clipped.yaxis.get_major_formatter()(0.25, 0) == "25 %"
    assert any("0.5" in text.get_text() for text in lines["Step"].texts), "the last value, not NaN"


def test_a_panel_without_data_says_so_in_its_place() -> None:
    described = board(BOARDS[0])
    figure = picture.draw(described, nothing, SPAN, "")
    assert len(figure.axes) == len(panels(described))
    assert all("no data" in {text.get_text() for text in one.texts} for one in figure.axes)


def test_queries_are_sent_with_all_variables_and_the_rate_interval() -> None:
    assert picture.with_all('rate(x{run=~"$run",rank=~"$rank"}[$__rate_interval])', "15s") == (
        'rate(x{run=~".*",rank=~".*"}[15s])'
    )


def test_legends_follow_grafanas_template() -> None:
    assert picture.legend("{{run}} rank {{ rank }}", LABELS) == "demo rank 0"
    assert picture.legend("__auto", {"run": "demo", "kernel": "native"}) == "kernel=native, run=demo"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.123, "percentunit", "12.3 %"),
        (90, "s", "1.5 min"),
        (7200, "s", "2 h"),
        (0.0456, "s", "45.6 ms"),
        (0.0, "s", "0 s"),
        (3565, "short", "3.565 K"),
        (1536, "bytes", "1.5 KiB"),
        (1 << 30, "Bps", "1 GiB/s"),
        (300, "none", "300"),
        (12, "ops", "12 ops/s"),
    ],
)
def test_numbers_are_written_in_their_unit(value: float, unit: str, text: str) -> None:
    assert picture.in_unit(value, unit) == text


def test_colours_follow_the_thresholds() -> None:
    steps = [{"color": "green", "value": None}, {"color": "red", "value": 1}]
    assert picture.colour_of(0.9, steps) != picture.colour_of(1, steps) != picture.colour_of(1, [])


def test_a_server_that_is_not_there_is_one_line(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["picture.py", "http://127.0.0.1:1", str(tmp_path / "a.png")])
    assert picture.main() == 1
    assert "http://127.0.0.1:1 did not answer" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_all_units_of_all_boards_are_written() -> None:
    units = {one["fieldConfig"]["defaults"]["unit"] for path in BOARDS for one in panels(board(path))}
    assert all(picture.in_unit(2.0, unit) for unit in units)
