"""Draw a dashboard from what a Prometheus has, where no Grafana is to be had: matplotlib, not Grafana's own rendering.

    python dashboards/picture.py http://127.0.0.1:9090 dashboards/run.png [--board rayzero-run] [--seconds 300]

Asks that Prometheus for every query of the dashboard's own JSON (json/), and puts each panel at its place in the
dashboard's grid, with its title, unit and legend. Variables are "All"; annotations are dashed lines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

HERE = Path(__file__).parent
COLUMNS, ROW, GAP = 24, 0.024, 0.12  # of Grafana's grid; the height of its row in units of the width; inches
WIDTH, DPI = 15.0, 80
INK, QUIET, GROUND, CARD, FRAME = "#1f2328", "#6a737d", "#f4f5f5", "#ffffff", "#d8dade"
LINES = ("#3b7dd8", "#e0752d", "#3f9c4f", "#b84cc0", "#c7a20c", "#4cb8c0", "#c0392b", "#7f8c8d")
NAMED = {"green": "#2e8b3d", "orange": "#d9822b", "red": "#c0392b", "blue": "#3b7dd8", "purple": "#8e5cc7"}

DRAWN = "answered by a Prometheus and drawn by dashboards/picture.py, not by Grafana"

Ask = Callable[[str, dict[str, str]], dict[str, Any]]
"""One request of Prometheus' API: its name ("query", "query_range") and parameters to the ``data`` of its answer."""


@dataclass(frozen=True, slots=True)
class Span:
    """What is drawn: seconds since 1970, and how far apart two points are."""

    start: float
    end: float
    step: float
    rate_interval: str  # what $__rate_interval stands for


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel; times in seconds since 1970."""

    name: str
    times: tuple[float, ...]
    values: tuple[float, ...]
    labels: tuple[tuple[str, str], ...]


def with_all(expr: str, rate_interval: str) -> str:
    """The query as Grafana sends it with All chosen in every variable."""
    return re.sub(r'"\$\w+"', '".*"', expr.replace("$__rate_interval", rate_interval))


def legend(template: str, labels: dict[str, str]) -> str:
    """A series' name as Grafana makes it of the legend's template."""
    if template in ("", "__auto"):
        return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), template).strip()


def series_of(ask: Ask, expr: str, template: str, span: Span, instant: bool = False) -> list[Series]:
    """What Prometheus answers to one query, as finite points."""
    query = {"query": with_all(expr, span.rate_interval)}
    if instant:
        answer = ask("query", query | {"time": str(span.end)})["result"]
    else:
        times = {"start": str(span.start), "end": str(span.end), "step": str(span.step)}
        answer = ask("query_range", query | times)["result"]
    return [_series(one, template) for one in answer]


def _series(one: dict[str, Any], template: str) -> Series:
    labels = {key: value for key, value in one["metric"].items() if key != "__name__"}
    points = one["values"] if "values" in one else [one["value"]]
    finite = [(float(at), float(value)) for at, value in points if math.isfinite(float(value))]
    times, values = tuple(at for at, _ in finite), tuple(value for _, value in finite)
    return Series(legend(template, labels), times, values, tuple(sorted(labels.items())))


def in_unit(value: float, unit: str) -> str:
    """A number as Grafana writes it in one of the dashboards' units, to three figures."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return _seconds(value)
    if unit in ("bytes", "Bps"):
        return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB")) + ("/s" if unit == "Bps" else "")
    if unit == "dateTimeAsIso":
        return datetime.datetime.fromtimestamp(value).isoformat(" ", "seconds")
    after = {"reqps": " req/s", "ops": " ops/s"}.get(unit, "")
    return (f"{value:.4g}" if unit == "none" else _scaled(value, 1000, ("", "K", "Mil", "Bil", "Tri"))) + after


def _seconds(value: float) -> str:
    size = abs(value)
    if size >= 60:
        return f"{value / 3600:.3g} h" if size >= 3600 else f"{value / 60:.3g} min"
    for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if size * factor >= 1 or not size:
            return f"{value * factor:.3g} {name}"
    return f"{value * 1e9:.3g} ns"


def _scaled(value: float, base: int, names: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value, power = value / base, power + 1
    return f"{value:.4g} {names[power]}".strip()


def colour_of(value: float, thresholds: list[dict[str, Any]]) -> str:
    """The colour of the last threshold that the value has reached; ink without thresholds."""
    reached = [one["color"] for one in thresholds if one["value"] is None or value >= one["value"]]
    return NAMED[reached[-1]] if reached else INK


def draw(board: dict[str, Any], ask: Ask, span: Span, subtitle: str) -> Figure:
    """The whole dashboard. Each panel is an Axes, labelled with the panel's title."""
    rows = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in board["panels"]) + 2  # two for the heading
    height = rows * ROW * WIDTH
    figure = Figure(figsize=(WIDTH, height), facecolor=GROUND)
    place = _Places(rows, height)
    figure.text(0.008, 1 - 0.6 / rows, board["title"], size=17, weight="bold", color=INK, va="center")
    figure.text(0.008, 1 - 1.5 / rows, subtitle, size=10, color=QUIET, va="center")
    marks = [
        (one["iconColor"], series)
        for one in board["annotations"]["list"]
        for series in series_of(ask, one["target"]["expr"], one["name"], span)
    ]
    for panel in board["panels"]:
        if panel["type"] == "row":
            left, bottom, _, tall = place.of(panel["gridPos"])
            figure.text(left, bottom + tall / 2, panel["title"], size=11, weight="bold", color=INK, va="center")
        else:
            axes = figure.add_axes(place.of(panel["gridPos"]), label=panel["title"], facecolor=CARD)
            _panel(figure, axes, panel, ask, span, marks)
    return figure


@dataclass(frozen=True, slots=True)
class _Places:
    rows: int
    height: float  # inches

    def of(self, grid: dict[str, int]) -> tuple[float, float, float, float]:
        """Left, bottom, width, height in parts of the figure, of a place in Grafana's grid."""
        across, down = GAP / WIDTH, GAP / self.height
        wide = (1 - across) / COLUMNS
        left, top = across + grid["x"] * wide, 1 - (grid["y"] + 2) / self.rows
        return left, top - grid["h"] / self.rows + down, grid["w"] * wide - across, grid["h"] / self.rows - down


def _panel(
    figure: Figure, axes: Axes, panel: dict[str, Any], ask: Ask, span: Span, marks: list[tuple[str, Series]]
) -> None:
    found = [
        series
        for target in panel["targets"]
        for series in series_of(ask, target["expr"], target["legendFormat"], span, target.get("instant", False))
    ]
    for side in axes.spines.values():
        side.set_color(FRAME)
    axes.set(xticks=[], yticks=[])
    drawn = {"stat": _stat, "table": _table, "timeseries": _lines}[panel["type"]]
    if any(one.values for one in found):
        inner = axes if panel["type"] != "timeseries" else _inside(figure, axes)
        drawn(inner, panel, found)
        if panel["type"] == "timeseries":
            _time_axis(inner, span, marks)
    else:
        axes.text(0.5, 0.45, "no data", color=QUIET, ha="center", va="center", transform=axes.transAxes)
    corner = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(panel["title"], (0, 1), (6, -6), size=10, color=INK, va="top", **corner)


def _inside(figure: Figure, axes: Axes) -> Axes:
    """Room for lines within a panel's frame: under its title, above its legend."""
    wide, high = figure.get_size_inches()
    frame = axes.get_position()
    left, right, top, bottom = 0.75 / wide, 0.15 / wide, 0.36 / high, 0.58 / high
    place = frame.x0 + left, frame.y0 + bottom, frame.width - left - right, frame.height - top - bottom
    return figure.add_axes(place, label=f"lines of {axes.get_label()}", facecolor=CARD)


def _stat(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    defaults, one = panel["fieldConfig"]["defaults"], next(one for one in found if one.values)
    colour = colour_of(one.values[-1], defaults.get("thresholds", {}).get("steps", []))
    axes.text(
        0.5, 0.52, in_unit(one.values[-1], defaults["unit"]), size=17, weight="bold", color=colour,
        ha="center", va="center", transform=axes.transAxes,
    )  # fmt: skip
    low, high = min(one.values), max(one.values)
    rise = [(value - low) / ((high - low) or 1) for value in one.values]
    axes.fill_between(one.times, rise, color=colour, alpha=0.15, lw=0)
    axes.plot(one.times, rise, color=colour, lw=0.8)
    axes.set(ylim=(0, 4), xlim=(one.times[0], max(one.times[-1], one.times[0] + 1)))


def _lines(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
    found = [one for one in found if one.values]
    colours = [LINES[number % len(LINES)] for number in range(len(found))]
    names = [one.name or panel["title"] for one in found]  # a sum over everything has no labels
    if stacked:
        times = sorted({at for one in found for at in one.times})
        heights = [[dict(zip(one.times, one.values, strict=True)).get(at, 0.0) for at in times] for one in found]
        axes.stackplot(_dates(times), heights, colors=colours, labels=names, alpha=0.7)
    else:
        for one, name, colour in zip(found, names, colours, strict=True):
            axes.plot(_dates(one.times), one.values, color=colour, lw=1.1, label=name)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_unit(value, defaults["unit"])))
    if "max" in defaults:
        axes.set_ylim(defaults.get("min", 0), defaults["max"])
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.45, -0.1), ncols=min(4, len(found)), fontsize=8, frameon=False,
        handlelength=1.2, columnspacing=1.2, labelcolor=INK,
    )  # fmt: skip


def _time_axis(axes: Axes, span: Span, marks: list[tuple[str, Series]]) -> None:
    axes.set_xlim(*_dates((span.start, span.end)))
    axes.xaxis.set_major_locator(AutoDateLocator(minticks=3, maxticks=6))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))
    axes.tick_params(labelsize=8, colors=QUIET, length=0)
    axes.grid(color=FRAME, lw=0.5)
    for side in axes.spines.values():
        side.set_visible(False)
    for colour, one in marks:
        for at in _beginnings(one.times, span.step):
            axes.axvline(_dates((at,))[0], color=NAMED[colour], lw=0.9, ls="--", alpha=0.7)


def _beginnings(times: tuple[float, ...], step: float) -> list[float]:
    """Where each unbroken stretch of points begins: an annotation's query is true for a while."""
    return [at for before, at in zip((-math.inf, *times), times, strict=False) if at - before > 1.5 * step]


def _dates(times: tuple[float, ...] | list[float]) -> list[datetime.datetime]:
    return [datetime.datetime.fromtimestamp(at) for at in times]


def _table(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    names = sorted({key for one in found for key, _ in one.labels})
    unit = panel["fieldConfig"]["defaults"]["unit"]
    cells = [
        [*(dict(one.labels).get(name, "") for name in names), in_unit(one.values[-1], unit)]
        for one in found
        if one.values
    ]
    tall = min(0.8, 0.13 * (len(cells) + 1))
    made = axes.table(
        cells,
        colLabels=[*names, "Value"],
        cellLoc="left",
        colLoc="left",
        bbox=(0.01, 0.8 - tall, 0.98, tall),
        edges="horizontal",
    )
    made.auto_set_font_size(False)
    made.set_fontsize(9)
    for cell in made.get_celld().values():
        cell.set_edgecolor(FRAME)
        cell.get_text().set_color(INK)


def prometheus(address: str) -> Ask:
    """Asks the Prometheus at ``http://host:port``; raises OSError where it does not answer."""

    def ask(what: str, parameters: dict[str, str]) -> dict[str, Any]:
        url = f"{address.rstrip('/')}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return dict(json.load(answer)["data"])

    return ask


def when(span: Span) -> str:
    """``"2026-11-22 02:03:04 to 02:06:04"``, in local time."""
    start, end = _dates((span.start, span.end))
    return f"{start:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S}"


def main() -> int:
    """Draw what the command line names."""
    options = argparse.ArgumentParser(description="Draw a dashboard from a Prometheus' data, without Grafana.")
    options.add_argument("prometheus", help="http://host:port")
    options.add_argument("picture", type=Path, help="the PNG to write")
    options.add_argument("--board", default="rayzero-run", choices=sorted(path.stem for path in HERE.glob("json/*")))
    options.add_argument("--end", type=float, default=time.time(), help="seconds since 1970; default: now")
    options.add_argument("--seconds", type=float, default=300, help="how much before the end")
    options.add_argument("--rate-interval", default="30s", help="what $__rate_interval stands for")
    told = options.parse_args()
    board = json.loads((HERE / "json" / f"{told.board}.json").read_text())
    span = Span(told.end - told.seconds, told.end, max(1.0, round(told.seconds / 300)), told.rate_interval)
    try:
        figure = draw(board, prometheus(told.prometheus), span, f"{when(span)}: {told.board}'s own queries, {DRAWN}")
    except OSError as error:
        print(f"{told.prometheus} did not answer: {error}; is it a Prometheus that runs?", file=sys.stderr)
        return 1
    figure.savefig(told.picture, dpi=DPI)
    return 0


if __name__ == "__main__":
    sys.exit(main())
