"""A disk that stands still while owners write their files of a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rayzero.checkpoint.tensor_file import TensorFileWriter

_WAIT = 20.0  # seconds after which a test is broken


class Disk:
    """Holds owners' files up until ``goes_on``, and fails them then if there is an ``error``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.goes_on = threading.Event(), threading.Event()
        self.error: OSError | None = None
        write = TensorFileWriter._write_part

        def held_up(file: TensorFileWriter, *args: Any) -> int:
            if file.path.name.startswith("owner"):
                self.asked.set()
                assert self.goes_on.wait(_WAIT)
                if self.error is not None:
                    raise self.error
            return write(file, *args)

        monkeypatch.setattr(TensorFileWriter, "_write_part", held_up)


@contextmanager
def standing_still(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """A disk that goes on at the latest at the end."""
    disk = Disk(monkeypatch)
    try:
        yield disk
    finally:
        disk.goes_on.set()
