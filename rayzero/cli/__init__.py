"""The ``rayzero`` command. A subcommand imports what it works with when it runs, so that help and completion answer at
once; errors become exit codes only here."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import rayzero
from rayzero.cli.convert import convert, export
from rayzero.cli.doctor import doctor
from rayzero.cli.plan import plan
from rayzero.cli.status import scale, status, trace
from rayzero.cli.top import top
from rayzero.cli.train import init, train
from rayzero.errors import CheckpointError, ConfigError, DataError, RayZeroError, UnsupportedError

__all__ = ["ERRORS", "app", "exit_code", "main", "section_of"]

_BAD_INPUT = (ConfigError, UnsupportedError, DataError, CheckpointError)

ERRORS = "docs/reference/errors.md"  # in the repository, since no site has an address yet

app = typer.Typer(name="rayzero", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rayzero {rayzero.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models whose states do not fit on the GPUs, on a Ray cluster."""


for command in (init, train, status, top, scale, trace, export, convert, plan, doctor):
    app.command()(command)


def exit_code(error: RayZeroError) -> int:
    """The exit code for an error: 2 if the input is wrong, 1 if the work was tried and failed."""
    return 2 if isinstance(error, _BAD_INPUT) else 1


def section_of(error: type[RayZeroError]) -> str:
    """The section about this class of error in ``ERRORS``; a class of one module alone has that of its nearest base."""
    public = next(kind for kind in error.__mro__ if kind.__module__ == RayZeroError.__module__)
    return public.__name__.lower()


def _of_a_file(error: OSError) -> ConfigError | None:
    """The error as bad input; None if it is about no file."""
    if error.filename is None or error.strerror is None:
        return None
    return ConfigError(f"cannot use {os.fsdecode(error.filename)}: {error.strerror}")


def main() -> None:
    """Run the command line. A RayZeroError becomes one line on stderr, with the address of the section about its class,
    and so does a file that cannot be used (another user's, on a full disk); ``RAYZERO_DEBUG=1`` shows its traceback."""
    try:
        app()
    except (RayZeroError, OSError) as raised:
        error = raised if isinstance(raised, RayZeroError) else _of_a_file(raised)
        if error is None or os.environ.get("RAYZERO_DEBUG") == "1":
            raise
        said = str(error).partition("\n")[0]
        print(f"rayzero: {said} (see {ERRORS}#{section_of(type(error))})", file=sys.stderr)
        sys.exit(exit_code(error))
