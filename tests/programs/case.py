"""Training programs, each written once against plain torch, and what they are compared by.

How to add a case:

1. Write the model (if ``Net`` of tests/engine/models.py does not do) and the program in the file of its category,
   ``test_<category>.py``. A program is a whole training loop of plain torch verbs on a :class:`Run`; what it returns
   (tensors, numbers, text, nested) is compared too. ``steps(body)`` makes a loop of a body that leaves gradients.
2. Add ``Case("what a user would call it", program, build=Model)`` to ``CASES`` of that file. A case that cannot be
   right says ``refused="regular expression of the message"``.
3. ``pytest tests/programs/test_<category>.py -k "part of its name"``: runs it for 1, 2 and 3 ranks, in fp32 and bf16,
   over one store or another, beside unsharded replicas whose gradients are averaged at each ``optimizer.step()``.
4. ``pytest tests/programs/test_<category>.py --record`` and again with ``--engine fsdp2 --record``: its row in
   README.md. (README.md alone is written anew by ``pytest tests/programs/test_table.py --record``.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from engine.models import Net, token_loss, tokens
from torch import Tensor, nn
from torch.optim import Optimizer

from rayzero.engine.units.partition import UnitRule


@dataclass(kw_only=True)
class Run:
    """One rank of a training program: the same verbs unsharded, under RayZero and under FSDP2."""

    engine: str  # "torch" (unsharded), "rayzero" or "fsdp2"
    rank: int
    world_size: int
    model: nn.Module
    optimizer: Optimizer
    clip: Callable[[float], Tensor]  # clip the averaged gradients by their global norm, which is returned
    clip_value: Callable[[float], None]  # clip the elements of the averaged gradients
    full_parameters: Callable[..., AbstractContextManager[None]]  # (modify=False)
    full_state: Callable[[], dict[str, Tensor]]  # the complete state_dict
    others: tuple[Run, ...] = ()  # of the case's further models, on the same rank

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's inputs and targets (4, 8) of a step."""
        return tokens(step, self.rank)

    def update(self) -> None:
        """``optimizer.step()`` and ``zero_grad()``."""
        self.optimizer.step()
        self.optimizer.zero_grad()


Program = Callable[[Run], Any]


def steps(body: Callable[[Run, int], Any], count: int = 2) -> Program:
    """A loop of ``count`` steps, each a body (run, step) that leaves gradients, and an update."""

    def program(run: Run) -> Any:
        seen = []
        for step in range(count):
            seen.append(body(run, step))
            run.update()
        return seen

    return program


@steps
def train(run: Run, step: int) -> Tensor:
    """Forward, backward, update: the plain loop. Gives the losses."""
    loss = token_loss(run.model, run.batch(step))
    loss.backward()
    return loss.detach()


Start = Callable[[nn.Module, int], tuple[nn.Module, dict[str, Any]]]


def whole(model: nn.Module, rank: int) -> tuple[nn.Module, dict[str, Any]]:
    """Every rank has built the whole model."""
    return model, {}


def sgd(model: nn.Module) -> Optimizer:
    """SGD with momentum over all parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One program, and where it runs. Build and program run seeded; ranks get copies of the same model."""

    name: str = field(kw_only=False)
    program: Program = field(default=train, kw_only=False)
    build: Callable[[], nn.Module] = Net
    others: tuple[Callable[[], nn.Module], ...] = ()  # further models, each prepared with an optimizer of its own
    start: Start = whole  # (the model, rank) -> what the rank has of it, and weights= or init= that bring the rest
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    backwards: int = 1  # backward passes per step at most: bf16 needs to know (gradient_accumulation_steps)
    draws: bool = False  # draws from torch's global generator, which threads share: several ranks are processes
    units: UnitRule = "auto"
    spare: int = 0  # units beside the root, the one in use and the next one that the budget has room for
    settings: Mapping[str, Any] = field(default_factory=dict)  # further settings of ZeroConfig
    tolerance: float = 0.0  # relative difference allowed in fp32 and bf16; 0.0: the same bits
    precisions: tuple[str, ...] = ("fp32", "bf16")
    ranks: tuple[int, ...] = (1, 2, 3)
    once: bool = False  # slow: only on one rank in fp32, in process
    thorough: bool = False  # slower still: in the second tier alone
    refused: str | None = None  # a regular expression of the message


# ---- comparing --------------------------------------------------------------------------------------------------


def difference(value: Any, expected: Any, path: str = "") -> tuple[float, str]:
    """The largest relative difference of two nested values, and where it is; infinite where they do not match."""
    if isinstance(expected, Tensor) and isinstance(value, Tensor):
        return _tensor_difference(value.detach(), expected.detach()), path
    if isinstance(expected, Mapping):
        if not isinstance(value, Mapping) or list(value) != list(expected):
            return float("inf"), f"{path}: other keys, {list(value)} instead of {list(expected)}"
        return _worst(difference(value[key], expected[key], f"{path}.{key}".strip(".")) for key in expected)
    if isinstance(expected, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            return float("inf"), f"{path}: {value!r:.100} instead of {expected!r:.100}"
        pairs = enumerate(zip(value, expected, strict=True))
        return _worst(difference(one, other, f"{path}[{i}]") for i, (one, other) in pairs)
    if isinstance(expected, float) and isinstance(value, float):
        return _tensor_difference(torch.tensor(value).double(), torch.tensor(expected).double()), path
    return (0.0, path) if value == expected else (float("inf"), f"{path}: {value!r:.100} instead of {expected!r:.100}")


def _tensor_difference(value: Tensor, expected: Tensor) -> float:
    if value.shape != expected.shape:
        return float("inf")
    if torch.equal(value, expected.to(value.dtype)) or not expected.numel():
        return 0.0
    scale = expected.double().abs().max().clamp_min(1e-30)
    gap = float((value.double() - expected.double()).abs().max() / scale)
    return gap if gap == gap else float("inf")


def _worst(found: Any) -> tuple[float, str]:
    return max(found, key=lambda one: one[0], default=(0.0, ""))
