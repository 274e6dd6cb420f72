"""What classes keep by a parameter's shape: factors, preconditioners, lists of them, numbers in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from store.toy import Grads, PlainAdamW, equal, make_spec

from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.protocol.messages import ModelSpec

from .test_class_rule import Muons, NormScaled, hyper_of, some_missing, trained


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


pytestmark = pytest.mark.usefixtures("one_thread")


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
@pytest.mark.parametrize("cls", [NormScaled, Muons, torch.optim.Adafactor, Preconditioned])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world_size", "num_owners"), [(1, 1), (2, 3), (3, 2)])
def test_a_class_that_needs_whole_parameters_has_its_own_bits(
    cls: type[torch.optim.Optimizer], world_size: int, num_owners: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Of one process without owners, also where another number of owners goes on from a checkpoint in the middle, and
    whatever else than a parameter's shape its states have."""
    spec = spec_of(cls, world_size, dtype)
    plain, schedule = PlainAdamW(spec, cls), some_missing(spec)
    for grads in schedule:
        plain.step([averaged(grads)])
    for found in trained(spec, schedule, num_owners, tmp_path / "step-000003"):
        assert equal(found, plain.values)
