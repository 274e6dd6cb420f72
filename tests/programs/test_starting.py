"""Starting: what a rank has of the model before training, and where the rest comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from engine.models import Block, Net
from torch import Tensor, nn

import rayzero

from .case import Case
from .engines import Setting


class Scaled(Net):
    """Net with a buffer that is in no file (as rotary tables), and one that is in files."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, 64), persistent=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.table.mean() * self.scale


def empty(build: Callable[[], nn.Module]) -> nn.Module:
    with rayzero.empty_parameters():
        return build()


def from_tensors(model: nn.Module, rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return empty(type(model)), {"weights": model.state_dict()}


def from_a_stream(model: nn.Module, rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return empty(type(model)), {"weights": iter(model.state_dict().items())}


def from_16_bit(model: nn.Module, rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return empty(type(model)), {"weights": {name: value.bfloat16() for name, value in model.state_dict().items()}}


def on_rank_0(model: nn.Module, rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return empty(type(model)) if rank else model, {}


def on_meta(model: nn.Module, rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return empty(type(model)), {}


def by_init(model: nn.Module, rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return empty(type(model)), {"init": ramps}


def half_by_init(model: nn.Module, rank: int) -> tuple[nn.Module, dict[str, Any]]:
    lower = {name: value for name, value in model.state_dict().items() if not name.startswith("layers.2")}
    return empty(type(model)), {"weights": rayzero.Weights(lower, strict=False), "init": ramps}


@torch.no_grad()
def ramps(module: nn.Module) -> None:
    """Draws nothing: ranks that are threads share torch's generator. A block's own visit scales what is further in."""
    for param in module.parameters(recurse=False):
        param.copy_(torch.linspace(-0.1, 0.1, param.numel()).view(param.shape))
    if isinstance(module, Block):
        module.down.weight.mul_(0.5)


def ramped() -> nn.Module:
    return Net().apply(ramps)


def rounded() -> nn.Module:
    """Values that 16 bits hold."""
    return Net().bfloat16().float()


CASES = [
    Case("parameters on meta, weights from named tensors", build=Scaled, start=from_tensors),
    Case("parameters on meta, weights as they come", build=Scaled, start=from_a_stream),
    Case("parameters on meta, 16-bit weights", build=rounded, start=from_16_bit),
    Case("parameters on meta, init of each module", build=ramped, start=by_init),
    Case("parameters on meta, some weights, the rest by init", build=ramped, start=half_by_init),
    Case("built on rank 0 only", build=Scaled, start=on_rank_0),
    Case("parameters on meta, nothing gives values", start=on_meta, refused="'embed.weight' is on the meta device"),
]


def test_trains_as_unsharded(case: Case, setting: Setting, check: Callable[[Case, Setting], None]) -> None:
    check(case, setting)
