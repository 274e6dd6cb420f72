"""A model's parameters by name, and statistics of their sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from rayzero.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameterStats:
    """Sizes are elements; all zero for a model without parameters."""

    total_parameters: int = 0  # names
    total_elements: int = 0
    mean_parameter_size: float = 0.0
    median_parameter_size: float = 0.0  # the mean of the middle two if the count is even
    min_parameter_size: int = 0
    max_parameter_size: int = 0
    total_memory_bytes: int = 0


class ModelParameters:
    """An inventory: every parameter's name, shape and element size in bytes, in the order they were added.

    Knows numbers only; not tensors, units or owners. A name is added once; a second time is a ConfigError."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._element_bytes: dict[str, int] = {}

    @classmethod
    def from_module(cls, model: nn.Module) -> ModelParameters:
        """All parameters of ``model``; a tied one once, under its first name."""
        found = cls()
        for name, parameter in model.named_parameters():
            found.add_parameter_with_size(name, parameter.shape, parameter.element_size())
        return found

    def add_parameter(self, name: str, shape: Sequence[int]) -> None:
        """Add an fp32 parameter; ``[]`` is the shape of a scalar."""
        self.add_parameter_with_size(name, shape, 4)

    def add_parameter_with_size(self, name: str, shape: Sequence[int], element_size: int) -> None:
        """Add a parameter whose elements have ``element_size`` bytes."""
        if name in self._shapes:
            raise ConfigError(f"parameter {name!r} is already in the inventory, with shape {self._shapes[name]}")
        if any(size < 0 for size in shape):
            raise ConfigError(f"parameter {name!r} has the shape {tuple(shape)}; sizes must be >= 0")
        if element_size <= 0:
            raise ConfigError(f"parameter {name!r} has elements of {element_size} bytes; must be > 0")
        self._shapes[name] = tuple(shape)
        self._element_bytes[name] = element_size

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names in the order they were added."""
        return tuple(self._shapes)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """A copy of name -> shape."""
        return dict(self._shapes)

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters."""
        return sum(self._sizes())

    @property
    def total_memory_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(math.prod(shape) * self._element_bytes[name] for name, shape in self._shapes.items())

    def total_parameters(self) -> int:
        """How many names there are."""
        return len(self._shapes)

    def memory_usage_mb(self) -> float:
        """``total_memory_bytes`` in MiB."""
        return self.total_memory_bytes / MIB

    def has_parameter(self, name: str) -> bool:
        """True when ``name`` was added."""
        return name in self._shapes

    def get_parameter_shape(self, name: str) -> tuple[int, ...]:
        """Shape of ``name``; raises ConfigError when there is none."""
        if name not in self._shapes:
            raise ConfigError(f"the inventory has no parameter {name!r}")
        return self._shapes[name]

    def get_parameter_size(self, name: str) -> int:
        """Elements of ``name``; raises ConfigError when there is none."""
        return math.prod(self.get_parameter_shape(name))

    def get_statistics(self) -> ModelParameterStats:
        """Statistics over the parameters' sizes."""
        sizes = self._sizes()
        if not sizes:
            return ModelParameterStats()
        return ModelParameterStats(
            total_parameters=len(sizes),
            total_elements=sum(sizes),
            mean_parameter_size=sum(sizes) / len(sizes),
            median_parameter_size=float(statistics.median(sizes)),
            min_parameter_size=min(sizes),
            max_parameter_size=max(sizes),
            total_memory_bytes=self.total_memory_bytes,
        )

    def _sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self._shapes.values()]
