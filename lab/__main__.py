"""``python -m lab NAME [OPTIONS]``, from a checkout: measures RayZero. Without a name it lists what there is."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["COMMANDS", "main"]

HERE = Path(__file__).parent
ROOMS = {
    "bench": ("adam", "classes", "overlap", "step", "store"),
    "calibration": ("simulation",),
    "simulation": ("plan",),
    "costs": (
        "async_save",
        "at_ranks",
        "at_rest",
        "follow_links",
        "followers",
        "frozen_codecs",
        "give_shards",
        "hooks",
        "mirror_links",
        "door",
        "host_push",
        "telemetry",
    ),
    "campaigns": ("faults", "many_ranks", "moments", "rescale", "scale_simulation", "spares", "strategies"),
    "gpu": ("activations", "gpu_campaign", "gpu_one_step", "gpu_step", "hybrid"),
}
COMMANDS = {name: f"lab.{room}.{name}" for room, names in ROOMS.items() for name in names}


def main(argv: Sequence[str]) -> int:
    """Run the command that ``argv`` begins with, which takes the rest. Returns the exit code: 2 for bad input, 1 for
    work that was tried and failed. ``RAYZERO_DEBUG=1`` shows an error's traceback."""
    if not argv or argv[0] in ("-h", "--help"):
        print("\n".join(_listed()))
        return 0
    name, *options = argv
    if name not in COMMANDS:
        print(f"lab: there is no {name!r}; choose one of {', '.join(sorted(COMMANDS))}", file=sys.stderr)
        return 2
    sys.argv = [f"python -m lab {name}", *options]
    try:
        from rayzero.errors import RayZeroError

        command = importlib.import_module(COMMANDS[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(("lab", "rayzero.")):
            raise
        print(
            f"lab: {sys.executable} has no {error.name}; type scripts/setup, then .venv/bin/python -m lab {name}",
            file=sys.stderr,
        )
        return 1
    try:
        code: int | None = command.main()
        return code or 0
    except RayZeroError as error:
        if os.environ.get("RAYZERO_DEBUG") == "1":
            raise
        from rayzero.cli import exit_code  # only here: a command needs none of it

        print(f"lab {name}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return exit_code(error)


def _listed() -> Iterator[str]:
    """A line for each command, with the first one of its module's docstring."""
    yield "python -m lab NAME [OPTIONS], or NAME --help. Names:"
    for room, names in ROOMS.items():
        yield f"\n{room}"
        for name in names:
            said = ast.get_docstring(ast.parse((HERE / room / f"{name}.py").read_text(encoding="utf-8"))) or ""
            yield f"  {name:18}{said.partition(chr(10))[0]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
