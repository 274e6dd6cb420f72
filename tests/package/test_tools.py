"""scripts/tools installs what is missing, each by itself, and leaves apt in order; scripts/train asks for none; two
scripts/vllm at once work once."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("bash", "dirname", "env", "timeout", "touch")
PACKAGES = {"promtool": "prometheus", "docker-compose": "docker-compose", "kubectl": "kubernetes-client"}


class Machine:
    """A folder with the script, and programs that write down how they were called."""

    def __init__(self, folder: Path, *, there: Iterable[str], broken: Iterable[str] = (), root: bool = True) -> None:
        self.folder, self.bin, self._calls = folder, folder / "bin", folder / "calls"
        for made in (self.bin, folder / "scripts", folder / ".venv"):
            made.mkdir()
        shutil.copy(ROOT / "scripts" / "tools", folder / "scripts")
        for name in NEEDED:
            (self.bin / name).symlink_to(shutil.which(name) or "")
        for name in there:
            self._program(name, "")
        fails = "".join(f"case $* in *' {package}') exit 100;; esac\n" for package in broken)
        installs = "".join(f"case $* in *' {package}') : > {self.bin}/{name}; chmod +x {self.bin}/{name};; esac\n"
                           for name, package in PACKAGES.items())  # fmt: skip
        self._program("apt-get", f"{fails}{installs}")
        self._program("dpkg", "")
        self._program("id", f"echo {0 if root else 1000}")
        (self.bin / "chmod").symlink_to(shutil.which("chmod") or "")

    def _program(self, name: str, does: str) -> None:
        path = self.bin / name
        path.write_text(f'#!{self.bin}/bash\n[ "${{0##*/}}" = id ] || echo "${{0##*/}} $*" >> {self._calls}\n{does}\n')
        path.chmod(0o755)

    def run(self, *arguments: str) -> str:
        """What the script says."""
        done = subprocess.run(
            ["scripts/tools", *arguments], cwd=self.folder, env={"PATH": str(self.bin)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def calls(self) -> list[str]:
        """How programs were called so far; of apt-get and dpkg the part that matters."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line.replace("-qq -y -o DPkg::Lock::Timeout=60 ", "") for line in lines]


def test_nothing_is_asked_of_apt_when_all_is_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path, there=PACKAGES)
    assert (machine.run(), machine.calls) == ("", [])


@pytest.mark.parametrize("missing", PACKAGES)
def test_only_what_is_missing_is_installed(missing: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, there=PACKAGES.keys() - {missing})
    assert machine.run().splitlines() == [f"installing {PACKAGES[missing]} with apt-get: tests use its {missing}"]
    assert machine.calls == ["apt-get update -qq", f"apt-get install --no-install-recommends {PACKAGES[missing]}"]


def test_one_that_fails_costs_no_other_and_leaves_apt_in_order(tmp_path: Path) -> None:
    machine = Machine(tmp_path, there=(), broken=["docker-compose"])
    said = machine.run()
    assert (tmp_path / "bin" / "promtool").exists()
    assert (tmp_path / "bin" / "kubectl").exists()
    assert machine.calls == [
        "apt-get update -qq",
        "apt-get install --no-install-recommends prometheus",
        "apt-get install --no-install-recommends docker-compose",
        "dpkg --configure -a",
        "apt-get install --no-install-recommends kubernetes-client",
    ]
    assert "docker-compose could not be installed (apt-get install docker-compose says why)" in said
    skipped = "without docker-compose, the tests of these are skipped: deploy/compose (tests/deploy)\n"
    assert said.count("are skipped") == 1
    assert skipped in said
    before = machine.calls
    assert (machine.run(), machine.calls) == (skipped, before), "it is tried once"
    machine.run("again")
    assert machine.calls[len(before) :] == [
        "apt-get update -qq", "apt-get install --no-install-recommends docker-compose", "dpkg --configure -a",
    ]  # fmt: skip


def test_without_root_it_says_what_is_skipped(tmp_path: Path) -> None:
    machine = Machine(tmp_path, there=["promtool", "docker-compose"], root=False)
    assert machine.run().startswith("without kubectl, the tests of these are skipped: deploy/kubernetes and")
    assert machine.calls == []


def test_only_scripts_test_asks_for_them() -> None:
    users = {path.name for path in (ROOT / "scripts").iterdir() if "scripts/tools\n" in path.read_text()}
    assert users == {"test"}
    assert "apt-get" not in (ROOT / "scripts" / "setup").read_text()


def test_two_that_make_the_environment_of_vllm_at_once_make_it_once(tmp_path: Path) -> None:
    """Parts of the tests that run side by side both need it."""
    for folder in ("scripts", "bin", "rayzero/kernels/native"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "rayzero/kernels/native/adam.c"):
        (tmp_path / name).touch()
    script = shutil.copy(ROOT / "scripts" / "vllm", tmp_path / "scripts")
    installs = '#!/usr/bin/env bash\ncase $* in *" install "*) echo begin; sleep 0.2; echo end;; esac >> calls\n'
    makes = f"mkdir -p $3/bin; cp {tmp_path}/python $3/bin/python"
    for program, does in (
        (tmp_path / "python", installs),
        (tmp_path / "bin/python3.11", f"#!/usr/bin/env bash\n{makes}\n"),
    ):
        program.write_text(does)
        program.chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    both = [subprocess.Popen([script], env={"PATH": path}, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [each.wait(60) for each in both] == [0, 0]
    assert (tmp_path / "calls").read_text().split() == ["begin", "end"]
