"""A small training run with named faults, and what must hold of it."""

from __future__ import annotations

import copy
import functools
import hashlib
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine.models import Batches, seeded
from engine.test_comeback import Seen, Small
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.kernels.optimizer_states import leaves
from rayzero.protocol.messages import STEP
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.testing import Transport, run_ranks
from tests.support.faults import Fault, Faults
from tests.support.waiting import until

from .test_scaling_cases import Small as BufferlessSmall

STEPS = 4  # of a run, or of each cell of a series
RANKS = OWNERS = 2
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
DIED = " died and is started again"
OWNERS_ELSEWHERE = ("optimizer 0", "optimizer 1")  # than the ranks


class SeenInCells(Seen):
    """And a digest of all that is trained at the end of each cell."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"digests": self.digests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.digests = list(state["digests"])


def train(
    context: RankContext,
    base: nn.Module,
    folder: Path,
    make: Callable[..., Any] = torch.optim.AdamW,
    precision: str = "fp32",
    matrix_updates: Any = "owner",
    cells: int = 1,
    series: Series | None = None,
) -> Any:
    """A loop with everything in it that can be cut, in each cell again: norms and clips, means, a write, a checkpoint.
    ``make``: an optimizer, or several, of Parameters and ``lr``. ``series``: what strikes in the cells."""
    torch.set_num_threads(1)  # the bits of a matrix product depend on it
    (folder / "run").write_text(context.run)
    model, loader, seen = copy.deepcopy(base), Batches(context.rank), SeenInCells()
    config = ZeroConfig(units=["Block", "Embedding"], precision=precision, matrix_updates=matrix_updates)
    model, optimizer = rayzero.prepare(model, make(model.parameters(), lr=1e-2), config)
    scheduler = one_cycle(optimizer, cells)
    rayzero.track(scheduler=scheduler, loader=loader, seen=seen)
    batches = iter(loader)
    for step in range(context.step, cells * STEPS):
        cell, at = divmod(step, STEPS)
        if at == 0 and series is not None:
            series.begin(cell)
        x, y = next(batches)
        loss = loss_of(model, x, y)
        loss.backward()
        seen.losses = [*seen.losses, loss.detach()]
        if at % 2:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.means = [*seen.means, rayzero.mean_over_ranks(float(seen.losses[-1]))]
        if at == 1:
            rayzero.save_checkpoint(optimizer, folder / f"step-{step + 1}")
            with torch.no_grad():
                model.head.bias.fill_(0.25)
                model.embed.weight.mul_(0.5)  # of another unit
        if at == STEPS - 1:
            trained = trained_by(model, optimizer)
            seen.digests = [*seen.digests, digest_of(trained)]
            if series is not None:
                series.end(cell)
    return context.life, trained, [float(loss) for loss in seen.losses], seen.means, seen.digests


def trained_by(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Weights, buffers, what the optimizer keeps, and the owners' counts of updates."""
    engine = optimizer.engine
    counts = {f"{unit.name} {STEP}": engine.cache.fetch_flat(unit, STEP) for unit in engine.units}
    return rayzero.full_state_dict(model) | named_leaves(optimizer.state_dict()["state"]) | counts


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Of names and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def one_cycle(optimizer: torch.optim.Optimizer, cells: int, among: int = 1) -> Any:
    """A schedule of rates, and of momenta if the optimizer has such and is not one of several (``among``)."""
    cycles = not {"betas", "momentum"}.isdisjoint(optimizer.defaults) and among == 1
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=cells * STEPS + 1, cycle_momentum=cycles)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def named_leaves(states: Mapping[int, Any]) -> dict[str, Tensor]:
    """What optimizers keep, by the number of the parameter and the name."""
    return {f"{key} {kind}": torch.as_tensor(v) for key, state in states.items() for kind, v in leaves(state).items()}


def unsharded(make: Callable[..., Any], precision: str, cells: int = 1) -> Any:
    """By rank, what plain PyTorch ends with that trains one model on the batches of all ranks, as ``train`` does. The
    norm that clips is in fp64, as owners compute it."""
    torch.set_num_threads(1)
    masters = base_of(precision)
    ranks = [copy.deepcopy(masters).to(getattr(torch, DTYPES[precision])) for _ in range(RANKS)]
    made = make(masters.parameters(), lr=1e-2)
    optimizers = made if isinstance(made, list) else [made]
    schedulers = [one_cycle(each, cells, len(optimizers)) for each in optimizers]
    batches = [iter(Batches(rank)) for rank in range(RANKS)]
    losses, means = [[] for _ in ranks], []
    for step in range(cells * STEPS):
        for model, each, lost in zip(ranks, batches, losses, strict=True):
            model.zero_grad()
            loss = loss_of(model, *next(each))
            loss.backward()
            lost.append(float(loss.detach()))
        for param, *parts in zip(masters.parameters(), *(model.parameters() for model in ranks), strict=True):
            param.grad = functools.reduce(torch.add, [part.grad.float() for part in parts])
        square = sum(float(param.grad.double().square().sum()) for param in masters.parameters())
        norm = square**0.5 / RANKS
        scale = min(1.0, 0.5 / (norm + 1e-6)) / RANKS if step % 2 else 1.0 / RANKS
        for param in masters.parameters():
            param.grad *= scale
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            if step % STEPS == 1:  # of rounded values: a master keeps its own where these stay as they are
                for param, factor, added in ((masters.head.bias, 0.0, 0.25), (masters.embed.weight, 0.5, 0.0)):
                    rounded = param.to(ranks[0].embed.weight.dtype)
                    written = rounded * factor + added
                    param.copy_(torch.where(written == rounded, param, written.float()))
            for model in ranks:
                for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                    param.copy_(master)
        means.append(sum(lost[-1] for lost in losses) / RANKS)
    states: dict[int, Any] = {}
    for optimizer in optimizers:
        states |= {len(states) + key: state for key, state in optimizer.state_dict()["state"].items()}
    return [
        (0, dict(masters.state_dict()) | dict(model.named_buffers()) | named_leaves(states), lost, means)
        for model, lost in zip(ranks, losses, strict=True)
    ]


def base_of(precision: str) -> nn.Module:
    """A model that has buffers if it is not to compute in bf16, which batch norms with fp32 buffers do not."""
    return seeded(Small if precision == "fp32" else BufferlessSmall, 3)


def undisturbed(folder: Path, precision: str = "fp32", **given: Any) -> Any:
    """By rank, what a run ends with that nothing happens to. ``given``: to ``train``."""
    loop = functools.partial(train, base=base_of(precision), folder=folder, precision=precision, **given)
    return run_ranks(loop, RANKS, OWNERS)


def differences(ours: Any, theirs: Any) -> list[str]:
    """What two runs do not have in common, bit by bit."""
    found = []
    for rank, ((_, tensors, *seen), (_, others, *heard)) in enumerate(zip(ours, theirs, strict=True)):
        assert tensors.keys() == others.keys()
        found += [f"rank {rank}: {name}" for name in tensors if not torch.equal(tensors[name], others[name])]
        found += [
            f"rank {rank}: {what}" for what, a, b in zip(("losses", "means"), seen, heard, strict=False) if a != b
        ]
    return found


@dataclass(frozen=True)
class Series:
    """Faults that strike one run, cell after cell: those of each have ``STEPS`` steps to strike in."""

    cells: Mapping[str, tuple[Fault, ...]]  # lives count from each cell's begin
    folder: Path

    @functools.cached_property
    def faults(self) -> Faults:
        """Of all cells, with the lives in which their members are by then: who is killed in one is replaced in it."""
        lives, found = Counter[str](), list[Fault]()
        for cell in self.cells.values():
            found += [f if f.life is None else replace(f, life=f.life + lives[f.member]) for f in cell]
            lives.update(deaths_of(cell))
        return Faults(self.folder, tuple(found), waits=True)

    def begin(self, cell: int) -> None:
        """The cell's faults may strike from now on."""
        for index in self._of(cell):
            self.faults.ask(index)

    def end(self, cell: int) -> None:
        """Raise AssertionError that names cell and fault for one that has not struck."""
        for index in self._of(cell):
            named = f"{list(self.cells)[cell]}: {self.faults.faults[index]}"
            assert self.faults.struck(index) is not None, f"{named} has not struck in its {STEPS} steps"

    def _of(self, cell: int) -> range:
        sizes = [len(faults) for faults in self.cells.values()]
        return range(sum(sizes[:cell]), sum(sizes[: cell + 1]))

    def differences(self, ours: Any, theirs: Any) -> list[str]:
        """What two runs do not have in common, bit by bit, at the end of the first cell after which they differ."""
        for cell, name in enumerate(self.cells):
            steps, found = slice(cell * STEPS, (cell + 1) * STEPS), []
            for rank, ((_, _, *seen), (_, _, *heard)) in enumerate(zip(ours, theirs, strict=True)):
                for what, part, mine, others in zip(
                    ("losses", "means", "weights and states"),
                    (steps, steps, slice(cell, cell + 1)),
                    seen,
                    heard,
                    strict=True,
                ):
                    found += [f"after {name}: rank {rank}: {what}"] * (mine[part] != others[part] or not mine[part])
            if found:
                return found
        return differences(ours, theirs)


def deaths_of(faults: Iterable[Fault]) -> Counter[str]:
    """By member, how often these end a process."""
    return Counter(fault.member for fault in faults if fault.act in ("kill", "stop"))


def missed(faults: Faults) -> list[Fault]:
    """Those that have not struck."""
    return [fault for index, fault in enumerate(faults.faults) if faults.struck(index) is None]


class Disturbed:
    """A run of ranks and owners that are processes, with faults."""

    def __init__(
        self,
        folder: Path,
        *faults: Fault,
        transport: Transport = "shm",
        stall_timeout: float = 60.0,
        hosts: Mapping[str, Path] | None = None,
        tls: bool = False,
        config: ZeroConfig | None = None,
        precision: str = "fp32",
        cells: Mapping[str, tuple[Fault, ...]] | None = None,
        **given: Any,
    ) -> None:
        """``config``: how bytes and messages travel. ``cells``: in place of ``faults``, those of a series. ``given``:
        to ``train``."""
        self.given = given | {"precision": precision, "base": base_of(precision), "folder": folder}
        self.series = None if cells is None else Series(cells, folder)
        self.faults = Faults(folder, faults)
        if self.series is not None:
            self.faults, self.given = self.series.faults, self.given | {"cells": len(cells), "series": self.series}
            self.series.begin(0)  # with the processes
        self.tls, self.config = tls, config
        self.folder, self.hosts = folder, dict(hosts or {})
        self.transport: Transport = transport
        self.stall_timeout = stall_timeout
        self.deaths = deaths_of(self.faults.faults)

    def results(self) -> Any:
        """By rank."""
        one = functools.partial(train, **self.given)
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
        return not missed(self.faults)

    def changes_no_bit(self, expected: Any, log: pytest.LogCaptureFixture) -> None:
        """It ends with the bits of a run that nothing happens to, and as ``check`` has it."""
        compare = differences if self.series is None else self.series.differences
        assert compare(self.results(), expected) == []
        self.check(log.messages)

    def check(self, said: Sequence[str]) -> None:
        """Every fault has struck, whoever died was replaced and nobody else, and nothing is left. ``said``: the log."""
        for index, fault in enumerate(self.faults.faults):
            struck = self.faults.struck(index)
            assert struck is not None, f"{fault}: it has struck"
            until(lambda pid=struck.pid: not psutil.pid_exists(pid), what=f"{fault}: who was struck goes on")
        assert Counter(line.removesuffix(DIED) for line in said if line.endswith(DIED)) == self.deaths
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        """The run has left no process and no slab."""
        until(lambda: multiprocessing.active_children() == [])
        named = self.folder / "run"  # if a loop began
        run = named.read_text() if named.exists() else ""
        for directory in {SHARED_MEMORY, *self.hosts.values()}:
            until(lambda there=directory: slabs_of(run, there) == [], what=f"{run} has left slabs in {directory}")


def slabs_of(run: str, directory: Path) -> list[Path]:
    """The files of a run's slabs."""
    there = [slab for slab in list_slabs(directory) if slab.header is not None]
    return [slab.path for slab in there if slab.header.facts.run == run]


@contextmanager
def another_host(*members: str) -> Iterator[dict[str, Path]]:
    """Shared memory that only these members have."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-host-") as folder:
        yield dict.fromkeys(members, Path(folder))
