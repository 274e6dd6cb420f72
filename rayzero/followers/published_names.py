"""The names, shapes and order of elements with which transformers publishes a model: those of an exported folder."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from torch import Tensor

from rayzero.convert.formats.content import WEIGHT, Content, Param, Reader, WeightDecl
from rayzero.convert.translated_reader import Named, published
from rayzero.followers.held_version import Declared, HeldVersion
from rayzero.layout.model_layout import ModelLayout, dtype_name


class _HeldReader(Reader):
    """A held version as a source of weights under the names of the model's parameters."""

    def __init__(self, layout: ModelLayout, config: Path) -> None:
        super().__init__(f"the run's weights, as {config} names them")
        self.held: HeldVersion | None = None
        self._slots = {slot.name: (unit.index, slot.start) for unit in layout.units for slot in unit.slots}
        self.content = Content(
            params={
                slot.name: Param(
                    decl=WeightDecl(slot.shape, dtype_name(unit.dtype)), trained=unit.trainable, opaque=unit.opaque
                )
                for unit in layout.units
                for slot in unit.slots
            }
        )

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        assert self.held is not None
        unit, first = self._slots[name]
        return self.held.elements(unit, first + start, first + stop)


class PublishedNames:
    """A ``Names``. Several threads may read versions at once."""

    def __init__(self, reader: _HeldReader, named: Named) -> None:
        self._reader, self._named = reader, named
        self._lock = threading.Lock()  # the translation reads from one held version at a time

    @cached_property
    def declared(self) -> Declared:
        content = self._named.reader.content
        return {name: (decl.torch_dtype(name), decl.shape) for name, decl in content.decls.items()}

    def tensors(self, held: HeldVersion) -> Iterator[tuple[str, Tensor]]:
        for name, (_, shape) in self.declared.items():
            with self._lock:
                self._reader.held = held
                values = self._named.reader.read(name, WEIGHT, 0, math.prod(shape))
            yield name, values.view(shape)


def published_names(layout: ModelLayout, config: Path) -> tuple[PublishedNames | None, str]:
    """The published names; None, and why, if ``config`` is of no model of transformers with these parameters, or
    transformers is not installed. Raises CheckpointError or UnsupportedError as ``published``."""
    reader = _HeldReader(layout, config)
    named = published(reader, config)
    return PublishedNames(reader, named) if named.settings is not None else None, named.says
