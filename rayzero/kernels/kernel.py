"""The kernel protocol: Adam over a table of segments of one shard, in one pass over memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import ConfigError, UnsupportedError
from rayzero.kernels.moments import CODED, CodedMoment, Moment
from rayzero.kernels.stamps import TileStamps
from rayzero.layout.model_layout import ALIGN
from rayzero.protocol.gradient_sum import Gradient

ADAMS = (torch.optim.Adam, torch.optim.AdamW)  # what kernels compute; a subclass may compute something else


def adam_states(*, amsgrad: bool) -> tuple[str, ...]:
    """The names of the states that Adam keeps for each element."""
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]


def check_moments(moments: str, optimizer: type[torch.optim.Optimizer], groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise UnsupportedError, saying what to use, unless an optimizer with these parameter groups can keep its moments
    so."""
    if moments not in CODED:
        return
    if optimizer not in ADAMS:
        name = optimizer.__qualname__
        raise UnsupportedError(f"moments={moments!r} is for Adam and AdamW, not for {name}; use moments='fp32'")
    if any(group.get("amsgrad") for group in groups):
        raise UnsupportedError(f"moments={moments!r} does not work with amsgrad=True; use moments='fp32'")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamOptions:
    """One parameter group's Adam or AdamW options. Raises ConfigError if one is out of range."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool = False
    maximize: bool = False
    decoupled: bool = True  # True: AdamW's decay of the weights; False: Adam's L2 term in the gradient

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta1 < 1.0 or not 0.0 <= self.beta2 < 1.0:
            raise ConfigError(f"betas must be in [0, 1), got ({self.beta1}, {self.beta2})")
        if self.eps < 0.0 or self.lr < 0.0 or self.weight_decay < 0.0:
            raise ConfigError(
                f"lr, eps and weight_decay must be >= 0, got lr={self.lr}, eps={self.eps}, "
                f"weight_decay={self.weight_decay}"
            )

    @classmethod
    def from_hyper(cls, hyper: dict[str, Any], *, decoupled: bool) -> AdamOptions:
        """Read a torch parameter group. ``decoupled``: the class's own choice, if the group does not say.

        ``foreach``, ``fused`` and ``capturable`` only choose among torch's implementations and are not read.
        Raises UnsupportedError for ``differentiable=True``."""
        if hyper.get("differentiable"):
            raise UnsupportedError(
                "differentiable=True of the optimizer is not supported: owners update outside of autograd; leave it out"
            )
        beta1, beta2 = hyper["betas"]
        return cls(
            lr=float(hyper["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(hyper["eps"]),
            weight_decay=float(hyper["weight_decay"]),
            amsgrad=bool(hyper.get("amsgrad", False)),
            maximize=bool(hyper.get("maximize", False)),
            decoupled=bool(hyper.get("decoupled_weight_decay", decoupled)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of a shard with the same options, ranks and step count. Its offset and length are multiples of ``ALIGN``,
    so that kernels need no tail."""

    offset: int  # elements from the shard's start
    length: int  # elements, padding included
    ranks: tuple[int, ...]  # ranks with gradients for it, ascending
    options: AdamOptions
    step: int  # updates including this one, from 1

    def __post_init__(self) -> None:
        assert self.offset % ALIGN == 0, self.offset
        assert self.length % ALIGN == 0, self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamMemory:
    """One shard's memory, all 1D with the shard's padded number of elements."""

    master: Tensor  # fp32; for the native kernel also int16: what masters are beyond params (split_master.py)
    states: Mapping[str, Moment]  # by their names in torch; with amsgrad also "max_exp_avg_sq"
    params: Tensor | None  # published parameters, in the unit's dtype; None: the master itself is published
    stamps: TileStamps | None = None  # set tile by tile; None: the memory does not outlive the process
    # 1D uint8, of a kernel that ``notes``: bit i % 8 of byte i // 8 says whether element i of params changes, where a
    # segment is; params are 16-bit, and what the master was rounded to
    changed: Tensor | None = None

    @property
    def is_coded(self) -> bool:
        """Whether the moments are codes."""
        return isinstance(self.states["exp_avg"], CodedMoment)


@dataclass(frozen=True, slots=True)
class AdamUpdate:
    """The arguments of ``Kernel.update``."""

    memory: AdamMemory
    gradients: Sequence[Gradient]
    segments: Sequence[Segment]
    scale: float
    limit: float


class Kernel(ABC):
    """Computes the update of a shard. An instance belongs to one thread and has its own scratch memory."""

    name: str
    notes = False  # whether it fills ``AdamMemory.changed``

    def update(
        self,
        memory: AdamMemory,
        gradients: Sequence[Gradient],
        segments: Sequence[Segment],
        scale: float,
        *,
        limit: float = math.inf,
    ) -> None:
        """Sum the ranks' gradients, multiply by ``scale``, clamp every element to within +-``limit``, run Adam, and
        write the published parameters.

        ``gradients``: by rank, 1D with the shard's elements, fp32, bf16 or fp16. Only the ranks and ranges that
        segments name are read, and nothing is written to them. Of scattered ones no segment has two parameters.
        """
        self.run(AdamUpdate(memory, gradients, segments, scale, limit))

    @abstractmethod
    def run(self, update: AdamUpdate) -> None:
        """See ``update``."""


def segments_of(
    parts: Iterable[tuple[int, int, tuple[int, ...], int, int]], options: Sequence[AdamOptions], *, apart: bool = False
) -> list[Segment]:
    """The segments of ``parts``, which are (offset, length, ranks, group, step) in ascending order. ``options``: those
    of each group. ``apart``: each part is a segment of its own.

    Neighbours that are updated alike become one segment, so that thousands of small parameters become a few segments.
    Parts without elements or ranks are left out."""
    runs: list[tuple[int, int, tuple[tuple[int, ...], int, int]]] = []  # start, end, what is alike
    for offset, length, ranks, group, step in parts:
        if not length or not ranks:
            continue
        alike = ranks, group, step
        if runs and not apart and runs[-1][1:] == (offset, alike):
            runs[-1] = runs[-1][0], offset + length, alike
        else:
            runs.append((offset, offset + length, alike))
    return [
        Segment(offset=start, length=end - start, ranks=ranks, options=options[group], step=step)
        for start, end, (ranks, group, step) in runs
    ]
