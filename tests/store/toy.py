"""A small model as the store sees it, and one rank driving a store by hand: what schedules are written with."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rayzero.layout.model_layout import ModelLayout, UnitLayout, lay_out_unit
from rayzero.protocol.messages import (
    COMPUTE,
    MASTER,
    Contribution,
    Decision,
    Edit,
    EditKind,
    FinishReport,
    Hyper,
    ModelSpec,
    Norm,
    StepInputs,
    pack_presence,
)
from rayzero.protocol.store import ParameterStore

RUN = os.environ.setdefault("RAYZERO_TEST_RUN", f"toy {secrets.token_hex(4)}")  # tests of other rows run beside
WAIT = 45.0  # seconds after which a test is broken, however busy the machine is; nothing here takes one

ADAMW = "torch.optim.adamw:AdamW"


def clips(max_norms: Sequence[float]) -> tuple[Edit, ...]:
    """Clipping by norm, once for each."""
    return tuple(Edit(EditKind.CLIP_NORM, max_norm) for max_norm in max_norms)


HYPER: Hyper = {
    "lr": 1e-2,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "amsgrad": False,
    "maximize": False,
}

UNITS = (  # name, parameters: sizes that are no multiple of 64, empty, 0-dim, several shards, several slots a shard
    ("emb", [("emb.weight", (40, 24))]),
    ("layers.0", [("layers.0.w", (64, 48)), ("layers.0.b", (48,)), ("layers.0.none", (0, 3)), ("layers.0.s", ())]),
    ("layers.1", [("layers.1.w", (130, 5)), ("layers.1.b", (5,))]),
)

Grads = Mapping[str, Tensor]  # of the parameters that have one


def make_spec(
    world_size: int = 2,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,) * 3,
    frozen: Sequence[int] = (),
    shard_numel: int = 512,
    hyper: Sequence[Hyper] = (HYPER,),
    **fields: Any,
) -> ModelSpec:
    """A spec over ``UNITS``; parameter i of all is in group i modulo the number of groups."""
    units = tuple(
        lay_out_unit(index, name, dtypes[index], index not in frozen, [(n, s) for n, s in params])
        for index, (name, params) in enumerate(UNITS)
    )
    names = [slot.name for unit in units for slot in unit.slots]
    group_of = tuple(tuple(names.index(slot.name) % len(hyper) for slot in unit.slots) for unit in units)
    spec = ModelSpec(
        run=RUN,
        layout=ModelLayout(units=units, shard_numel=shard_numel),
        world_size=world_size,
        optimizer=ADAMW,
        hyper=tuple(hyper),
        group_of=group_of,
    )
    return replace(spec, **fields)


def make_large_spec(world_size: int = 1) -> ModelSpec:
    """A spec with another unit, whose shard is three chunks long (``CHUNK_BYTES``)."""
    spec = make_spec(world_size, shard_numel=1 << 20)
    large = lay_out_unit(len(spec.layout.units), "large", torch.float32, True, [("large.w", (700_001,))])
    layout = replace(spec.layout, units=(*spec.layout.units, large))
    return replace(spec, layout=layout, group_of=(*spec.group_of, (0,)))


def initial_values(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Random parameters by name, exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return {
        slot.name: torch.randn(slot.shape, generator=generator).bfloat16().float()
        for unit in spec.layout.units
        for slot in unit.slots
    }


def random_grads(spec: ModelSpec, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    """A gradient for every trained parameter, fp32, exact in the unit's dtype."""
    generator = torch.Generator().manual_seed(seed)
    return {
        slot.name: (torch.randn(slot.shape, generator=generator) * scale).to(unit.dtype).float()
        for unit in spec.layout.units
        if unit.trainable
        for slot in unit.slots
    }


def flatten(unit: UnitLayout, values: Grads, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """One unit's flat vector; ``fill`` where there is no value, padding included."""
    flat = torch.full((unit.numel,), fill, dtype=dtype)
    for slot in unit.slots:
        if slot.name in values:
            flat[slot.start : slot.stop] = values[slot.name].reshape(-1).to(dtype)
    return flat


def unflatten(unit: UnitLayout, flat: Tensor) -> dict[str, Tensor]:
    """The parameters in a flat vector, copied."""
    return {slot.name: flat[slot.start : slot.stop].view(slot.shape).clone() for slot in unit.slots}


@dataclass
class Rank:
    """One rank of a toy training: its store and the verbs of a step, each over all units or named ones."""

    rank: int
    store: ParameterStore
    spec: ModelSpec
    step: int = 0
    attempt: int = 0
    counts: dict[int, int] = field(default_factory=dict)

    def fetch_unit(self, unit: int, version: int | None = None, kind: str = COMPUTE) -> tuple[Future[None], Tensor]:
        """Ask for one unit; the buffer is full when the future is done."""
        layout = self.spec.layout.units[unit]
        out = torch.full((layout.numel,), torch.nan, dtype=layout.dtype if kind == COMPUTE else torch.float32)
        return self.store.fetch(unit, self.step if version is None else version, kind, out), out

    def fetch(self, version: int | None = None, kind: str = COMPUTE) -> dict[str, Tensor]:
        """All parameters by name, at this rank's step or a given version."""
        asked = [(unit, *self.fetch_unit(unit.index, version, kind)) for unit in self.spec.layout.units]
        found: dict[str, Tensor] = {}
        for unit, future, out in asked:
            future.result(WAIT)
            found |= unflatten(unit, out)
        return found

    def push_unit(self, unit: int, grads: Grads, **header: Any) -> Future[None]:
        """Push one unit with the gradients it has, gathered where the store wants them. Absent ones' bytes are NaN, and
        so is the padding but in the store's own memory."""
        layout = self.spec.layout.units[unit]
        present = [slot.name in grads for slot in layout.slots]
        push = Contribution(
            step=self.step,
            attempt=self.attempt,
            rank=self.rank,
            unit=unit,
            seq=self.counts.get(unit, 0),
            presence=pack_presence(present),
        )
        if not header:
            self.counts[unit] = self.counts.get(unit, 0) + 1
        push, flat = replace(push, **header), flatten(layout, grads, layout.dtype, torch.nan)
        landing = self.store.landing(push)
        if landing is None:
            return self.store.push(push, flat)
        for slot, gap in zip(layout.slots, layout.gaps, strict=True):
            landing[slot.start : slot.stop] = flat[slot.start : slot.stop]
            landing[slot.stop : slot.stop + gap] = 0
        return self.store.push(push, landing)

    def push(self, grads: Grads, units: Sequence[int] | None = None) -> None:
        """Push trained units, last first as a backward does, and wait until each has landed."""
        trained = [unit.index for unit in self.spec.layout.units if unit.trainable]
        for unit in reversed(trained if units is None else units):
            self.push_unit(unit, grads).result(WAIT)

    def report(self) -> FinishReport:
        """What this rank pushed."""
        counts = tuple(self.counts.get(unit.index, 0) for unit in self.spec.layout.units)
        return FinishReport(step=self.step, attempt=self.attempt, rank=self.rank, counts=counts)

    def finish(self, *max_norms: float, hyper: Sequence[Hyper] | None = None) -> Future[Norm]:
        """Finish and commit in one message, and go on to the next step."""
        inputs = StepInputs(edits=clips(max_norms), hyper=tuple(hyper or self.spec.hyper))
        future = self.store.finish(self.report(), inputs)
        self.next_step()
        return future

    def ask_norm(self) -> Future[Norm]:
        """Finish without inputs: the step stays open."""
        return self.store.finish(self.report(), None)

    def commit(self, *max_norms: float) -> Future[Decision]:
        """Commit after ``ask_norm``, and go on to the next step."""
        step = self.step
        self.next_step()
        return self.store.commit(step, StepInputs(edits=clips(max_norms), hyper=self.spec.hyper))

    def discard(self) -> Future[None]:
        """zero_grad() after ``ask_norm``."""
        future = self.store.discard(self.step, self.attempt)
        self.zero_grad()
        return future

    def zero_grad(self) -> None:
        """zero_grad() with something pushed: nothing is sent, the next message carries the attempt."""
        self.attempt += 1
        self.counts = {}

    def next_step(self) -> None:
        """Forget this step."""
        self.step, self.attempt, self.counts = self.step + 1, 0, {}


def start(stores: Sequence[ParameterStore], spec: ModelSpec, seed: int = 0) -> list[Rank]:
    """Attach every rank and load initial values from rank 0."""
    attached = [store.attach(spec) for store in stores]
    if attached[0].needs_load:
        values = initial_values(spec, seed)
        for unit in spec.layout.units:
            dtype = torch.float32 if unit.trainable else unit.dtype
            stores[0].load(unit.index, flatten(unit, values, dtype, torch.nan)).result(WAIT)
    return [Rank(rank, store, spec, step=attached[rank].version) for rank, store in enumerate(stores)]


@contextmanager
def started(stores: AbstractContextManager[Sequence[ParameterStore]], spec: ModelSpec) -> Iterator[list[Rank]]:
    """The ranks of these stores, attached, with initial values."""
    with stores as made:
        yield start(made, spec)


def push_all(ranks: Sequence[Rank], grads: Sequence[Grads]) -> None:
    """Push every trained unit of every rank."""
    for rank, mine in zip(ranks, grads, strict=True):
        rank.push(mine)


def ask_norms(ranks: Sequence[Rank]) -> list[Norm]:
    """Finish without inputs: the step stays open."""
    return [asked.result(WAIT) for asked in [rank.ask_norm() for rank in ranks]]


def take_step(ranks: Sequence[Rank], grads: Sequence[Grads], *max_norms: float) -> Norm:
    """One whole step of all ranks: fetch, push, finish. Each rank pushes the units it has any gradient of."""
    for rank, mine in zip(ranks, grads, strict=True):
        rank.fetch()
        units = [u.index for u in rank.spec.layout.units if any(slot.name in mine for slot in u.slots)]
        rank.push(mine, units)
    norms = [rank.finish(*max_norms) for rank in ranks]
    return [norm.result(WAIT) for norm in norms].pop()


def masters(rank: Rank, version: int | None = None) -> dict[str, Tensor]:
    """fp32 masters of all trained parameters."""
    trained = [unit for unit in rank.spec.layout.units if unit.trainable]
    found: dict[str, Tensor] = {}
    for unit in trained:
        future, out = rank.fetch_unit(unit.index, version, MASTER)
        future.result(WAIT)
        found |= unflatten(unit, out)
    return found


def equal(ours: Grads, theirs: Grads) -> bool:
    """The same names and the same bits."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


class PlainAdamW:
    """The same training without a store: torch's own AdamW on whole parameters."""

    def __init__(self, spec: ModelSpec, cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        values = initial_values(spec)
        trained = [slot.name for unit in spec.layout.units if unit.trainable for slot in unit.slots]
        self.params = {name: torch.nn.Parameter(values[name]) for name in trained}
        groups: list[dict[str, Any]] = [dict(hyper) | {"params": []} for hyper in spec.hyper]
        for unit in spec.layout.units:
            for index, slot in enumerate(unit.slots):
                if slot.name in self.params:
                    groups[spec.group_of[unit.index][index]]["params"].append(self.params[slot.name])
        self.optimizer = cls([group for group in groups if group["params"]], **options)

    def step(self, grads: Sequence[Grads], *max_norms: float) -> None:
        """Average over ranks, clip, update; a parameter without any gradient is skipped."""
        for name, param in self.params.items():
            mine = [g[name] for g in grads if name in g]
            param.grad = sum(mine[1:], mine[0].clone()) / len(grads) if mine else None
        for max_norm in max_norms:
            torch.nn.utils.clip_grad_norm_(self.params.values(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def values(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return {name: param.detach().clone() for name, param in self.params.items()}
