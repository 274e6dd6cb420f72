"""The training loop that ``faults.py`` disturbs, and how its processes and its progress are seen from outside."""

from __future__ import annotations

import copy
import functools
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from lab.bench.work import Precision
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.errors import HandshakeError
from rayzero.slabs.header import SlabHeader
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.store.owner.memory.slabs import is_control
from rayzero.store.shm.words import read_ownership, stands

RANKS = 2
_PLACE = struct.Struct("<q")  # a rank's finished steps, in a file of its own


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Seen:
    """What a rank's loop has seen."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.means: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "means": self.means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.means = list(state["losses"]), list(state["means"])


@functools.cache
def base() -> nn.Module:
    """The model that every rank begins with: ranks that are threads share one random generator."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(64, 64), Block(64), Block(64), nn.Linear(64, 64))


def loop(
    context: RankContext,
    model: nn.Module,
    folder: Path,
    steps: int,
    backwards: int = 1,
    keeps: int = sys.maxsize,
    precision: Precision = "fp32",
) -> Any:
    """Train ``steps`` steps of ``backwards`` each, in whichever life: until the file "end" says how many steps, if
    ``steps`` is 0. ``keeps``: how many losses and means it remembers."""
    torch.set_num_threads(1)  # the bits of a matrix product depend on it
    model = copy.deepcopy(model)
    (folder / "run").write_text(context.run)
    config = ZeroConfig(
        units=["Block", "Embedding"],
        shard_bytes="16KiB",  # large units have shards of several owners
        gradient_accumulation_steps=backwards,
        precision=precision,
    )
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    scheduler, seen = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9), Seen()
    rayzero.track(scheduler=scheduler, seen=seen)
    step = context.step
    place = os.open(folder / f"at-{context.rank}", os.O_CREAT | os.O_RDWR)
    while step < (steps or end_of(folder)):
        for part in range(backwards):
            seed = 1000 * step + RANKS * part + context.rank
            tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(seed))
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / backwards).backward()
        seen.losses = [*seen.losses, loss.item()][-keeps:]
        if step % 2:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            seen.means = [*seen.means, rayzero.mean_over_ranks(seen.losses[-1])][-keeps:]
        if step % 20 == 19:
            rayzero.save_checkpoint(optimizer, folder / f"step-{step + 1}", keep_last=1)
        if step % 30 == 29:
            with torch.no_grad():
                model[3].bias.mul_(0.5)
        step += 1
        os.pwrite(place, _PLACE.pack(step), 0)  # at once: who reads it never finds it empty
    os.close(place)
    return rayzero.full_state_dict(model), optimizer.state_dict(), seen.losses, seen.means


def end_of(folder: Path) -> int:
    """The step with which a disturbed run ends: named once its last fault is over."""
    with suppress(OSError, ValueError):
        return int((folder / "end").read_text())
    return sys.maxsize


def differences(ours: Any, theirs: Any) -> list[str]:
    """What differs between two runs' results."""
    found = []
    for rank, ((weights, states, *seen), (w, s, *other)) in enumerate(zip(ours, theirs, strict=True)):
        found += [f"rank {rank}: {name}" for name in weights if not torch.equal(weights[name], w[name])]
        for key, state in states["state"].items():
            mine = {name: torch.as_tensor(value) for name, value in state.items()}
            found += [f"{key}.{n}" for n in mine if not torch.equal(mine[n], torch.as_tensor(s["state"][key][n]))]
        found += [f"rank {rank}: {what}" for what, a, b in zip(("losses", "means"), seen, other, strict=True) if a != b]
    return found


# ---- from outside -----------------------------------------------------------------------------------------------


def _slabs_of(folder: Path) -> list[tuple[Path, SlabHeader]]:
    """The slabs of a run's living processes."""
    run = (folder / "run").read_text()
    slabs = [slab for directory in hosts_of(folder) for slab in list_slabs(directory)]
    found = [(slab.path, slab.header) for slab in slabs if slab.alive and slab.header is not None]
    return [(path, header) for path, header in found if header.facts.run == run]


def hosts_of(folder: Path) -> list[Path]:
    """The directories of a run's shared memory, one for each host that there seems to be."""
    with suppress(FileNotFoundError):
        return [SHARED_MEMORY, Path((folder / "host").read_text())]
    return [SHARED_MEMORY]


def _is_owner(header: SlabHeader) -> bool:
    return is_control(header.facts, header.facts.epoch)


def pids(folder: Path, who: tuple[str, int] | None) -> set[int]:
    """The processes that hold the slabs of a member, ("owner", 0) or ("rank", 1); None: of all."""
    headers = [header for _, header in _slabs_of(folder)]
    if who is None:
        return {header.pid for header in headers}
    kind, index = who
    ours = [header for header in headers if header.facts.index == index]
    return {header.pid for header in ours if (_is_owner(header) if kind == "owner" else header.facts.role == "grads")}


def owners_there(folder: Path) -> list[int]:
    """The owners that have processes, also those that join or part."""
    return sorted({header.facts.index for _, header in _slabs_of(folder) if _is_owner(header)})


def owners_of(folder: Path) -> int | None:
    """How many owners the present epoch has; None while its lead has no process."""
    newest: tuple[int, int] | None = None
    for path, header in _slabs_of(folder):
        if not _is_owner(header) or not header.regions_of("record"):
            continue
        try:
            slab = Slab.attach(path, writable=False, run=header.facts.run, layout_digest=header.facts.layout_digest)
        except HandshakeError:  # it has ended meanwhile
            continue
        if stands(slab):
            newest = max(newest or (-1, 0), (header.facts.epoch, read_ownership(slab).num_owners))
        slab.close()
    return None if newest is None else newest[1]


def steps_of(folder: Path) -> list[int]:
    """The finished steps of the ranks that have finished any."""
    return [_PLACE.unpack(path.read_bytes().ljust(8, b"\0"))[0] for path in sorted(folder.glob("at-*"))]


def step_of(folder: Path) -> int:
    """The steps that every rank has finished."""
    found = steps_of(folder)
    return min(found) if len(found) == RANKS else 0
