"""A small training run with named faults, and what must hold of it."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import Batches, seeded
from engine.test_comeback import Seen, Small
from torch import nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.kernels.torch_classes.optimizer_states import leaves
from rayzero.protocol.messages import STEP
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.testing import Transport, run_ranks
from tests.support.faults import Fault, Faults
from tests.support.waiting import until

STEPS = 4
RANKS = OWNERS = 2
DIED = " died and is started again"
OWNERS_ELSEWHERE = ("optimizer 0", "optimizer 1")  # than the ranks


def train(
    context: RankContext,
    base: nn.Module,
    folder: Path,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    matrix_updates: Any = "owner",
) -> Any:
    """A loop with everything in it that can be cut: norms and clips, means, a write, a checkpoint."""
    torch.set_num_threads(1)  # the bits of a matrix product depend on it
    (folder / "run").write_text(context.run)
    model, loader, seen = copy.deepcopy(base), Batches(context.rank), Seen()
    config = ZeroConfig(units=["Block", "Embedding"], matrix_updates=matrix_updates)
    model, optimizer = rayzero.prepare(model, make(model.parameters(), lr=1e-2), config)
    cycles = not {"betas", "momentum"}.isdisjoint(optimizer.param_groups[0])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=STEPS + 1, cycle_momentum=cycles)
    rayzero.track(scheduler=scheduler, loader=loader, seen=seen)
    batches = iter(loader)
    for step in range(context.step, STEPS):
        x, y = next(batches)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        seen.losses = [*seen.losses, loss.detach()]
        if step % 2:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.means = [*seen.means, rayzero.mean_over_ranks(float(seen.losses[-1]))]
        if step == 1:
            rayzero.save_checkpoint(optimizer, folder / f"step-{step + 1}")
            with torch.no_grad():
                model.head.bias.fill_(0.25)
                model.embed.weight.mul_(0.5)  # of another unit
    states = optimizer.state_dict()["state"]
    moments = {
        f"{key} {kind}": torch.as_tensor(v) for key, state in states.items() for kind, v in leaves(state).items()
    }
    engine = optimizer.engine
    moments |= {f"{unit.name} {STEP}": engine.cache.fetch_flat(unit, STEP) for unit in engine.units}
    losses = [float(loss) for loss in seen.losses]
    return context.life, rayzero.full_state_dict(model) | moments, losses, seen.means


def undisturbed(folder: Path, **given: Any) -> Any:
    """By rank, what a run ends with that nothing happens to. ``given``: to ``train``."""
    return run_ranks(functools.partial(train, base=seeded(Small, 3), folder=folder, **given), RANKS, OWNERS)


def differences(ours: Any, theirs: Any) -> list[str]:
    """What two runs do not have in common, bit by bit."""
    found = []
    for rank, ((_, tensors, *seen), (_, others, *heard)) in enumerate(zip(ours, theirs, strict=True)):
        assert tensors.keys() == others.keys()
        found += [f"rank {rank}: {name}" for name in tensors if not torch.equal(tensors[name], others[name])]
        found += [f"rank {rank}: {what}" for what, a, b in zip(("losses", "means"), seen, heard, strict=True) if a != b]
    return found


class Disturbed:
    """A run of ranks and owners that are processes, with faults."""

    def __init__(
        self,
        folder: Path,
        *faults: Fault,
        transport: Transport = "shm",
        stall_timeout: float = 30.0,
        hosts: Mapping[str, Path] | None = None,
        tls: bool = False,
        config: ZeroConfig | None = None,
        **given: Any,
    ) -> None:
        """``config``: how bytes and messages travel. ``given``: to ``train``."""
        self.given = given
        self.tls, self.config = tls, config
        self.folder, self.faults, self.hosts = folder, Faults(folder, faults), dict(hosts or {})
        self.transport: Transport = transport
        self.stall_timeout = stall_timeout
        self.deaths = Counter(fault.member for fault in faults if fault.act in ("kill", "stop"))

    def results(self) -> Any:
        """By rank."""
        one = functools.partial(train, base=seeded(Small, 3), folder=self.folder, **self.given)
        found = run_ranks(
            one,
            RANKS,
            OWNERS,
            self.transport,
            True,
            stall_timeout=self.stall_timeout,
            max_failures=max(1, self.deaths.total()),
            faults=self.faults,
            hosts=self.hosts,
            tls=self.tls,
            config=self.config,
        )
        if self.all_struck:
            assert [life for life, *_ in found] == [self.deaths[f"rank {rank}"] for rank in range(RANKS)]
        return found

    @property
    def all_struck(self) -> bool:
        """Whether every fault has found its moment. Some need a rank to be faster than another one."""
        return all(self.faults.struck(index) is not None for index in range(len(self.faults.faults)))

    def changes_no_bit(self, expected: Any, log: pytest.LogCaptureFixture) -> None:
        """It ends with the bits of a run that nothing happens to, and as ``check`` has it."""
        assert differences(self.results(), expected) == []
        self.check(log.messages)

    def check(self, said: Sequence[str]) -> None:
        """Every fault has struck, whoever died was replaced and nobody else, and nothing is left. ``said``: the log."""
        for index, fault in enumerate(self.faults.faults):
            struck = self.faults.struck(index)
            assert struck is not None, f"{fault}: it has struck"
            assert not Path(f"/proc/{struck.pid}").exists(), f"{fault}: who was struck has ended"
        assert Counter(line.removesuffix(DIED) for line in said if line.endswith(DIED)) == self.deaths
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        """The run has left no process and no slab."""
        until(lambda: multiprocessing.active_children() == [])
        named = self.folder / "run"  # if a loop began
        run = named.read_text() if named.exists() else ""
        for directory in {SHARED_MEMORY, *self.hosts.values()}:
            there = [slab for slab in list_slabs(directory) if slab.header is not None]
            assert [slab.path for slab in there if slab.header.facts.run == run] == []


@contextmanager
def another_host(*members: str) -> Iterator[dict[str, Path]]:
    """Shared memory that only these members have."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-host-") as folder:
        yield dict.fromkeys(members, Path(folder))
