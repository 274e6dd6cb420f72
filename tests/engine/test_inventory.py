"""A model's parameters by name: the documented vectors and the defects that are errors here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayzero.engine.start.inventory import ModelParameters, ModelParameterStats
from rayzero.errors import ConfigError


def test_documented_vectors() -> None:
    found = ModelParameters()
    found.add_parameter("weight", [100, 50])
    found.add_parameter("bias", [50])
    assert found.parameter_names == ("weight", "bias")
    assert (found.total_parameters(), found.parameter_count) == (2, 5050)
    assert (found.get_parameter_size("weight"), found.get_parameter_size("bias")) == (5000, 50)
    assert found.get_parameter_shape("weight") == found.parameter_shapes["weight"] == (100, 50)
    assert (found.total_memory_bytes, found.memory_usage_mb()) == (20200, 20200 / 2**20)
    assert found.get_statistics() == ModelParameterStats(
        total_parameters=2,
        total_elements=5050,
        mean_parameter_size=2525.0,
        median_parameter_size=2525.0,
        min_parameter_size=50,
        max_parameter_size=5000,
        total_memory_bytes=20200,
    )


def test_documented_vectors_of_modules() -> None:
    layer = ModelParameters.from_module(nn.Linear(10, 5, bias=True))
    assert layer.parameter_count == 55
    found = ModelParameters()
    found.add_parameter("layer1.weight", [512, 1024])
    found.add_parameter("layer1.bias", [1024])
    assert (found.total_parameters(), found.parameter_count) == (2, 525_312)
    assert found.has_parameter("layer1.bias")
    assert not found.has_parameter("layer2.bias")


def test_a_scalar_counts_one_element_and_an_empty_model_is_all_zero() -> None:
    found = ModelParameters()
    assert found.get_statistics() == ModelParameterStats()
    found.add_parameter_with_size("scale", [], 2)
    found.add_parameter("none", [0, 4])
    assert (found.get_parameter_size("scale"), found.get_parameter_size("none")) == (1, 0)
    assert (found.parameter_count, found.total_memory_bytes) == (1, 2)
    assert found.get_statistics().median_parameter_size == 0.5


def test_a_second_time_is_an_error_and_changes_nothing() -> None:
    found = ModelParameters()
    found.add_parameter("w", [2])
    with pytest.raises(ConfigError, match=r"'w' is already in the inventory, with shape \(2,\)"):
        found.add_parameter("w", [3])
    assert (found.parameter_count, found.total_parameters()) == (2, 1)


def test_unknown_names_and_wrong_sizes_are_errors() -> None:
    found = ModelParameters()
    assert not found.has_parameter("w")
    with pytest.raises(ConfigError, match="no parameter 'w'"):
        found.get_parameter_size("w")
    with pytest.raises(ConfigError, match="sizes must be >= 0"):
        found.add_parameter("w", [-1])
    with pytest.raises(ConfigError, match="0 bytes"):
        found.add_parameter_with_size("w", [1], 0)


def test_a_module_is_counted_with_tied_parameters_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2).to(torch.bfloat16))
    model[1].weight = model[0].weight
    found = ModelParameters.from_module(model)
    assert found.parameter_names == ("0.weight", "2.weight", "2.bias")
    assert found.total_memory_bytes == 9 * 4 + 8 * 2
