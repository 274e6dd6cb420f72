"""timm's architectures: the smallest model of each of its modules, on random pictures.

timm imports torchvision, whose wheels are built for another torch. Of it the models need nothing that is compiled, so
its Python part is enough: `pip install --no-deps --target FOLDER torchvision`, and `TORCHVISION=FOLDER`. In a virtual
environment other libraries would find it, and use what it lacks."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .beside import project, trained_beside_plain
from .trial import NOT_TRIED, Case, Outcome

sys.path.append(os.environ.get("TORCHVISION", ""))
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):  # the two that its Python part looks for at its import
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm  # noqa: E402

TITLE = "timm's architectures"
INTRO = """
A small model of each of timm's modules, with fewer layers where its constructor allows that, trains three steps on
random pictures: with plain PyTorch (SGD with momentum, fp32), and with RayZero in the same process and with the
smallest budget that it takes, so that units come and go. *same*: weights, batch statistics and losses are equal bit for
bit. *not tried*: the model does not train here with plain PyTorch either, or is too large.
"""
PACKAGES = ["timm", "torch"]

_FEWER: tuple[dict[str, Any], ...] = (
    {"depth": 2, "embed_dim": 64, "num_heads": 4},
    {"depths": (1, 1, 1, 1), "embed_dim": 32, "num_heads": (1, 2, 2, 4)},
    {"depths": (1, 1, 1, 1), "dims": (16, 32, 48, 64)},
    {"depth": 2},
    {"num_blocks": 2},
    {"depths": (1, 1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
    {},
)
_SIZES = (64, 96, 128, 160, 224, 256)  # of pictures
_MOST = 30_000_000  # parameters of a model that is looked at
_CLASSES = 8
_SMALL = ("test", "atto", "femto", "pico", "nano", "tiny", "xxs", "_s", "small", "18", "050", "0")  # in names
_LOOKED_AT = 10  # models of a module


def cases() -> Iterator[Case]:
    """A case for each module."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for module in timm.list_modules():
        if names := timm.list_models(module=module):
            yield Case(module, partial(_case, names))


def _case(names: list[str]) -> Outcome:
    try:
        name, options, size = _smallest(names)
    except Exception as exc:  # the edge to a foreign library: what it raises without RayZero
        return Outcome(NOT_TRIED, f"{type(exc).__name__}: {exc}")

    def loss(model: nn.Module, step: int) -> Tensor:
        return project(model(_pictures(model, size, step)), step)

    outcome = trained_beside_plain(partial(timm.create_model, name, **options), loss, _momentum)
    return Outcome(outcome.kind, f"{name}: {outcome.why}")


def _smallest(names: list[str]) -> tuple[str, dict[str, Any], int]:
    """(model, options of its constructor, size of pictures) with the fewest parameters. Raises the last error."""
    found: list[tuple[int, str, dict[str, Any]]] = []
    error: Exception = ValueError(f"each has more than {_MOST:,} parameters")
    for name in sorted(names, key=lambda name: not any(word in name for word in _SMALL))[:_LOOKED_AT]:
        for options in _FEWER:
            try:
                with torch.device("meta"):
                    model = timm.create_model(name, num_classes=_CLASSES, **options)
            except Exception as exc:  # this constructor takes other options
                error = exc
                continue
            found.append((sum(param.numel() for param in model.parameters()), name, options))
            break
    for numel, name, options in sorted(found, key=lambda one: one[:2]):
        if numel > _MOST:
            break
        for size in _SIZES:
            for sized in ({"img_size": size}, {}):
                whole = {"num_classes": _CLASSES, **options, **sized}
                try:
                    model = timm.create_model(name, **whole)
                    model.train()(_pictures(model, size, 0))
                except Exception as exc:  # of this size
                    error = exc
                    continue
                return name, whole, size
    raise error


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Not AdamW: its bits are those of torch but for a tensor's last elements, and batch norms multiply such noise."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _pictures(model: nn.Module, size: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    channels = model.default_cfg["input_size"][0] if hasattr(model, "default_cfg") else 3
    return torch.randn((2, channels, size, size), generator=generator)
