"""Requests for other owners, as files in a run's folder."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from rayzero.elastic.scaling import ScaleRequest, ask, take
from rayzero.errors import ConfigError


def test_what_is_asked_is_taken_once(tmp_path: Path) -> None:
    assert take(tmp_path) == []
    first = ScaleRequest(num_optimizers=2)
    ask(tmp_path, first)
    time.sleep(0.01)  # a file system's clock has ticks
    last = ScaleRequest(num_optimizers=3, avoid=("10.0.0.7", "n"), placement="cpu_nodes")
    ask(tmp_path, last)
    assert take(tmp_path) == [first, last]
    assert take(tmp_path) == []


@pytest.mark.parametrize("content", [b'{"num_optimizers": 0}', b" " * 70_000])
def test_what_cannot_be_read_is_set_aside_with_one_warning(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "scale-x.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert [take(tmp_path) for _ in range(3)] == [[]] * 3
    assert len(caplog.messages) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["scale-x.unreadable"]


def test_a_folder_in_its_place_is_set_aside_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "scale-x.json").mkdir()
    assert [take(tmp_path) for _ in range(3)] == [[]] * 3
    assert len(caplog.messages) == 1


def test_numbers_and_places_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_optimizers is 0 but must be greater than 0"):
        ScaleRequest(num_optimizers=0)
    with pytest.raises(ConfigError, match="placement is 'moon' but must be 'beside_rank', 'packed' or 'cpu_nodes'"):
        ScaleRequest(num_optimizers=1, placement="moon")  # type: ignore[arg-type]
