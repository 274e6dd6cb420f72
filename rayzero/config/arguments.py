"""What constructors and setters of the configs take, for type checkers: they read arguments.pyi, which
scripts/settings.py makes from the fields."""

from __future__ import annotations

from typing import Any

from rayzero.config.base import ConfigModel

ZeroArguments = ScalingArguments = RunArguments = dict[str, Any]
ZeroSetters = ConfigModel
