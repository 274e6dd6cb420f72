"""``python -m lab``: what there is, what it passes on, what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _own_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)


def test_without_a_name_it_lists_every_command_and_loads_none(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from lab.__main__ import main; main([]); sys.exit(bool({'torch', 'rayzero'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n  {name} " not in said] == []
    assert "\n  store             Measures how fast parameters and gradients move" in said


def test_the_readme_says_what_each_answers() -> None:
    readme = (ROOT / "lab" / "README.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", readme, re.M)) == sorted(COMMANDS)


def test_options_are_the_commands_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["store", "--help"])
    assert "usage: python -m lab store" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["store", "--transports", "pigeon"])


def test_what_is_refused_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pigeon"]) == 2
    assert capsys.readouterr().err.startswith("lab: there is no 'pigeon'; choose one of activations, ")
    assert main(["simulation", "--compare", "--cases", "99"]) == 2
    assert capsys.readouterr().err == "lab simulation: --cases has [99], but there are only 0 to 7\n"


def test_a_python_without_the_packages_is_named_with_what_it_lacks() -> None:
    """-S leaves out what is installed."""
    command = [sys.executable, "-S", "-m", "lab", "store"]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"lab: {sys.executable} has no torch; type scripts/setup, then .venv/bin/python -m lab store\n"
    )
