"""What an optimizer class reads of its parameters beside their values and gradients: attributes, and names. The parts
of Parameters that owners and buckets have lack both, so a class would go on silently as if nobody had set them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from rayzero.errors import UnsupportedError
from rayzero.kernels.torch_classes.optimizer_class import OptimizerMaker, step_alone
from rayzero.modes import outside_modes
from rayzero.protocol.messages import Hyper

_INSTEAD = "give those Parameters a group with an entry that says the same"
_NAMES = "param_names"  # the entry of a group that torch makes of named parameters
_SHAPES = ((8, 8), (8,), (2, 2, 2, 2))


@outside_modes
def refuse_reads(make: OptimizerMaker, groups: Sequence[Mapping[str, Any]], options: Hyper) -> None:
    """Raise UnsupportedError that names what the class reads of the Parameters or their groups and parts of them do not
    have.

    ``groups``: the user's, with their Parameters. ``options``: of one group. Found in two steps over small Parameters;
    what the class raises in these is for ``optimizer_trial`` to report. Classes of torch read nothing."""
    held = {name for group in groups for param in group["params"] for name in vars(param)}
    named = any(_NAMES in group for group in groups)
    if make.is_torchs or not (held or named):
        return
    params, watched = _stepped(make, options)
    if read := sorted(held & {name for param in params for name in param.asked}):
        raise UnsupportedError(
            f"{make.name} cannot be offloaded: it reads {', '.join(map(repr, read))} of the Parameters, which the "
            f"parts of them that it would update do not have; {_INSTEAD}"
        )
    if named and any(_NAMES in group.asked for group in watched):
        raise UnsupportedError(
            f"{make.name} cannot be offloaded: it reads {_NAMES!r} of its groups, but would update parts of "
            f"parameters, which have no names; {_INSTEAD}"
        )


def _stepped(make: OptimizerMaker, options: Hyper) -> tuple[list[_Watched], list[_WatchedGroup]]:
    for shapes in (_SHAPES, _SHAPES[:1]):  # some classes take matrices only
        numbers = torch.Generator().manual_seed(2026)
        params = [_Watched(_drawn(shape, numbers)) for shape in shapes]
        optimizer = make.build([options], [params])
        groups = [_WatchedGroup(group) for group in optimizer.param_groups]
        optimizer.param_groups = groups  # type: ignore[assignment]
        try:
            for _ in range(2):  # the first makes states
                for param in params:
                    param.grad = _drawn(param.shape, numbers)
                step_alone(optimizer)
        except Exception:  # a foreign class may raise anything
            continue
        return params, groups
    return [], []


def _drawn(shape: Sequence[int], numbers: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=numbers, dtype=torch.float32, device="cpu")


class _Watched(Parameter):
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
