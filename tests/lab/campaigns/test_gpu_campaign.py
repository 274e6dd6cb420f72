"""The campaign for a GPU: that it walks here, goes on where it was cut off, and says what it could not do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.bench.step import PLAIN
from lab.gpu import gpu_campaign as campaign

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]
PARTS = ("overlap", "step-tiny-128", "hybrid")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_simulated_parts_of_the_campaign_end_well(tmp_path: Path) -> None:
    """Those with figures to look at; `scripts/soak gpu` walks all of them."""
    command = [str(ROOT / "scripts" / "gpu"), "--simulate", "--results", str(tmp_path), "--parts", *PARTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("gpu-*.json")}
    ended = {result["part"]: result["end"] for result in found.values()}
    assert ended == dict.fromkeys(PARTS, "done"), done.stdout + done.stderr
    assert done.returncode == 0
    assert found["gpu-hybrid"]["figures"]["equal_bits"]
    assert found["gpu-overlap"]["figures"]["late"] + found["gpu-overlap"]["figures"]["in_time"] > 0
    _check_step(found["gpu-step-tiny-128"]["figures"])


def _check_step(figures: Any) -> None:
    """What lab/gpu/gpu_step.py finds on a CPU, by the path that it takes on a GPU."""
    assert figures["loss_apart"].keys() == {PLAIN, "rayzero-none", "rayzero-forward"}
    ceiling, *ours = figures["rows"]
    assert (ceiling["name"], ceiling["exposed_s"]) == (PLAIN, 0.0)
    assert [row["name"] for row in ours] == ["rayzero-none", "rayzero-forward"]
    for row in ours:
        assert row["of_ceiling"] == pytest.approx(ceiling["step_s"]["median"] / row["step_s"]["median"])
        assert row["host_bytes"] > 0


def python(name: str, code: str, limit_s: float = 60.0, tool: str | None = None) -> Any:
    command = [sys.executable, "-c", code]
    return campaign.Part(name=name, command=command, limit_s=limit_s, read=campaign.read_json, tool=tool)


def test_it_goes_on_with_what_is_missing_and_one_part_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    note = f"open({str(ran)!r}, 'a').write('x');"
    listed = [
        python("well", f"{note} print('{{\"figure\": 2.0}}')"),
        python("ill", "raise SystemExit('no memory')"),
        python("slow", "import time; time.sleep(60)", limit_s=0.5),
        python("tool", "", tool="no-such-program"),
        python("mute", "print('no figures')"),
    ]
    monkeypatch.setattr(campaign, "parts", lambda *, simulate: listed)
    results = ["--simulate", "--results", str(tmp_path / "results")]
    assert campaign.main(results) == 1
    said = capsys.readouterr().out
    assert [line.split(" | ")[1] for line in said.splitlines() if line.startswith("| ") and "part" not in line] == [
        "done",
        "failed",
        "out of time",
        "not there",
        "failed",
    ]
    assert "| well | done | 0 | figure 2 |" in said
    assert "no memory" in said
    campaign.main(results)
    assert ran.read_text() == "x", "what has ended well is not run again"
    assert campaign.main([*results, "--parts", "well", "--again"]) == 0
    assert ran.read_text() == "xx"
    with pytest.raises(SystemExit, match=r"--parts has \['nothing'\]; there are well, ill, slow, tool, mute"):
        campaign.main([*results, "--parts", "nothing"])


def test_no_part_begins_when_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "parts", lambda *, simulate: [python("late", "print(1 / 0)")])
    assert campaign.main(["--simulate", "--results", str(tmp_path), "--minutes", "0.1"]) == 0
    assert "| late | out of time | 0 | the 0.1 minutes are over |" in capsys.readouterr().out
