"""Draws a picture of a run as text for a terminal. Letters and numbers say everything; colours only help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rayzero.cli.status import plain
from rayzero.quantities import count, format_bytes
from rayzero.telemetry.picture import CAUSES, PHASES, RESULTS, Bar, FollowersRow, Picture, RankRow

_MOST_ROWS = 16  # in one table: those that waited longest, worked longest or are fullest
_PHASE_BAR = 60  # letters
_LEGEND_COLUMNS = 3
_MEMORY_BAR = 30
_LETTERS = dict(zip(PHASES, "dFwBpnoc", strict=True))
_COLOURS = dict(
    zip(PHASES, ("grey62", "green", "red", "blue", "magenta", "yellow", "dark_orange", "cyan"), strict=True)
)
_FULL = 0.9  # share of a limit that is shown as trouble
_LONG_WAIT = 0.2  # share of a step that is shown as trouble
_NONE = "-"
_NO_ANSWER = (
    "No process answers. A run on one host answers on that host only; start it with run.telemetry.bind=node, and "
    "run.telemetry.web_config if others shall not read it, to reach it from others."
)

Row = TypeVar("Row")


def render(
    picture: Picture,
    *,
    state: str,
    steps: int | None,
    recoveries: Sequence[str] = (),
    changes: Sequence[str] = (),
) -> RenderableType:
    """Draw the whole picture. ``state``: the run's; ``steps``: how many the run will do, None if that is not known;
    ``recoveries``, ``changes``: a line for each death that it has outlived, and each change of its optimizers."""
    parts: list[RenderableType] = [_headline(picture, state, steps), _since(picture)]
    if picture.reported:
        parts.append(_reported(picture.reported))
    if any(picture.phases.values()):
        parts += [Text(), _phases(picture.phases)]
    if picture.ranks:
        parts += [Text(), _ranks(picture)]
    if picture.owners:
        parts += [Text(), _owners(picture)]
    if picture.followers is not None:
        parts += [Text(), _followers(picture.followers)]
    if picture.bars:
        parts += [Text(), _memory(picture.bars)]
    if picture.silent or picture.late:
        parts += [Text(), _trouble(picture)]
    if recoveries:
        parts += [Text(), *(Text(f"recovery  {plain(line)}", "yellow") for line in recoveries)]
    if changes:
        parts += [Text(), *(Text(f"change    {plain(line)}", "cyan") for line in changes)]
    return Group(*parts)


def _headline(picture: Picture, state: str, steps: int | None) -> Text:
    of = "" if steps is None else f" of {steps}"
    line = Text.assemble((plain(picture.run), "bold"), "  ", (plain(state), "green" if state == "running" else "red"))
    line.append(f"  step {_number(picture.step)}{of}  loss {_number(picture.loss, '.4f')}")
    line.append(f"  {_number(picture.tokens_per_second, ',.0f')} tokens/s")
    return line.append(f"  {_seconds(picture.step_seconds)} a step")


def _since(picture: Picture) -> Text:
    stepped = "" if picture.since_step is None else f"; the last one {_seconds(picture.since_step)} ago"
    stepped += "" if picture.eta_seconds is None else f"; {_clock(picture.eta_seconds)} left"
    if picture.span is None:
        return Text(f"means since the start: no step ended between two scrapes{stepped}", "yellow")
    return Text(f"{count(picture.steps, 'step')} in the last {_seconds(picture.span)}{stepped}", "dim")


def _reported(reported: dict[str, float]) -> Text:
    shown = [f"{plain(name)} {value:.6g}" for name, value in list(reported.items())[:_MOST_ROWS]]
    rest = len(reported) - len(shown)
    return Text("reported  " + "  ".join([*shown, *([f"… and {rest} more"] if rest > 0 else [])]))


def _phases(phases: dict[str, float]) -> RenderableType:
    total = sum(phases.values())
    shown = {phase: seconds for phase, seconds in phases.items() if seconds / total >= 0.0005}
    bar, legend = Text("phase  "), Table.grid(padding=(0, 2, 0, 0))  # the first column is the indent
    for phase, letters in _shares(shown, _PHASE_BAR).items():
        bar.append(_LETTERS[phase] * letters, f"black on {_COLOURS[phase]}")
    entries = [_entry(phase, seconds, seconds / total) for phase, seconds in shown.items()]
    for first in range(0, len(entries), _LEGEND_COLUMNS):
        legend.add_row("     ", *entries[first : first + _LEGEND_COLUMNS])
    return Group(bar, legend)


def _entry(phase: str, seconds: float, share: float) -> Text:
    named = Text(_LETTERS[phase], f"bold {_COLOURS[phase]}")
    return named.append(f" {phase} {share:.1%} {_seconds(seconds)}", "default not bold")


def _shares(parts: dict[str, float], length: int) -> dict[str, int]:
    """How many letters each part gets so that together they are ``length``, by largest remainder."""
    exact = {name: value * length / sum(parts.values()) for name, value in parts.items()}
    found = {name: int(value) for name, value in exact.items()}
    by_rest = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in by_rest[: length - sum(found.values())]:
        found[name] += 1
    return found


def _ranks(picture: Picture) -> RenderableType:
    waits, uses = [f"wait\n{cause}" for cause in CAUSES], [f"units\n{result}" for result in RESULTS]
    table = _table("rank", "step", "loss", "a step", *waits, *uses)
    for row in _worst(picture.ranks, lambda rank: sum(rank.waits.values())):
        table.add_row(
            Text(plain(row.who)),
            _number(row.step),
            _number(row.loss, ".4f"),
            _seconds(row.step_seconds),
            *(_wait(row, cause) for cause in CAUSES),
            *(_number(row.prefetch[result], ",") for result in RESULTS),
        )
    return _with_rest(table, picture.ranks, "ranks that waited less")


def _wait(row: RankRow, cause: str) -> Text:
    """The share of the rank's step in which it waited."""
    if cause not in row.waits or not row.step_seconds:
        return Text(_NONE)
    share = row.waits[cause] / row.step_seconds
    return Text(f"{share:.1%}", "red" if share >= _LONG_WAIT else "")


def _owners(picture: Picture) -> RenderableType:
    table = _table(
        "owner", "update\na step", "queued\ntasks", "threads\nof cores", "of memory\nspeed", "version", "shards"
    )
    for row in _worst(picture.owners, lambda owner: owner.update_seconds or 0.0):
        table.add_row(
            Text(plain(row.who)),
            _seconds(row.update_seconds),
            _number(row.queue),
            f"{_number(row.threads)} of {_number(row.cores)}",
            _number(row.efficiency, ".0%"),
            _number(row.version),
            _number(row.shards),
        )
    return _with_rest(table, picture.owners, "owners that work less")


def _followers(row: FollowersRow) -> RenderableType:
    table = _table("followers", "oldest\nversion", "newest\nversion", "behind", "bytes of\nchanges", "bytes\nwhole")
    behind = None if row.version is None or row.newest is None else row.newest - row.version
    table.add_row(
        _number(row.count),
        _number(row.version),
        _number(row.newest),
        _number(behind),
        format_bytes(row.change_bytes),
        format_bytes(row.whole_bytes),
    )
    return table


def _memory(bars: Sequence[Bar]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for bar in _worst(bars, lambda one: one.used / one.limit if one.limit else 0.0, most=2 * _MOST_ROWS):
        limit = _NONE if bar.limit is None else format_bytes(int(bar.limit))
        table.add_row(Text(plain(bar.what)), _filled(bar), f"{format_bytes(int(bar.used))} of {limit}")
    return _with_rest(table, bars, "less filled", most=2 * _MOST_ROWS)


def _filled(bar: Bar) -> Text:
    share = min(1.0, bar.used / bar.limit) if bar.limit else 0.0
    filled = round(share * _MEMORY_BAR)
    text = Text("#" * filled, "red" if share >= _FULL else "green")
    return text.append("." * (_MEMORY_BAR - filled), "dim").append(f" {share:4.0%}" if bar.limit else "")


def _trouble(picture: Picture) -> RenderableType:
    lines = [Text(plain(f"{who} does not answer: {why}"), "red") for who, why in picture.silent.items()]
    lines += [
        Text(plain(f"the coordinator has not heard from {who} for {_seconds(age)}"), "red")
        for who, age in picture.late.items()
    ]
    if picture.silent and not (picture.ranks or picture.owners):
        lines.insert(0, Text(_NO_ANSWER, "red"))
    rest = len(lines) - _MOST_ROWS
    return Group(*lines[:_MOST_ROWS], *([Text(f"… and {rest} more", "red")] if rest > 0 else []))


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _worst(rows: Sequence[Row], how_bad: Callable[[Row], float], most: int = _MOST_ROWS) -> Iterable[Row]:
    """The rows that matter most if there are too many to show, in their original order."""
    worst = sorted(range(len(rows)), key=lambda index: -how_bad(rows[index]))[:most]
    return [rows[index] for index in sorted(worst)]


def _with_rest(table: Table, rows: Sequence[object], what: str, most: int = _MOST_ROWS) -> RenderableType:
    rest = len(rows) - most
    return Group(table, Text(f"… and {rest} {what}", "dim")) if rest > 0 else table


def _number(value: float | None, form: str = "") -> str:
    return _NONE if value is None else f"{value:{form}}"


def _seconds(value: float | None) -> str:
    """Three digits and a suitable unit."""
    if value is None:
        return _NONE
    if value >= 100:
        return f"{value:.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _clock(value: float) -> str:
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
