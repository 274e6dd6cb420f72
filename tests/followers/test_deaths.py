"""Followers are processes that nobody waits for: owners die, become more and fewer, followers die and stop. What a
follower reads is a version as it was published."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest
import torch
from engine.models import seeded

import rayzero
from rayzero.elastic.scaling import ScaleRequest, ask
from rayzero.engine.context import RankContext
from rayzero.slabs.sweep import list_slabs
from rayzero.testing import run_ranks
from tests.support import needs
from tests.support.waiting import until

from .on_network import describe
from .test_follower import BF16, Net, take_step
from .watcher import digest, note, noted, watch

pytestmark = [needs.shared_memory, pytest.mark.timeout(300)]

STEPS, PAUSE_S = 50, 0.05
GATES = 3, 31, STEPS  # versions at which the run waits until all followers have read something, at the end the last


def train(context: RankContext, folder: Path, on_network: bool) -> None:
    torch.set_num_threads(1)
    model = seeded(Net, 3)
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), BF16)
    if context.rank == 0:
        describe(context, folder)
        (folder / "run").write_text(context.run)
    for step in range(context.step, STEPS):
        take_step(model, optimizer, step, context.rank)
        weights = rayzero.full_state_dict(model)
        if context.rank == 0:
            note(
                folder / "published",
                step + 1,
                digest((name, tensor.bfloat16()) for name, tensor in weights.items() if name != "head.weight"),
            )
        time.sleep(PAUSE_S)
        if context.rank == 0:
            describe(context, folder)
        if step + 1 in GATES and (on_network or step + 1 < STEPS):  # a process that imports torch takes seconds
            until(lambda gate=folder / f"gate-{step + 1}": gate.exists(), 120)
    if context.rank == 0:
        describe(context, folder, state="finished")


class Disturber(threading.Thread):
    """Starts followers and lets things happen while a run goes on."""

    def __init__(self, folder: Path, on_network: bool) -> None:
        super().__init__()
        self._folder, self._on_network = folder, on_network
        self.followers: list[Popen[bytes]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            until(lambda: (self._folder / "run").exists(), 120)
            self._run = (self._folder / "run").read_text()
            for pause_s in (0.0, 0.0, 0.01):
                self._follow(pause_s)
            for version, act in self._acts().items():
                until(lambda version=version: version <= max(noted(self._folder / "published"), default=0), 120)
                act()
        except BaseException as error:
            self.error = error

    def _acts(self) -> dict[int, Callable[[], None]]:
        first, second = self.followers[:2]
        return {
            3: functools.partial(self._open, 3),
            4: first.kill,
            6: functools.partial(self._kill_owner, 0),  # the lead
            10: functools.partial(self._scale, 4),
            18: functools.partial(self._kill_owner, 2),
            20: functools.partial(second.send_signal, signal.SIGSTOP),
            22: functools.partial(self._scale, 1),
            30: self._follow,  # it comes late
            31: functools.partial(self._open, 31),
            32: functools.partial(second.send_signal, signal.SIGCONT),
            34: functools.partial(self._kill_owner, 0),
        } | ({STEPS: functools.partial(self._open, STEPS)} if self._on_network else {})

    def _follow(self, pause_s: float = 0.0) -> None:
        run = str(self._folder) if self._on_network else self._run
        self.followers.append(watch(run, self._folder / f"read-{len(self.followers)}", pause_s))

    def _open(self, gate: int) -> None:
        least = STEPS if gate == STEPS else 0
        for number in range(gate == STEPS, len(self.followers)):
            read = self._folder / f"read-{number}"
            until(lambda read=read: max(noted(read), default=-1) >= least, 120)
        (self._folder / f"gate-{gate}").touch()

    def _scale(self, owners: int) -> None:
        ask(self._folder, ScaleRequest(num_optimizers=owners))
        until(lambda: self._owners().keys() == set(range(owners)), 120)

    def _kill_owner(self, number: int) -> None:
        os.kill(self._owners()[number], signal.SIGKILL)

    def _owners(self) -> dict[int, int]:
        """Process ids of the owners, by number."""
        headers = [
            slab.header for slab in list_slabs() if slab.header is not None and slab.header.facts.run == self._run
        ]
        return {each.facts.index: each.pid for each in headers if each.regions_of("versions")}


@pytest.mark.thorough
@pytest.mark.parametrize("on_network", [False, True], ids=["in memory", "over the network"])
def test_followers_have_the_bits_whatever_dies(tmp_path: Path, on_network: bool) -> None:
    disturber = Disturber(tmp_path, on_network)
    disturber.start()
    try:
        loop = functools.partial(train, folder=tmp_path, on_network=on_network)
        run_ranks(loop, 2, 2, "shm", True, max_failures=4, run_dir=tmp_path, stall_timeout=60.0)
        disturber.join()
        assert disturber.error is None
        codes = [follower.wait(30) for follower in disturber.followers]
    finally:
        disturber.join()
        for follower in disturber.followers:
            follower.kill()
            follower.wait()
    assert codes == [-signal.SIGKILL, 0, 0, 0]
    published = noted(tmp_path / "published")
    assert {len(found) for found in published.values()} == {1}
    for number in range(4):
        read = noted(tmp_path / f"read-{number}")
        assert {v: found for v, found in read.items() if v and published[v] != found} == {}
        assert number == 0 or max(read) == STEPS, number
    assert len(noted(tmp_path / "read-1")) > STEPS // 3
