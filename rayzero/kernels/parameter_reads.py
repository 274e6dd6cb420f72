"""What an optimizer class reads of its parameters beside their values and gradients: attributes, and names. Owners have
neither, so a class would go on silently as if nobody had set them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rayzero.kernels.optimizer_class import OptimizerMaker, step_alone
from rayzero.modes import outside_modes
from rayzero.protocol.messages import Hyper

NAMES = "param_names"  # the entry of a group that torch makes of named parameters

_SHAPES = ((8, 8), (8,), (2, 2, 2, 2))


@outside_modes
def attributes_read(make: OptimizerMaker, hyper: Sequence[Hyper]) -> set[str]:
    """The names of attributes that ``step()`` asks Parameters for and these lack, found in two steps over small ones.
    What the class raises is for ``optimizer_trial`` to report."""
    params = _stepped(make, hyper)[0]
    return {name for param in params for name in param.asked if not name.startswith("__")}


@outside_modes
def reads_names(make: OptimizerMaker, hyper: Sequence[Hyper]) -> bool:
    """Whether ``step()`` looks for the names of parameters in its groups."""
    return any(NAMES in group.asked for group in _stepped(make, hyper)[1])


def _stepped(make: OptimizerMaker, hyper: Sequence[Hyper]) -> tuple[list[_Watched], list[_WatchedGroup]]:
    for shapes in (_SHAPES, _SHAPES[:1]):  # some classes take matrices only
        numbers = torch.Generator().manual_seed(2026)
        params = [
            _Watched(torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu")) for shape in shapes
        ]
        optimizer = make.build(hyper[:1], [params])
        groups = [_WatchedGroup(group) for group in optimizer.param_groups]
        optimizer.param_groups = groups  # type: ignore[assignment]
        try:
            for _ in range(2):  # the first makes states
                for param in params:
                    param.grad = torch.randn(param.shape, generator=numbers, dtype=torch.float32, device="cpu")
                step_alone(optimizer)
        except Exception:  # a foreign class may raise anything
            continue
        return params, groups
    return [], []


class _Watched(nn.Parameter):
    """Notes which attributes it is asked for that it does not have."""

    def __init__(self, data: torch.Tensor) -> None:
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.__dict__.setdefault("asked", set()).add(name)
        raise AttributeError(f"a Parameter has no attribute {name!r}")


class _WatchedGroup(dict[str, Any]):
    """Notes which entries it is asked for."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)
