"""Cleans up after processes that were killed: what each leaves on its host, and who removes it.

[Note: a killed driver] When a driver dies, Ray ends its actors by SIGKILL. They cannot remove their shared memory, and
nothing removes the run from the folder that Prometheus watches. So each driver has a janitor (``Survivor``). Once the
driver is dead, it waits for the run's processes on this host, kills those that stay, and sweeps. Processes on other
hosts have janitors of their own (slabs/sweep.py).

[Note: states are kept] While the driver lives, its janitor holds what dead processes of the run have left on this host
(slabs/sweep.py): their successors need it, and sweeps of other runs would take it. If the driver is killed, and what
all have left is enough for a run that continues this one, the janitor holds it for a while longer, and sleeps. A driver
that continues the run ends it, with SIGTERM.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rayzero.concurrency.survivor import Maker, Survivor, process_born, wait_or_kill
from rayzero.errors import ConfigError
from rayzero.files import replace_file
from rayzero.slabs.sweep import Hold, SlabJanitor, hold_or_none, sweep

_ENDS_S = 30.0  # how long Ray may take to end the actors of a driver that is gone
_KILL_S = 20.0  # how long the kernel may take to free a killed process
_SUCCEEDS_S = 150.0  # until a death is noticed and its successor is up, on a loaded machine


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStates:
    """The states of a run that are kept while its driver lives, and if that is killed."""

    run: str
    lineage: str
    seconds: float  # how long after the driver's death; 0: not at all


class Janitor:
    """The driver's end: starts the janitor process, sends it the run's processes, and releases it.

    Knows processes and two folders; not Ray or runs."""

    def __init__(self, slab_dir: Path | None, discovery_dir: Path | None, *, keep: KeptStates | None = None) -> None:
        """``slab_dir``: where the run's shared memory is; ``discovery_dir``: where it is announced; None: nowhere.
        ``keep``: the states that are kept there; None: none."""
        folders = ["" if folder is None else str(folder.absolute()) for folder in (slab_dir, discovery_dir)]
        kept = json.dumps(keep and asdict(keep))
        self._survivor = Survivor(__name__, *folders, kept, detached=False)  # freed by: close()

    @property
    def pid(self) -> int:
        return self._survivor.pid

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """If the driver dies, wait for the end of these processes before sweeping."""
        self._survivor.tell([[process.pid, process.create_time()] for process in processes])

    def close(self) -> None:
        """The driver has cleared up itself. Idempotent."""
        self._survivor.close()


def clear_up(
    processes: Iterable[psutil.Process],
    slab_dir: Path | None,
    discovery_dir: Path | None,
    ends_s: float = _ENDS_S,
    *,
    keep: KeptStates | None = None,
    awaited: Hold | None = None,
) -> None:
    """Remove the dead driver's run from Prometheus' folder, wait ``ends_s`` for its processes and kill those that stay,
    keep their states for a while, and remove their shared memory. ``awaited``: what held them while the driver lived;
    freed here."""
    hold = _hold(slab_dir, keep)  # before they end: other runs' starts sweep
    if awaited is not None:
        awaited.close()
    if discovery_dir is not None:
        with suppress(OSError):  # the next start removes what stays, as below
            sweep_announcements(discovery_dir)
    wait_or_kill(processes, ends_s, _KILL_S)
    if hold is not None and slab_dir is not None and keep is not None:
        _wait_for_a_driver(hold, slab_dir, keep)
        hold.close()
    if slab_dir is not None and slab_dir.is_dir():
        with suppress(OSError):
            sweep(slab_dir)


def _hold(slab_dir: Path | None, keep: KeptStates | None) -> Hold | None:
    """Hold the states. None: none are kept, or the folder takes no file."""
    if slab_dir is not None and keep is not None and keep.seconds > 0:
        return hold_or_none(slab_dir, keep.lineage, time.time() + keep.seconds)
    return None


def _wait_for_a_driver(hold: Hold, slab_dir: Path, keep: KeptStates) -> None:
    """See [Note: states are kept]. Returns when time is up, or at once if nobody can go on from what is left. Another
    process looks at it, because it imports torch."""
    code = [sys.executable, "-m", "rayzero.cluster.continuation", keep.run, keep.lineage, str(slab_dir)]
    found = subprocess.run(code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if found.returncode == 0:
        hold.tell(int(found.stdout), time.time() + keep.seconds)
        time.sleep(keep.seconds)


def main() -> None:
    driver = Maker(sys.argv)
    slab_dir, discovery_dir = (Path(folder) if folder else None for folder in driver.arguments[:2])
    kept = json.loads(driver.arguments[2])
    keep = None if kept is None else KeptStates(**kept)
    awaited = None if slab_dir is None or keep is None else hold_or_none(slab_dir, keep.lineage)
    processes: list[psutil.Process] = []
    try:
        for told in driver.told():
            found = (process_born(pid, born) for pid, born in told)
            processes = [process for process in found if process is not None]
        clear_up(processes, slab_dir, discovery_dir, keep=keep, awaited=awaited)
    finally:
        if awaited is not None:
            awaited.close()


# ---- a run in a directory that Prometheus watches (file_sd): configured once, it finds every run --------------------


@contextmanager
def announced(directory: Path, run: str, targets: bytes) -> Iterator[Path]:
    """A context in which a file with ``targets`` is there. If this process is killed, its janitor or the next run's
    start removes the file. Raises ConfigError if it cannot be written."""
    path = directory / f"{run}.{socket.gethostname()}.{os.getpid()}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        sweep_announcements(directory)
        replace_file(path, targets)
    except OSError as error:
        raise ConfigError(
            f"run.telemetry.discovery_dir: cannot write {path}: {error.strerror}; choose another directory"
        ) from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def sweep_announcements(directory: Path) -> list[Path]:
    """Remove the files of drivers of this host that are gone; returns them."""
    gone = [path for path in sorted(directory.glob(f"*.{socket.gethostname()}.*.json")) if not _driver_lives(path)]
    for path in gone:
        path.unlink(missing_ok=True)
    return gone


def _driver_lives(path: Path) -> bool:
    pid = path.stem.rpartition(".")[2]
    if not pid.isdigit():
        return True
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- other hosts: processes that make slabs there have janitors (slabs/sweep.py) ------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What killed processes of a run leave in shared memory: what the driver says of it to each that makes slabs."""

    lineage: str  # of the run's states in shared memory
    driver_node: str  # where the driver's janitor removes them
    needed_s: float  # how long a successor may take to come
    over: str | None = None  # the lineage before, which nobody continues

    @classmethod
    def of_run(cls, lineage: str, driver_node: str, *, replaces: bool, over: str | None = None) -> Remains:
        """Those of a run. ``replaces``: the dead are started again."""
        return cls(lineage=lineage, driver_node=driver_node, needed_s=_SUCCEEDS_S if replaces else 0.0, over=over)

    def janitor(self, share: Path | None) -> SlabJanitor | None:
        """For the calling process, which makes slabs in ``share``, and first removes those of the lineage before. None:
        it needs none on the driver's node, or without shared memory. Raises OSError if it cannot be started."""
        import ray  # the driver's janitor needs none

        if share is None or ray.get_runtime_context().get_node_id() == self.driver_node:
            return None
        if self.over is not None:
            sweep(share, self.over, is_over=True)
        return SlabJanitor(share, self.lineage, self.needed_s)


def leaving_nothing(remains: Remains | None, share: Path | None) -> AbstractContextManager[object]:
    """A context in which the calling process may make slabs in ``share`` and be killed: see ``Remains.janitor``. None:
    others see to them."""
    janitor = None if remains is None else remains.janitor(share)
    return nullcontext() if janitor is None else janitor


if __name__ == "__main__":
    main()
