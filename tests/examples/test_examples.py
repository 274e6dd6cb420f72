"""Every example runs as a user runs it, and shows what it says it shows."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from forked import forked

from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]


def run(name: str, *args: str) -> str:
    """What an example prints."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *args],
        capture_output=True,
        text=True,
        timeout=500,  # seconds are CPU seconds times the load
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"'?loss'?:? '?([\d.]+)", text)]


@pytest.mark.parametrize(
    ("name", "last"),
    [("plain_loop.py", "the complete weights load into the plain model"), ("lora.py", "the base is as it was: True")],
)
def test_a_loop_runs_to_its_last_line(name: str, last: str) -> None:
    """As often as the package changes, without the time that learning takes."""
    program = f"import runpy; runpy.run_path({str(ROOT / 'examples' / name)!r}, run_name='__main__')"
    with forked(program, "--steps", 2, "--blocks", 1) as process:
        assert last in process.stdout.read()
        assert process.wait(60) == 0


@pytest.mark.thorough
def test_plain_loop_learns_with_a_part_of_the_model_gathered() -> None:
    said = run("plain_loop.py", "--steps", "20")
    assert losses(said)[-1] < losses(said)[0]
    whole, peak = re.search(r"parameters: ([\d,]+) bytes; at most ([\d,]+) were", said).groups()
    assert int(peak.replace(",", "")) < int(whole.replace(",", "")) / 1.5
    assert "load into the plain model" in said


@pytest.mark.thorough
def test_hf_finetune_trains_generates_and_saves() -> None:
    said = run("hf_finetune.py", "--steps", "20", "--layers", "2")
    assert losses(said)[0] < 5.6
    assert "the model writes: RayZero " in said
    assert "from_pretrained(checkpoint-20) gives the same weights: True" in said


@pytest.mark.thorough
def test_lora_trains_adapters_on_a_frozen_bf16_base() -> None:
    said = run("lora.py", "--steps", "30")
    assert losses(said)[-1] < losses(said)[0]
    assert "no masters, no moments" in said
    assert "the base is as it was: True" in said


@pytest.mark.thorough
@pytest.mark.ray
def test_ray_train_learns_and_keeps_the_checkpoint_of_its_workers() -> None:
    said = run("ray_train.py", "--steps", "40", "--fits", "1")  # the next one: tests/integrations/test_ray_train.py
    assert re.search(r"^step  40  loss [01]\.\d+  checkpoint checkpoint_", said, re.M), "it begins with 4"


def test_the_port_of_grpos_server_stays_its_own_while_none_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that was given it meanwhile would end each new vLLM at its start."""
    server = runpy.run_path(str(ROOT / "examples/grpo.py"))["Server"]
    said = ""

    def ended() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return said.count("has ended: 1. Its log:") > 1 and "No module named 'vllm'" in said

    kept = server(Path(sys.executable), tmp_path / "model", tmp_path / "vllm.log")  # which has no vLLM
    try:
        until(ended, 100.0, "an end that is named, with its cause, and another start")
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", kept.port))
        for _ in range(2):
            with socket.socket() as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM
                listening.bind(("127.0.0.1", kept.port))
                listening.listen()
    finally:
        kept.close()


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_help_says_what_is_shown_and_readme_links_to_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert "usage:" in capsys.readouterr().out
    assert f"examples/{name}" in (ROOT / "README.md").read_text()
