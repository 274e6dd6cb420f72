"""Builds the native kernel with the package: a wheel or an editable install gets it where a C compiler is found.

Without one the package is whole all the same (the torch kernel takes over) and carries the reason, which
``rayzero doctor`` shows. ``CC`` names the compiler; nothing else of the environment is read.
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
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("rayzero/kernels")
UNITS = ("adam.c", "team.c", "signals.c")
SOURCES = (*UNITS, "adam_body.h", "team.h")
LIBRARY = f"_native.{sysconfig.get_platform()}.so"
REASON = "_native.reason"
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
)


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds the library, or the reason why there is none, to a wheel; puts it into the source for an editable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build. ``version`` is "standard" or "editable"."""
        kernels = Path(self.root) / FOLDER
        self._made = Path(tempfile.mkdtemp(prefix="_native.", dir=kernels if version == "editable" else None))
        built = build(kernels / "native", self._made)
        self.app.display_info(f"native kernel: {built.name if built.name == LIBRARY else built.read_text()}")
        if version == "editable":
            (kernels / (LIBRARY if built.name == REASON else REASON)).unlink(missing_ok=True)
            built.replace(kernels / built.name)
            return
        build_data["force_include"][str(built)] = str(FOLDER / built.name)
        if built.name == LIBRARY:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder that was built in."""
        shutil.rmtree(self._made)


def build(source: Path, target: Path) -> Path:
    """Compile into the folder ``target``; the library's path, or that of the text that says why there is none."""
    compiler = find_compiler()
    if compiler is None:
        asked = os.environ.get("CC")
        tried = f"CC={asked} is not there" if asked else f"none of {', '.join(COMPILERS)} is there"
        return _say(target, f"no C compiler when rayzero was installed ({tried}); install one, then rayzero again")
    library = target / LIBRARY
    define = f'-DRZ_SOURCE="{digest(source)}"'
    units = [str(source / name) for name in UNITS]
    command = [*compiler, *FLAGS, define, *units, "-o", str(library), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        wrong = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        return _say(target, f"{compiler[0]} could not build the native kernel when rayzero was installed: {wrong}")
    return library


def find_compiler() -> list[str] | None:
    """The command that compiles C: ``CC``, or the first of COMPILERS there is; None without one."""
    asked = shlex.split(os.environ.get("CC", ""))
    if asked:
        return asked if shutil.which(asked[0]) else None
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    return [found] if found else None


def digest(source: Path) -> str:
    """Which text a library was built from."""
    return hashlib.sha256(b"".join((source / name).read_bytes() for name in SOURCES)).hexdigest()[:16]


def _say(target: Path, reason: str) -> Path:
    path = target / REASON
    path.write_text(reason + "\n", encoding="utf-8")
    return path
