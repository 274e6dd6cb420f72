"""A conversion holds a part of the model at a time: private memory is measured whenever bytes are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero.checkpoint.tensor_file import TensorFileWriter
from rayzero.convert.conversion import convert
from rayzero.convert.formats import dcp_writer

from . import foreign
from .foreign import MOMENTS, States, write_zero

NAMES = tuple(f"layers.{i}.weight" for i in range(8))
SHAPE = (1024, 1024)  # 4 MiB in fp32
MODEL = len(NAMES) * (1 + len(MOMENTS)) * 4 << 20  # 96 MiB with moments
MOST = 40 << 20  # a few pieces, one parameter of DCP's chunks, what malloc keeps


def private_bytes() -> int:
    """Anonymous memory of this process that is resident: no files, mapped or not."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10


class Peak:
    """The most private memory beyond what there was first, over all calls of the functions that it watches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._first = self.most = private_bytes()
        self._watch(monkeypatch, TensorFileWriter, "_write_raw")
        self._watch(monkeypatch, dcp_writer._Files, "add")

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any) -> Any:
            result = inner(*args)
            self.most = max(self.most, private_bytes())
            return result

        monkeypatch.setattr(owner, name, watched)

    def taken(self) -> int:
        """Bytes."""
        return self.most - self._first


@pytest.fixture
def zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shapes = dict.fromkeys(NAMES, SHAPE)
    monkeypatch.setattr(foreign, "SHAPES", shapes)
    generator = torch.Generator().manual_seed(0)
    values = {(n, k): torch.randn(SHAPE, generator=generator) for n in NAMES for k in ("weight", *MOMENTS)}
    return write_zero(tmp_path / "zero", States(values), 3, 2, [NAMES[:4], NAMES[4:]])


def test_no_conversion_holds_the_model(zero: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {}
    for source, to in ((zero, "hf"), (zero, "dcp"), (zero, "rayzero"), (tmp_path / "dcp", "rayzero")):
        peak = Peak(monkeypatch)
        convert(source, tmp_path / (to if source is zero else "again"), to=to)
        taken[source.name, to] = peak.taken()
        monkeypatch.undo()
    assert max(taken.values()) < MOST < MODEL / 2, taken
