"""The package with and without a C compiler: both work, and the one without says why it is slower."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from rayzero.kernels import native

pytestmark = pytest.mark.thorough

REPOSITORY = Path(__file__).parents[2]

UPDATE = """
import logging, torch
logging.basicConfig(format="%(message)s")
from rayzero.kernels import AdamMemory, AdamOptions, Segment, choose_kernel, native
from rayzero.kernels.moments import PlainMoment
library = native.load()
print(library if isinstance(library, str) else library.path.name)
states = {kind: PlainMoment(torch.zeros(64)) for kind in ("exp_avg", "exp_avg_sq")}
memory = AdamMemory(master=torch.ones(64), states=states, params=torch.zeros(64, dtype=torch.bfloat16))
options = AdamOptions(lr=0.5, beta1=0.9, beta2=0.999, eps=0.0, weight_decay=0.0)
choose_kernel("auto")
kernel = choose_kernel("auto")
segment = Segment(offset=0, length=64, ranks=(0,), options=options, step=1)
kernel.update(memory, [torch.ones(64)], [segment], 1.0)
print(kernel.name, float(memory.params[63]))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the sources, without anything built."""
    copy = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "_native.*")
    shutil.copytree(REPOSITORY / "rayzero", copy / "rayzero", ignore=ignored)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(REPOSITORY / name, copy / name)
    return copy


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **paths, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )


def built_wheel(source: Path, **environment: str) -> Path:
    python("from hatchling.build import build_wheel; build_wheel('out')", source, **environment)
    (wheel,) = (source / "out").glob("*.whl")
    return wheel


def used(wheel: Path) -> subprocess.CompletedProcess[str]:
    """What a process sees that has the wheel's content and nothing else of this repository."""
    folder = wheel.parent / "site"
    zipfile.ZipFile(wheel).extractall(folder)
    return python(UPDATE, folder)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nowhere/cc", "no C compiler when rayzero was installed (CC=/nowhere/cc is not there); install one"),
        ("false", "false could not build the native kernel when rayzero was installed"),
    ],
)
def test_a_package_built_without_a_compiler_works_and_says_so_once(source: Path, compiler: str, reason: str) -> None:
    wheel = built_wheel(source, CC=compiler)
    assert wheel.name.endswith("-py3-none-any.whl")
    done = used(wheel)
    said, updated = done.stdout.splitlines()
    assert said.startswith(reason)
    assert updated == "torch 0.5"
    assert done.stderr.count("instead of the native one: " + reason) == 1


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_a_package_built_with_a_compiler_has_the_library(source: Path) -> None:
    wheel = built_wheel(source, CC="cc")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert used(wheel).stdout.splitlines() == [native.LIBRARY.name, "native 0.5"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_an_editable_install_has_either_the_library_or_the_reason(source: Path, tmp_path: Path) -> None:
    hasty = tmp_path / "hasty-cc"  # which files are there does not depend on how good their code is
    hasty.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    hasty.chmod(0o755)
    editable = "from hatchling.build import build_editable; build_editable('out')"
    for compiler, there in [
        (str(hasty), [native.LIBRARY.name]),
        ("/nowhere/cc", ["_native.reason"]),
        (str(hasty), [native.LIBRARY.name]),
    ]:
        python(editable, source, CC=compiler)
        found = (source / "rayzero/kernels").glob("_native.*")
        assert [path.name for path in found] == there


def build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", REPOSITORY / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_the_libraries_in_use_were_built_from_this_source() -> None:
    used, (library,) = native.load(), build_script().LIBRARIES
    assert not isinstance(used, str), used
    assert used.source == library.digest(REPOSITORY), f"{library.folder} changed since it was built: scripts/setup"


def test_a_library_that_does_not_load_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native, "LIBRARY", broken)
    reason = native.load.__wrapped__()
    assert isinstance(reason, str)
    assert reason.startswith("the library does not load: ")
