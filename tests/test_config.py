"""Settings: defaults, one-line errors that name the setting, YAML in and out, overrides."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rayzero.config import (
    GIB,
    MIB,
    AutoMemoryStrategy,
    ConfigModel,
    CpuCompressionMethod,
    RunConfig,
    ScalingConfig,
    ZeroConfig,
    apply_overrides,
    load_yaml,
    read_yaml,
)
from rayzero.config.zero import SHORT_NAMES
from rayzero.errors import ConfigError


def error_line(make: Callable[[], Any]) -> str:
    """The message of the ConfigError that ``make`` raises; it must be one line."""
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- defaults and values ----------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_specification_and_limits_those_of_the_machine() -> None:
    config = ZeroConfig()
    assert (config.offload_params, config.offload_grads, config.offload_optimizer_states) == (True, True, True)
    assert (config.cpu_memory_budget, config.gpu_param_memory_budget) == (None, 2 * GIB)
    assert (config.max_gpu_memory_mb, config.max_cpu_memory_mb) == (None, None)
    assert (config.prefetch_buffer_size, config.async_prefetch) == (16, True)
    assert (config.overlap_computation, config.pin_cpu_memory) == (True, True)
    assert config.cpu_compression is CpuCompressionMethod.NONE
    assert config.auto_memory_management is AutoMemoryStrategy.AGGRESSIVE
    assert (config.precision, config.overlap, config.shard_bytes) == ("fp32", "forward", 8 * MIB)


def test_fluent_setters_return_new_configs() -> None:
    config = ZeroConfig()
    changed = (
        config.with_offload_params(False)
        .with_compression(CpuCompressionMethod.FP16)
        .with_memory_strategy(AutoMemoryStrategy.CONSERVATIVE)
        .with_prefetch_buffer_size(32)
    )
    assert (changed.offload_params, changed.cpu_compression) == (False, CpuCompressionMethod.FP16)
    assert (changed.auto_memory_management, changed.prefetch_buffer_size) == (AutoMemoryStrategy.CONSERVATIVE, 32)
    assert config == ZeroConfig()


WORDS = [
    "never",
    "int8",
    "b",
    "grpc",
    "raise",
    "extreme",
    "bf16",
    "none",
    "contiguous",
    "packed",
    "native",
    "kept",
    "rank",
    "push",
]  # a value of each choice


@pytest.mark.parametrize("name", [*ZeroConfig.model_fields, *SHORT_NAMES])
def test_each_setting_has_a_setter_which_changes_it_and_no_other(name: str) -> None:
    field, setter = SHORT_NAMES.get(name, name), getattr(ZeroConfig(), f"with_{name}")
    assert setter.__name__ == f"with_{name}"
    assert f"``{field}``" in setter.__doc__
    for value in (not getattr(ZeroConfig(), field), 0.5, 4096, *WORDS):
        with suppress(ConfigError):
            assert setter(value) == ZeroConfig().replace(**{field: value}) != ZeroConfig()
            return
    raise AssertionError(f"no value of {field} is known here")


@pytest.mark.parametrize("number", [-1, 9, 1.0, True, "1"])
def test_a_run_has_at_most_eight_spares(number: Any) -> None:
    assert f"warm_spares is {number!r} but must be" in error_line(lambda: RunConfig(warm_spares=number))
    assert RunConfig(warm_spares=8).warm_spares == 8


@pytest.mark.parametrize("name", ["max_failures", "keep_states"])
def test_numbers_that_ray_or_the_kernel_cannot_count_are_refused(name: str):
    for number in (-1, 1.5, True, "3", 10**9 + 1, 10**400):
        assert f"{name} is " in error_line(lambda number=number: RunConfig(**{name: number}))
    assert getattr(RunConfig(**{name: 10**9}), name) == 10**9


@pytest.mark.parametrize(
    ("network", "near"),
    [("10.0.0.7/24", "10.0.0.0/24"), ("fd00::1/64", "fd00::/64"), ("10.0.0.0/33", "10.0.0.0/8 or fd00::/8")],
)
def test_a_network_that_is_none_is_told_which_one_it_may_mean(network: str, near: str) -> None:
    said = error_line(lambda: RunConfig(network=network))
    assert f"network is '{network}' but must be a network such as {near} (" in said


def test_spares_of_a_run_that_replaces_nobody_are_refused() -> None:
    line = error_line(lambda: RunConfig(warm_spares=2, max_failures=0))
    assert "warm_spares is 2 but max_failures is 0, so nobody is replaced" in line


def test_setters_check_like_the_constructor() -> None:
    assert "prefetch_buffer_size is 0" in error_line(lambda: ZeroConfig().with_prefetch_buffer_size(0))


def test_compression_ratios_and_losses() -> None:
    ratios = {method.name: method.ratio() for method in CpuCompressionMethod}
    assert ratios == {
        "NONE": 1.0,
        "FP16": 0.5,
        "BF16": 0.5,
        "INT8": 65 / 256,
        "QUANTIZATION": 35 / 256,
        "LOSSLESS": 0.83,
    }
    lossless = {method.name for method in CpuCompressionMethod if not method.is_lossy()}
    assert lossless == {"NONE", "LOSSLESS"}
    assert len({method.description() for method in CpuCompressionMethod}) == len(CpuCompressionMethod)


def test_memory_strategies() -> None:
    table = {s.name: (s.pressure_threshold, s.aggressiveness) for s in AutoMemoryStrategy}
    assert table.pop("OFF") == (1, 0), "never above its threshold"
    assert table == {"CONSERVATIVE": (0.9, 0.2), "BALANCED": (0.75, 0.5), "AGGRESSIVE": (0.6, 0.8), "EXTREME": (0.4, 1)}
    assert len({s.description() for s in AutoMemoryStrategy}) == len(AutoMemoryStrategy)


def test_effective_budget_counts_uncompressed_bytes() -> None:
    assert ZeroConfig().effective_cpu_memory_budget is None, "what the host has"
    config = ZeroConfig(cpu_memory_budget=1000)
    assert config.effective_cpu_memory_budget == 1000
    assert config.with_compression("fp16").effective_cpu_memory_budget == 2000
    assert config.with_compression("fp16").compression_ratio == 0.5
    assert config.with_compression("lossless").effective_cpu_memory_budget == 1204  # 1204.8 rounded down


@given(st.integers(1, 1 << 50))
def test_effective_budget_is_exact_where_fp32_would_round(budget: int) -> None:
    config = ZeroConfig(cpu_memory_budget=budget)
    assert config.effective_cpu_memory_budget == budget
    assert config.with_compression("int8").effective_cpu_memory_budget == budget * 256 // 65


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5KiB", 1536),
        ("3MB", 3_000_000),
        ("4096", 4096),
        ("1TB", 10**12),
        ("7 B", 7),
    ],
)
def test_sizes_may_be_text(text: str, size: int) -> None:
    assert ZeroConfig(cpu_memory_budget=text, max_cpu_memory_mb=1 << 30).cpu_memory_budget == size  # type: ignore[arg-type]


def test_configs_are_frozen_hashable_and_picklable() -> None:
    config = ZeroConfig(units=("Block",))
    assert "frozen" in error_line(lambda: setattr(config, "precision", "bf16"))
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(ZeroConfig(units=["Block"]))  # type: ignore[arg-type]


# ---- errors -----------------------------------------------------------------------------------------------------


def test_the_first_failure_wins_in_the_specified_order() -> None:
    wrong: dict[str, Any] = {
        "cpu_memory_budget": 0,
        "gpu_param_memory_budget": 0,
        "prefetch_buffer_size": 0,
        "max_gpu_memory_mb": 0,
        "max_cpu_memory_mb": 0,
    }
    for field in list(wrong):
        assert error_line(lambda: ZeroConfig(**wrong)).startswith(
            f"ZeroConfig: {field} is 0 but must be greater than 0"
        )
        del wrong[field]
    both: dict[str, Any] = {"gpu_param_memory_budget": 3 * MIB, "max_gpu_memory_mb": 2, "cpu_memory_budget": 5 * MIB}
    line = error_line(lambda: ZeroConfig(**both, max_cpu_memory_mb=4))
    assert "gpu_param_memory_budget is 3 MiB but max_gpu_memory_mb allows 2 MiB" in line
    line = error_line(lambda: ZeroConfig(cpu_memory_budget=5 * MIB, max_cpu_memory_mb=4))
    assert "cpu_memory_budget is 5 MiB but max_cpu_memory_mb allows 4 MiB" in line


def test_an_excess_below_one_mib_passes() -> None:
    assert ZeroConfig(gpu_param_memory_budget=3 * MIB - 1, max_gpu_memory_mb=2).max_gpu_memory_mb == 2


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"prefetch_buffer": 3}, ["'prefetch_buffer' = 3", "did you mean 'prefetch_buffer_size'"]),
        ({"zzzzz": 1}, ["unknown setting 'zzzzz'", "offload_params", "wire_compression"]),
        ({"precision": "fp8"}, ["precision is 'fp8'", "'fp32', 'bf16' or 'fp16'"]),
        ({"async_prefetch": "maybe"}, ["async_prefetch is 'maybe'", "boolean"]),
        ({"prefetch_buffer_size": True}, ["prefetch_buffer_size is True", "integer"]),
        ({"prefetch_buffer_size": "3"}, ["prefetch_buffer_size is '3'", "integer"]),
        ({"cpu_memory_budget": "2 foo"}, ["cpu_memory_budget is '2 foo'", "GiB"]),
        ({"cpu_memory_budget": "0.3 B"}, ["cpu_memory_budget is '0.3 B'", "whole number"]),
        ({"cpu_compression": "zip"}, ["cpu_compression is 'zip'", "'lossless'"]),
        ({"max_grad_norm": math.nan}, ["max_grad_norm is nan"]),
        ({"max_grad_norm": -1.0}, ["max_grad_norm is -1.0", "greater than 0"]),
        ({"shard_bytes": 100}, ["shard_bytes is 100", "multiple of 256"]),
        ({"units": 3}, ["units is 3", "list of names"]),
        ({"units": []}, ["units is []", "must have at least 1 item"]),
        ({"keep_fp32": [1]}, ["keep_fp32 is [1]", "list of names"]),
        ({"stall_timeout": 0}, ["stall_timeout is 0", "greater than 0"]),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_value_and_what_is_allowed(
    settings: dict[str, Any], parts: list[str]
) -> None:
    line = error_line(lambda: ZeroConfig(**settings))
    assert all(part in line for part in parts), line


def test_a_config_inside_another_is_checked_as_itself() -> None:
    class Recipe(ConfigModel):
        zero: ZeroConfig = ZeroConfig()

    assert Recipe.from_mapping({"zero": {"precision": "bf16"}}).zero.precision == "bf16"
    line = error_line(lambda: Recipe.from_mapping({"zero": {"precison": "bf16"}}))
    assert "zero" in line
    assert "did you mean 'precision'" in line


def test_the_part_of_the_optimizer_that_stays_on_the_host() -> None:
    assert ZeroConfig().host_fraction == 1.0
    assert ZeroConfig(offload_fraction=0.3).host_fraction == 0.3
    assert ZeroConfig(offload_fraction=0.3, offload_optimizer_states=False).host_fraction == 0.0
    assert ZeroConfig.from_yaml("offload_fraction: 0").host_fraction == 0.0
    for wrong in (-0.1, 1.1, float("nan")):
        assert "offload_fraction is" in error_line(lambda wrong=wrong: ZeroConfig(offload_fraction=wrong))


def test_scaling_and_run_settings_are_checked() -> None:
    assert (ScalingConfig().num_workers, ScalingConfig().num_optimizers, ScalingConfig().use_gpu) == (2, 2, False)
    assert "num_workers is 0" in error_line(lambda: ScalingConfig(num_workers=0))
    assert "max_optimizers is 2, but num_optimizers is 3" in error_line(lambda: ScalingConfig(num_optimizers=(3, 2)))
    assert "is 0 but must be" in error_line(lambda: ScalingConfig(num_optimizers=(0, 2)))
    for share in (0, 1):
        assert f"target_exposed is {share} but must be" in error_line(
            lambda share=share: ScalingConfig(target_exposed=share)
        )
    assert "cpus_per_worker is 0" in error_line(lambda: ScalingConfig(cpus_per_worker=0))
    assert "name is 'a/b' but must be a plain folder name" in error_line(lambda: RunConfig(name="a/b"))
    assert "takes 130 bytes and may take at most 128; shorten it" in error_line(lambda: RunConfig(name="π" * 65))
    assert RunConfig(name="π" * 64).path.name == "π" * 64
    assert "name is '..'" in error_line(lambda: RunConfig(name=".."))
    assert "checkpoint_every is 0" in error_line(lambda: RunConfig(checkpoint_every=0))
    assert "resume is 3" in error_line(lambda: RunConfig(resume=3))  # type: ignore[arg-type]
    assert "resume is ''" in error_line(lambda: RunConfig(resume=""))
    assert RunConfig(name="demo", storage_path="runs").path == Path("runs/demo")


# ---- YAML -------------------------------------------------------------------------------------------------------

zero_configs = st.builds(
    ZeroConfig,
    offload_params=st.booleans(),
    cpu_memory_budget=st.integers(1, 64 * GIB),
    cpu_compression=st.sampled_from(CpuCompressionMethod),
    auto_memory_management=st.sampled_from(AutoMemoryStrategy),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    max_grad_norm=st.none() | st.floats(1e-30, 1e30),
    units=st.just("auto") | st.lists(st.text(min_size=1), min_size=1).map(tuple),
    keep_fp32=st.lists(st.text(min_size=1)).map(tuple),
)


@given(zero_configs)
def test_yaml_out_and_in_gives_an_equal_config(config: ZeroConfig) -> None:
    assert ZeroConfig.from_yaml(config.to_yaml()) == config


@given(zero_configs)
def test_the_schema_accepts_what_to_yaml_writes(config: ZeroConfig) -> None:
    jsonschema.validate(yaml.safe_load(config.to_yaml()), ZeroConfig.json_schema())


def test_the_schema_describes_every_field_and_refuses_unknown_ones() -> None:
    for model in (ZeroConfig, ScalingConfig, RunConfig):
        schema = model.json_schema()
        assert all(field.get("description") for field in schema["properties"].values())
        assert schema["additionalProperties"] is False
        assert model.from_yaml("") == model()
        assert model.from_yaml(model().to_yaml()) == model()


def test_yaml_floats_without_a_point_are_numbers() -> None:
    assert load_yaml("lr: 1e-4\nmin_lr: -2E3\nname: e4\nplain: 3") == {
        "lr": 1e-4,
        "min_lr": -2000.0,
        "name": "e4",
        "plain": 3,
    }


def test_text_that_looks_like_a_float_stays_text() -> None:
    config = ZeroConfig(units=("1e100", "-2E-3", "e4", "1e+5"))
    assert ZeroConfig.from_yaml(config.to_yaml()) == config


def test_yaml_errors_name_the_source_and_the_line(tmp_path: Path) -> None:
    assert "recipe.yaml line 2, column 1: not valid YAML: 'a' is set twice" in error_line(
        lambda: load_yaml("a: 1\na: 2", source="recipe.yaml")
    )
    assert "line 1" in error_line(lambda: load_yaml("a: [1"))
    assert "must be a mapping" in error_line(lambda: load_yaml("- 1"))
    assert "must be a mapping" in error_line(lambda: load_yaml("1: 2"))
    missing = tmp_path / "none.yaml"
    assert error_line(lambda: read_yaml(missing)) == f"cannot read {missing}: No such file or directory"
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00a")
    assert "not UTF-8" in error_line(lambda: read_yaml(tmp_path / "bytes.yaml"))


# ---- overrides --------------------------------------------------------------------------------------------------


def test_overrides_set_nested_values_read_as_yaml() -> None:
    settings = {"zero": {"precision": "fp32", "shard_bytes": 512}, "steps": 10}
    changed = apply_overrides(settings, ["zero.precision=bf16", "lr=1e-4", "new.part=[1, x]", "steps=null", "text="])
    assert changed == {
        "zero": {"precision": "bf16", "shard_bytes": 512},
        "steps": None,
        "lr": 1e-4,
        "new": {"part": [1, "x"]},
        "text": None,
    }
    assert settings == {"zero": {"precision": "fp32", "shard_bytes": 512}, "steps": 10}


@pytest.mark.parametrize("text", ["3e-4x", "1e5_files", "1e5.txt", "1e-3 and more"])
def test_text_that_begins_like_a_number_is_text(text: str) -> None:
    assert apply_overrides({}, [f"data={text}"]) == {"data": text}


@pytest.mark.parametrize("seconds", [1e300, 1e10])
def test_no_wait_is_longer_than_a_lock_can_wait(seconds: float) -> None:
    """A rank raised OverflowError once it was up."""
    with pytest.raises(ConfigError, match=r"stall_timeout is 1.*0 but must be less than or equal to 1000000000"):
        ZeroConfig(stall_timeout=seconds)
    with pytest.raises(ConfigError, match=r"placement_timeout is 1.*0 but must be less than or equal to 1000000000"):
        ScalingConfig(placement_timeout=seconds)


def test_a_value_in_place_of_a_group_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^RunConfig: security is 'never' but must be a group of settings$"):
        RunConfig(security="never")


def test_an_override_fills_a_group_that_a_file_leaves_empty() -> None:
    changed = apply_overrides({"run": None, "zero": {"x": None}}, ["run.telemetry.port=9100", "zero.x.y=1"])
    assert changed == {"run": {"telemetry": {"port": 9100}}, "zero": {"x": {"y": 1}}}


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("steps", "must look like key=value"),
        ("=3", "must look like key=value"),
        ("a..b=3", "must look like key=value"),
        ("steps.x=3", "steps is 10, not a group of settings"),
        ("a=[1", "not valid YAML"),
        ("data=2026-13-45", "not valid YAML: month must be in 1..12; put text into quotes"),
        ("a=!!int x", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_one_line(override: str, part: str) -> None:
    line = error_line(lambda: apply_overrides({"steps": 10}, [override]))
    assert part in line
    assert override.partition("=")[0] in line
