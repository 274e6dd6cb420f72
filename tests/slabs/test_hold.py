"""What is held is not swept, until its holder ends, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rayzero.cli.doctor import swept
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import Hold, end_hold, held_in, list_slabs, sweep

HOLDER = """
import sys, signal
from pathlib import Path
from rayzero.slabs.sweep import Hold
hold = Hold(Path(sys.argv[1]), "one", 4e9)
hold.tell(41, 4e9)
assert "torch" not in sys.modules
print("held", flush=True)
signal.pause()
"""


def made(directory: Path, *, run: str = "demo", lineage: str = "one") -> Slab:
    """A slab whose maker lives until it is closed."""
    facts = SlabFacts(
        run=run, role="grads", index=0, incarnation=7, layout_digest="ab" * 16, kernel="", lineage=lineage
    )
    return Slab.create(lay_out_slab(facts, [("data", 4096, 0)]), directory)


def leave(directory: Path, lineage: str) -> Path:
    """A slab whose maker is gone."""
    slab = made(directory, lineage=lineage)
    slab.close(unlink=False)
    assert slab.path is not None
    return slab.path


def holder(directory: Path) -> subprocess.Popen[str]:
    found = subprocess.Popen([sys.executable, "-c", HOLDER, directory], stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None
    assert found.stdout.readline() == "held\n"
    return found


def test_what_is_held_is_not_swept(tmp_path: Path) -> None:
    ours, other = leave(tmp_path, "one"), leave(tmp_path, "two")
    hold = Hold(tmp_path, "one", 4e9)
    assert [path for path, _ in sweep(tmp_path)] == [other]
    hold.tell(3, 5e9)
    ((held),) = held_in(tmp_path)
    assert (held.lineage, held.pid, held.until, held.step) == ("one", os.getpid(), 5e9, 3)
    hold.close()
    hold.close()
    assert [path for path, _ in sweep(tmp_path)] == [ours]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_holder_that_dies_holds_nothing_and_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    ours, process = leave(tmp_path, "one"), holder(tmp_path)
    assert sweep(tmp_path) == []
    assert [held.step for held in held_in(tmp_path)] == [41]
    process.send_signal(how)
    process.communicate()
    assert held_in(tmp_path) == []
    assert [path for path, _ in sweep(tmp_path)] == [ours]
    assert list(tmp_path.iterdir()) == []


def test_who_continues_a_run_ends_the_hold_of_its_janitor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayzero.slabs.sweep._ENDS_S", 600.0)  # of which nothing is waited out
    leave(tmp_path, "one")
    process, mine = holder(tmp_path), Hold(tmp_path, "one")
    end_hold(tmp_path, "two")
    assert process.poll() is None
    end_hold(tmp_path, "one")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert [held.pid for held in held_in(tmp_path)] == [os.getpid()]
    assert sweep(tmp_path) == [], "the new driver holds it"
    mine.close()


def test_a_file_that_is_no_hold_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "rayzero-x.hold").write_text("[]")
    (tmp_path / "rayzero-y.hold").mkdir()
    (tmp_path / "rayzero-z.hold.making").write_text(json.dumps({"lineage": "one"}))
    leave(tmp_path, "one")
    assert len(sweep(tmp_path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rayzero-y.hold"]


def test_the_doctor_removes_what_a_janitor_keeps(tmp_path: Path) -> None:
    leave(tmp_path, "one")
    process = holder(tmp_path)
    assert swept(tmp_path)[-1].startswith("slabs of dead processes removed: 1, ")
    process.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_had_before_it_started_again_is_swept_while_the_run_goes_on(tmp_path: Path) -> None:
    """From a checkpoint, with another lineage; a run that continues what is left has the same."""
    before, now = leave(tmp_path, "one"), made(tmp_path, lineage="two")
    killed = leave(tmp_path, "two")
    assert [path for path, _ in sweep(tmp_path)] == [before]
    now.close()
    assert [path for path, _ in sweep(tmp_path)] == [killed]


def test_a_sweep_for_one_run_takes_its_slabs_and_what_nobody_has_filled(tmp_path: Path) -> None:
    ours, other = leave(tmp_path, "one"), leave(tmp_path, "two")
    unfilled, unread = tmp_path / "rayzero-a.slab.making", tmp_path / "rayzero-b.slab"
    for path in (unfilled, unread):
        path.write_bytes(b"")
    assert {path for path, _ in sweep(tmp_path, "one")} == {ours, unfilled}
    assert set(tmp_path.iterdir()) == {other, unread}


def test_what_is_over_is_swept_whoever_holds_it_but_not_what_lives(tmp_path: Path) -> None:
    hold, living = Hold(tmp_path, "one"), made(tmp_path, lineage="one", run="demo model 1")
    ours = leave(tmp_path, "one")
    assert sweep(tmp_path, "one") == []
    assert [path for path, _ in sweep(tmp_path, "one", is_over=True)] == [ours]
    hold.close()
    living.close()


@pytest.mark.timeout(20)
def test_a_fifo_with_a_slabs_name_stays_and_disturbs_no_sweep(tmp_path: Path) -> None:
    """Everybody may put files into /dev/shm."""
    for name in ("rayzero-0.slab", "rayzero-1.hold"):
        os.mkfifo(tmp_path / name)
    left = leave(tmp_path, "one")
    assert [found.path for found in list_slabs(tmp_path)] == [left]
    assert [path for path, _ in sweep(tmp_path)] == [left]
    with pytest.raises(OSError, match="it is a FIFO, not a regular file"):
        Slab.attach(tmp_path / "rayzero-0.slab", writable=False, run="demo", layout_digest="ab" * 16)


@pytest.mark.promise("safe", "hosts")
def test_another_users_files_are_neither_swept_nor_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep may not remove them, and what they hold, and by whom, is their maker's word: ``end_hold`` would end
    whom it names."""
    left, hold = leave(tmp_path, "one"), Hold(tmp_path, "one", 4e9)
    assert [each.lineage for each in held_in(tmp_path)] == ["one"]
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert held_in(tmp_path) == []
    end_hold(tmp_path, "one")  # this process goes on
    assert list_slabs(tmp_path) == sweep(tmp_path) == []
    assert left.exists()
    monkeypatch.undo()
    hold.close()
    assert [path for path, _ in sweep(tmp_path)] == [left]
