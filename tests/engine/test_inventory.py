"""Statistics of a model's parameters: the documented vectors."""

from __future__ import annotations

import torch
from torch import nn

from rayzero.engine.stats import ModelParameterStats


def model_of(*shapes: tuple[int, ...]) -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)


def test_documented_vectors() -> None:
    assert ModelParameterStats.of(model_of((100, 50), (50,))) == ModelParameterStats(
        total_parameters=2,
        total_elements=5050,
        mean_parameter_size=2525.0,
        median_parameter_size=2525.0,
        min_parameter_size=50,
        max_parameter_size=5000,
        total_memory_bytes=20200,
    )


def test_documented_vectors_of_modules() -> None:
    assert ModelParameterStats.of(nn.Linear(10, 5, bias=True)).total_elements == 55
    found = ModelParameterStats.of(model_of((512, 1024), (1024,)))
    assert (found.total_parameters, found.total_elements) == (2, 525_312)


def test_a_scalar_counts_one_element_and_an_empty_model_is_all_zero() -> None:
    assert ModelParameterStats.of(nn.ReLU()) == ModelParameterStats()
    found = ModelParameterStats.of(model_of((), (0, 4)))
    assert (found.total_elements, found.total_memory_bytes, found.median_parameter_size) == (1, 4, 0.5)


def test_a_module_is_counted_with_tied_parameters_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2).to(torch.bfloat16))
    model[1].weight = model[0].weight
    found = ModelParameterStats.of(model)
    assert (found.total_parameters, found.total_memory_bytes) == (3, 9 * 4 + 8 * 2)
