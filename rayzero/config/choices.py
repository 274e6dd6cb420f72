"""The named choices of the config, and the numbers that each stands for."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

CheckpointErrors = Literal["warn", "raise"]
"""What happens to the training when its storage does not take a checkpoint."""


class _NamedChoice(StrEnum):
    """A choice that can be looked up by its name or its value, in upper or lower case."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        wanted = value.lower() if isinstance(value, str) else None
        return next((member for member in cls if wanted in (member.value, member.name.lower())), None)


class CpuCompressionMethod(_NamedChoice):
    """How tensors are stored on the host."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    QUANTIZATION = "quantization"
    LOSSLESS = "lossless"

    def ratio(self) -> float:
        """Stored bytes per original byte of fp32 weights. A lossless ratio is of normally distributed ones."""
        return _COMPRESSION[self][0]

    def is_lossy(self) -> bool:
        """True when a decoded tensor may differ from the original."""
        return _COMPRESSION[self][1]

    def description(self) -> str:
        """The choice in one phrase, for people."""
        return _COMPRESSION[self][2]


_COMPRESSION = {
    CpuCompressionMethod.NONE: (1.0, False, "stored as it is"),
    CpuCompressionMethod.FP16: (0.5, True, "stored as 16-bit IEEE floats"),
    CpuCompressionMethod.BF16: (0.5, True, "stored as bfloat16"),
    CpuCompressionMethod.INT8: (260 / 1024, True, "stored as 8-bit integers with a scale per block"),
    CpuCompressionMethod.QUANTIZATION: (140 / 1024, True, "stored as 4-bit integers with two scales per block"),
    CpuCompressionMethod.LOSSLESS: (0.83, False, "stored by a lossless code; decodes to the same bits"),
}


class AutoMemoryStrategy(_NamedChoice):
    """How early and how much is done about memory pressure (engine/engine_memory.py)."""

    OFF = "off"
    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"
    EXTREME = "extreme"

    @property
    def pressure_threshold(self) -> float:
        """Pressure (used / limit, 0 to 1) above which the prefetch depth is reduced."""
        return _STRATEGY[self][0]

    @property
    def aggressiveness(self) -> float:
        """Share of the prefetch depth that is given up at full pressure, 0 to 1."""
        return _STRATEGY[self][1]

    def description(self) -> str:
        """The choice in one phrase, for people."""
        return _STRATEGY[self][2]


_STRATEGY = {
    AutoMemoryStrategy.OFF: (1.0, 0.0, "measures memory pressure and leaves everything as it is"),
    AutoMemoryStrategy.CONSERVATIVE: (
        0.9,
        0.2,
        "acts late: garbage above 75 %, little of depth and residency",
    ),
    AutoMemoryStrategy.BALANCED: (
        0.75,
        0.5,
        "acts above 60 %: at most half of the depth, most of the residency",
    ),
    AutoMemoryStrategy.AGGRESSIVE: (
        0.6,
        0.8,
        "acts above 50 %: most of the depth and of the residency",
    ),
    AutoMemoryStrategy.EXTREME: (
        0.4,
        1.0,
        "acts above 30 %: all of the depth, nearly all of the residency",
    ),
}
