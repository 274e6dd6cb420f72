"""Programs of tests that need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@contextmanager
def python(program: str, *options: str, stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A Python that runs a program, talks through pipes, and is killed in the end. ``options``: of Python. ``stderr``:
    as Popen takes it."""
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    with subprocess.Popen(
        [sys.executable, *options, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": paths},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
