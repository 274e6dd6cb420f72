"""What a rank's process has beside parameters and tracked objects: random number generators, and names."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import nn


def names_of(model: nn.Module) -> dict[int, str]:
    """id of each Parameter -> its first name."""
    return {id(param): name for name, param in model.named_parameters()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters -> their name in the layout."""
    first = names_of(model)
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if name != first[id(p)]}


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of the generators of Python, numpy and torch, on the CPU and on ``device``."""
    kind, keys, *rest = numpy.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (kind, torch.from_numpy(numpy.asarray(keys).view(numpy.uint8).copy()), *rest),
        "python": (version, torch.from_numpy(numpy.array(words, dtype=numpy.uint32).view(numpy.uint8)), gauss),
    }


def set_generator_states(state: Mapping[str, Any], device: torch.device) -> None:
    """Put back what ``generator_states`` returned."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().view(numpy.uint32), *rest))
    version, words, gauss = state["python"]
    if isinstance(words, torch.Tensor):  # checkpoints of older versions have a tuple of numbers
        words = tuple(words.numpy().view(numpy.uint32).tolist())
    random.setstate((version, words, gauss))
