"""A process that is started in another folder imports its maker's RayZero."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rayzero
from rayzero.concurrency import own_path

FILE = "import rayzero; print(rayzero.__file__)"
START = (
    "import subprocess, sys; from rayzero.concurrency.own_path import with_own_path;"
    f"subprocess.run([sys.executable, '-P', '-c', {FILE!r}], env=with_own_path(), cwd='/', check=True)"
)


def test_a_copy_that_is_not_installed_goes_before_the_one_that_is(tmp_path: Path) -> None:
    """As in a clone, beside another RayZero."""
    package = Path(rayzero.__file__).parent
    (tmp_path / "rayzero").mkdir()
    shutil.copy(package / "__init__.py", tmp_path / "rayzero")
    shutil.copytree(package / "concurrency", tmp_path / "rayzero" / "concurrency")
    started = subprocess.run([sys.executable, "-c", START], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert started.stdout.strip() == str(tmp_path / "rayzero" / "__init__.py")


def test_an_installed_one_leaves_the_path_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packages would go before Python's own library."""
    monkeypatch.setenv("PYTHONPATH", "/there")
    monkeypatch.setattr(own_path.site, "getsitepackages", lambda: [str(Path(rayzero.__file__).parents[1])])
    assert own_path.with_own_path()["PYTHONPATH"] == "/there"
