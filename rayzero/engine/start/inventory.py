"""Statistics of the sizes of a model's parameters."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Self

from torch import nn


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

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Of all parameters of ``model``; a tied one counts once."""
        found = list(model.parameters())
        sizes = [parameter.numel() for parameter in found]
        if not sizes:
            return cls()
        return cls(
            total_parameters=len(sizes),
            total_elements=sum(sizes),
            mean_parameter_size=sum(sizes) / len(sizes),
            median_parameter_size=float(statistics.median(sizes)),
            min_parameter_size=min(sizes),
            max_parameter_size=max(sizes),
            total_memory_bytes=sum(parameter.numel() * parameter.element_size() for parameter in found),
        )
