"""A follower as a process of its own, which notes what it has read; and what a run must have published."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

import rayzero
from rayzero.errors import StoreClosedError, VersionGoneError

_TESTS = Path(__file__).parents[1]


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Of names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        bits = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + bits)
    return found.hexdigest()


def note(path: Path, version: int, found: str) -> None:
    with path.open("a") as file:
        file.write(f"{version} {found}\n")


def noted(path: Path) -> dict[int, set[str]]:
    """By version, what was read or published of it."""
    by_version: dict[int, set[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        version, _, found = line.partition(" ")
        by_version.setdefault(int(version), set()).add(found)
    return by_version


def watch(run: str, to: Path, pause_s: float = 0.0) -> subprocess.Popen[bytes]:
    """Start a follower of a run, which reads the newest version again and again, with a pause between two tensors."""
    command = [sys.executable, "-m", "followers.watcher", run, str(to), str(pause_s)]
    return subprocess.Popen(command, cwd=_TESTS, env=os.environ | {"OMP_NUM_THREADS": "1"})


def main(run: str, to: Path, pause_s: float) -> None:
    with rayzero.follow(run) as follower:
        while True:
            try:
                follower.wait()
                reading = follower.read()
            except StoreClosedError:
                return
            except VersionGoneError:
                continue
            held = []
            for tensor in reading:
                held.append(tensor)
                time.sleep(pause_s)
            note(to, reading.version, digest(held))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
