"""A plugin of pytest that takes down what each test costs (`-p tests.costs.plugin`), in the folder `RAYZERO_COSTS`.

CPU seconds are those of a control group for this pytest alone, which all of its descendants are in, Ray's daemons too.
What a fixture of the session costs counts for the test that needs it first, or last."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

_FOLDER = Path(os.environ["RAYZERO_COSTS"])
_GROUPS = Path("/sys/fs/cgroup/cpuacct")


def _own_group() -> Path | None:
    """Move this process into a control group of its own; None where that is not allowed."""
    group = _GROUPS / f"rayzero-costs-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return None
    return group


_GROUP = _own_group()


def _cpu_seconds() -> float:
    """Of this process and its descendants; without a control group, only of those that have ended and were waited
    for."""
    if _GROUP is not None:
        return int((_GROUP / "cpuacct.usage").read_text()) / 1e9
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write a line for each test: its name, tier, whether it needs Ray, seconds and CPU seconds."""
    began, used = time.perf_counter(), _cpu_seconds()
    yield
    row = {
        "test": item.nodeid,
        "thorough": item.get_closest_marker("thorough") is not None,
        "ray": item.get_closest_marker("ray") is not None,
        "seconds": time.perf_counter() - began,
        "cpu": _cpu_seconds() - used,
    }
    with (_FOLDER / f"tests-{os.getpid()}").open("a") as rows:
        rows.write(json.dumps(row) + "\n")


def pytest_unconfigure() -> None:
    """Leave no control group behind."""
    if _GROUP is not None:
        with suppress(OSError):  # processes that outlive pytest are still in it: the kernel keeps it for them
            (_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
            _GROUP.rmdir()
