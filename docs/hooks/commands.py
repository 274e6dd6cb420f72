"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperOption

from docs.hooks.prose import prose
from rayzero.cli import app
from rayzero.cli.bench import BENCHES

GROUP = typer.main.get_command(app)


def page() -> str:
    """A section for each command with its arguments and options; the benchmarks below ``rayzero bench``."""
    lines: list[str] = []
    for name, command in GROUP.commands.items():  # type: ignore[attr-defined]
        lines += _section(name, command)
        if name == "bench":
            for bench in BENCHES:
                lines += _bench(bench)
    return "\n".join(lines)


def _section(name: str, command: Any) -> Iterator[str]:
    yield f"\n## rayzero {name} {{ #{name} }}\n"
    for paragraph in (command.help or "").split("\n\n"):
        yield prose(paragraph) + "\n"
    arguments = [param for param in command.params if not isinstance(param, TyperOption)]
    usage = " ".join(["rayzero", name, "[OPTIONS]", *map(_placeholder, arguments)])
    yield f"```text\n{usage}\n```\n"
    rows = [_row(param) for param in command.params]
    yield from ["| option | default | what it does |", "|---|---|---|", *rows, ""] if rows else []


def _placeholder(param: Any) -> str:
    shown = str(param.metavar or param.name.upper())
    return shown if param.required or param.metavar else f"[{shown}]"


def _row(param: Any) -> str:
    default, shown = param.default, _placeholder(param)
    if isinstance(param, TyperOption):
        shown = ", ".join((*param.opts, *param.secondary_opts)) + ("" if param.is_flag else f" {param.name.upper()}")
    default = "" if default in (None, False) or callable(default) else f"`{default}`"
    return f"| `{shown}` | {default} | {prose(param.help or '')} |"


def _bench(name: str) -> Iterator[str]:
    parser: argparse.ArgumentParser = importlib.import_module(f"rayzero.bench.{name}").parser()
    yield f"\n### rayzero bench {name} {{ #bench-{name} }}\n"
    yield f"{prose((parser.description or '').partition(chr(10) * 2)[0])}\n"
    yield from ["| option | default | what it does |", "|---|---|---|"]
    for action in parser._actions:
        if action.option_strings and not isinstance(action, argparse._HelpAction):
            options = ", ".join(f"`{one}`" for one in action.option_strings)
            choices = f" one of {', '.join(f'`{one}`' for one in action.choices)}" if action.choices else ""
            value = action.default
            default = "" if value in (None, False, argparse.SUPPRESS) else f"`{_shown(value)}`"
            yield f"| {options} | {default} | {prose(action.help or '')}{choices} |"
    yield ""


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
