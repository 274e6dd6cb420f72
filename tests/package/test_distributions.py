"""What the package is shipped as: an sdist that builds anywhere, and a wheel from it, with the same bits each time."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import rayzero

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(what: str, source: Path, out: Path, **environment: str) -> Path:
    """``what``: "sdist" or "wheel"; what hatchling makes of the sources, without isolation or network."""
    code = f"from hatchling.build import build_{what}; build_{what}({str(out)!r})"
    env = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


def unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def test_an_sdist_has_every_source_and_nothing_that_was_built(sdist: Path, tmp_path: Path) -> None:
    source = unpacked(sdist, tmp_path)
    has = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rayzero").rglob("*") if path.is_file()}
    built = {name for name in package if "__pycache__" in name or "/_native." in name}
    assert {name for name in has if name.startswith("rayzero/")} == package - built
    assert {"hatch_build.py", "LICENSE", "README.md", "constraints.txt", "scripts/wheel", "tests/conftest.py"} <= has
    assert not any(name.startswith((".git/", ".ci/", ".venv/", "build/", "runs/")) for name in has)


def test_two_builds_have_the_same_bits_wherever_they_are_made(sdist: Path, tmp_path: Path) -> None:
    wheels, libraries = [], []
    for name in ("one", "another/and longer"):
        source = unpacked(sdist, tmp_path / name / "source")
        assert not (source / ".git").exists()
        wheels.append(build("wheel", source, tmp_path / name / "wheel", CC="/nowhere/cc"))
        libraries.append(small_library(source, tmp_path / name))
        again = build("sdist", source, tmp_path / name / "sdist")
        assert again.read_bytes() == sdist.read_bytes()
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    assert libraries[0] == libraries[1]


def small_library(source: Path, folder: Path) -> bytes:
    """What the build makes of one of the kernel's files; all of them take the compiler a quarter of a minute."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    if script.find_compiler() is None:
        pytest.skip("no C compiler here")
    library = script.LIBRARIES[0]._replace(units=("signals.c",))
    built = script.build(library, source, folder)
    assert built.name == library.file, built.read_text()
    return bytes(built.read_bytes())


def test_a_wheel_has_licence_types_and_the_command(sdist: Path, tmp_path: Path) -> None:
    wheel = build("wheel", unpacked(sdist, tmp_path / "source"), tmp_path / "wheel", CC="/nowhere/cc")
    archive = zipfile.ZipFile(wheel)
    info = f"rayzero-{rayzero.__version__}.dist-info"
    assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "rayzero/py.typed" in archive.namelist()
    assert "rayzero = rayzero.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()
    said = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert (said["Name"], said["Version"], said["Requires-Python"]) == ("rayzero", rayzero.__version__, ">=3.11")
    assert set(said.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert {name.partition("/")[0] for name in archive.namelist()} == {"rayzero", info}


def test_citation_and_changes_are_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (rayzero.__version__, "Apache-2.0")
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    newest = re.search(r"^## (\S+?),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == rayzero.__version__
