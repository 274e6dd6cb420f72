"""Builds the native libraries with the package: a wheel or an editable install gets them where a C compiler is found.

Without one the package is whole all the same (the torch kernel takes over) and carries the
reason, which ``rayzero doctor`` shows. ``CC`` names the compiler; nothing else of the environment is read.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wl,-S",  # no debug information, which some compilers add unasked
)


class Library(NamedTuple):
    """A library of one package folder, from the C sources in its ``native/``."""

    folder: Path
    stem: str
    units: tuple[str, ...]
    headers: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """Its name, once built."""
        return f"{self.stem}.{sysconfig.get_platform()}.so"

    @property
    def reason(self) -> str:
        """The name of the text that says why there is none."""
        return f"{self.stem}.reason"

    def digest(self, root: Path) -> str:
        """Which text a library was built from."""
        source = root / self.folder / "native"
        text = b"".join((source / name).read_bytes() for name in (*self.units, *self.headers))
        return hashlib.sha256(text).hexdigest()[:16]


LIBRARIES = (
    Library(
        Path("rayzero/kernels"),
        "_native",
        ("adam.c", "blocks.c", "team.c", "signals.c", "words.c"),
        ("adam_body.h", "blocks_body.h", "each_isa.h", "team.h", "vectors.h"),
    ),
)


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds the libraries, or the reasons why there are none, to a wheel; puts them into the source for an editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build. ``version`` is "standard" or "editable"."""
        root = Path(self.root)
        beside = root / LIBRARIES[0].folder if version == "editable" else None
        self._made = Path(tempfile.mkdtemp(prefix="_native.", dir=beside))
        for library in LIBRARIES:
            built = build(library, root, self._made)
            there = built.name == library.file
            self.app.display_info(f"{library.stem}: {built.name if there else built.read_text()}")
            if version == "editable":
                (root / library.folder / (library.reason if there else library.file)).unlink(missing_ok=True)
                built.replace(root / library.folder / built.name)
                continue
            build_data["force_include"][str(built)] = str(library.folder / built.name)
            if there:
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder that was built in."""
        shutil.rmtree(self._made)


def build(library: Library, root: Path, target: Path) -> Path:
    """Compile into the folder ``target``; the library's path, or that of the text that says why there is none."""
    compiler = find_compiler()
    if compiler is None:
        asked = os.environ.get("CC")
        tried = f"CC={asked} is not there" if asked else f"none of {', '.join(COMPILERS)} is there"
        why = f"no C compiler when rayzero was installed ({tried}); install one, then rayzero again"
        return _say(target / library.reason, why)
    built = target / library.file
    define = f'-DRZ_SOURCE="{library.digest(root)}"'
    units = [str(library.folder / "native" / name) for name in library.units]  # relative: the library holds these names
    command = [*compiler, *FLAGS, define, *units, "-o", str(built), "-lm"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        wrong = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        why = f"{compiler[0]} could not build the native kernel when rayzero was installed: {wrong}"
        return _say(target / library.reason, why)
    return built


def find_compiler() -> list[str] | None:
    """The command that compiles C: ``CC``, or the first of COMPILERS there is; None without one."""
    asked = shlex.split(os.environ.get("CC", ""))
    if asked:
        return asked if shutil.which(asked[0]) else None
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    return [found] if found else None


def _say(path: Path, reason: str) -> Path:
    path.write_text(reason + "\n", encoding="utf-8")
    return path
