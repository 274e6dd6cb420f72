"""The settings of a user: frozen configs that are checked when they are made, in Python or from YAML.

A wrong setting raises a one-line :class:`~rayzero.errors.ConfigError` that names it, its value and what is allowed.
Every field's docstring says exactly what it changes, and its first sentence stands alone: ``help()``, ``rayzero train
--help-config`` and ``json_schema()`` show the same texts. Constructors accept more types ("4GiB", a Path) than the
fields have: scripts/settings.py makes from the fields what type checkers see of them (arguments.pyi).
"""

from __future__ import annotations

from rayzero.config.base import (
    GIB,
    KIB,
    MIB,
    ConfigModel,
    Count,
    Flag,
    Natural,
    Positive,
    Processes,
    Seconds,
    Share,
    Size,
)
from rayzero.config.choices import AutoMemoryStrategy, CheckpointErrors, CpuCompressionMethod
from rayzero.config.run import RunConfig, ScalingConfig, SecurityConfig, TelemetryConfig
from rayzero.config.text import (
    apply_overrides,
    commented_settings,
    describe_settings,
    load_yaml,
    read_yaml,
    set_value,
)
from rayzero.config.zero import ZeroConfig
from rayzero.quantities import parse_bytes

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "AutoMemoryStrategy",
    "CheckpointErrors",
    "ConfigModel",
    "Count",
    "CpuCompressionMethod",
    "Flag",
    "Natural",
    "Positive",
    "Processes",
    "RunConfig",
    "ScalingConfig",
    "Seconds",
    "SecurityConfig",
    "Share",
    "Size",
    "TelemetryConfig",
    "ZeroConfig",
    "apply_overrides",
    "commented_settings",
    "describe_settings",
    "load_yaml",
    "parse_bytes",
    "read_yaml",
    "set_value",
]
