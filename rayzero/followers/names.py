"""The tensors of a held version by name: those of the model's parameters, or those that transformers publishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from rayzero.followers.held_version import HeldVersion
from rayzero.layout.model_layout import ModelLayout

Declared = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Names(Protocol):
    """How a version's tensors are called."""

    @property
    def declared(self) -> Declared:
        """Dtype and shape by name, in the order of ``tensors``."""
        ...

    def tensors(self, held: HeldVersion) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, a view of ``held`` where that is possible."""
        ...


class OwnNames:
    """The names of the model's parameters, tied ones once, in forward order."""

    def __init__(self, layout: ModelLayout) -> None:
        self._slots = [(unit, slot) for unit in layout.units for slot in unit.slots]

    @cached_property
    def declared(self) -> Declared:
        return {slot.name: (unit.dtype, slot.shape) for unit, slot in self._slots}

    def tensors(self, held: HeldVersion) -> Iterator[tuple[str, Tensor]]:
        for unit, slot in self._slots:
            yield slot.name, held.elements(unit.index, slot.start, slot.stop).view(slot.shape)
