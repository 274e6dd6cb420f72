"""What classes keep by a parameter's shape: factors, preconditioners, lists of them, numbers in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from store.stores import inprocess
from store.toy import WAIT, Grads, PlainAdamW, equal, make_spec, masters, random_grads, start, take_step

from rayzero.checkpoint.writer import staging_path, write_rank_state
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.protocol.messages import ModelSpec

from .test_class_rule import hyper_of


class Preconditioned(torch.optim.Optimizer):
    """Keeps a list of a matrix for each axis, larger than a vector itself, bases of them column by column, and a
    product in fp64."""

    def __init__(self, params: Any, lr: float = 0.02, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                state = self.state[p]
                if not state:
                    state["axes"] = [torch.zeros(size, size) if size < 200 else None for size in p.shape]
                    state["bases"], state["bias"] = None, 1.0
                state["bias"] *= group["beta"]
                step = p.grad / (1 - state["bias"])
                for axis, kept in enumerate(state["axes"]):
                    if kept is not None:
                        flat = p.grad.movedim(axis, 0).reshape(p.shape[axis], -1)
                        kept.lerp_(flat @ flat.T, 1 - group["beta"])
                state["bases"] = [
                    None if a is None else torch.linalg.qr(a + torch.eye(len(a)))[0].T for a in state["axes"]
                ]
                for axis, basis in enumerate(state["bases"]):
                    if basis is not None:
                        step = (
                            (basis @ step.movedim(axis, 0).reshape(p.shape[axis], -1))
                            .view(step.movedim(axis, 0).shape)
                            .movedim(0, axis)
                        )
                p.sub_(step, alpha=group["lr"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products of matrices have other bits with other numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


UNITS = (
    ("emb", [("emb.weight", (40, 24))]),
    ("layers.0", [("layers.0.w", (64, 48)), ("layers.0.b", (48,)), ("layers.0.s", ())]),
    ("layers.1", [("layers.1.w", (130, 5)), ("layers.1.conv", (6, 4, 3, 3)), ("layers.1.b", (5,))]),
)


def spec_of(cls: type[torch.optim.Optimizer], world_size: int = 1, dtype: torch.dtype = torch.float32) -> ModelSpec:
    """Whole parameters, in two groups, in shards of several; classes fail at empty ones by themselves."""
    hyper = hyper_of(cls, lr=0.02)
    units = tuple(lay_out_unit(index, name, dtype, True, params) for index, (name, params) in enumerate(UNITS))
    return replace(
        make_spec(world_size),
        optimizer=f"{cls.__module__}:{cls.__qualname__}",
        hyper=(hyper, hyper | {"lr": 0.01}),
        layout=ModelLayout(units=units, shard_numel=512, whole_parameters=True),
        group_of=tuple(tuple(at % 2 for at in range(len(unit.slots))) for unit in units),
    )


def averaged(grads: Sequence[Grads]) -> Grads:
    """As owners average: in rank order, times a number."""
    return {
        name: sum((each[name] for each in grads[1:]), first.clone()) * (1 / len(grads))
        for name, first in grads[0].items()
    }


@pytest.mark.promise("exact", "optimizers")
@pytest.mark.parametrize("cls", [torch.optim.Adafactor, Preconditioned])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world_size", "num_owners"), [(1, 1), (2, 3), (3, 2)])
def test_a_class_that_keeps_other_shapes_has_its_own_bits(
    cls: type[torch.optim.Optimizer], world_size: int, num_owners: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also where another number of owners goes on from a checkpoint in the middle."""
    spec, directory = spec_of(cls, world_size, dtype), tmp_path / "step-000003"
    schedule = [[random_grads(spec, 10 * step + rank) for rank in range(world_size)] for step in range(6)]
    for step in (0, 2):
        for grads in schedule[step]:
            del grads["layers.0.b"]  # its state and step count stand still
    plain = PlainAdamW(spec, cls)
    for grads in schedule:
        plain.step([averaged(grads)])
    with inprocess(world_size, num_owners) as stores:
        ranks = start(stores, spec)
        for grads in schedule[:3]:
            take_step(ranks, grads)
        files = [write_rank_state(staging_path(directory), rank, {}, {}) for rank in range(world_size)]
        saves = [rank.store.save(3, directory, (file,)) for rank, file in zip(ranks, files, strict=True)]
        assert [save.result(WAIT).step for save in saves] == [3] * world_size
        for grads in schedule[3:]:
            take_step(ranks, grads)
        assert equal(masters(ranks[0]), plain.values)
    with inprocess(world_size, num_owners % 3 + 1) as stores:
        ranks = start(stores, replace(spec, restore_from=str(directory)))
        for grads in schedule[3:]:
            take_step(ranks, grads)
        assert equal(masters(ranks[0]), plain.values)
