"""What a user may set: frozen values, checked where they are made, in Python or YAML.

A wrong setting is one line, a :class:`~rayzero.errors.ConfigError` that names it, its value and what is allowed.
Every field's docstring says exactly what it changes; ``json_schema()`` carries the same texts to editors.
"""

from __future__ import annotations

from rayzero.config.base import GIB, KIB, MIB, ConfigModel, Count, Flag, Positive, Processes, Size, parse_bytes
from rayzero.config.choices import AutoMemoryStrategy, CpuCompressionMethod
from rayzero.config.run import RunConfig, ScalingConfig
from rayzero.config.telemetry import TelemetryConfig
from rayzero.config.yaml_text import apply_overrides, load_yaml, read_yaml
from rayzero.config.zero import ZeroConfig

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "AutoMemoryStrategy",
    "ConfigModel",
    "Count",
    "CpuCompressionMethod",
    "Flag",
    "Positive",
    "Processes",
    "RunConfig",
    "ScalingConfig",
    "Size",
    "TelemetryConfig",
    "ZeroConfig",
    "apply_overrides",
    "load_yaml",
    "parse_bytes",
    "read_yaml",
]
