"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperOption

from docs.hooks.prose import prose
from lab.__main__ import COMMANDS
from rayzero.cli import app

GROUP = typer.main.get_command(app)


def page() -> str:
    """A section for each command with its arguments and options."""
    lines: list[str] = []
    for name, command in GROUP.commands.items():  # type: ignore[attr-defined]
        lines += _section(name, command)
    return "\n".join(lines)


def lab_page() -> str:
    """The same for the commands of the lab that say their options without being run."""
    return "\n".join(line for name in COMMANDS for line in _lab_section(name))


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


def lab_parser(name: str) -> argparse.ArgumentParser | None:
    """The parser of a command of the lab; None if it makes one only when it runs."""
    module = importlib.import_module(COMMANDS[name])
    made: argparse.ArgumentParser | None = module.parser() if hasattr(module, "parser") else None
    return made


def _lab_section(name: str) -> Iterator[str]:
    parser = lab_parser(name)
    if parser is None:
        return
    yield f"\n### python -m lab {name} {{ #lab-{name} }}\n"
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
