"""The settings: what may leave the device, how much of it, and how far ahead it comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rayzero.config import ZeroConfig
from rayzero.errors import ConfigError

COMPRESSIONS = ("none", "fp16", "bf16", "int8", "quantization")  # codecs that encode on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPolicy:
    """Settings of one ``ActivationOffload``; every size is in bytes.

    A chunk is one forward of one model part. Of its ``total`` eligible bytes, exactly
    ``round(fraction * (total - margin bytes - rank * delta_bytes))`` leave, the earliest first; one tensor is split if
    necessary. The first time a chunk runs, its total is not known. Then whole tensors leave, so that the share is never
    more than one tensor off. With ``device_budget_bytes``, cost decides instead (``cost.py``).

    Raises ConfigError if a value is out of range."""

    min_bytes: int = 1 << 20
    """Saved tensors smaller than this stay on the device."""
    fraction: float = 1.0
    """Share of the eligible bytes that leaves, 0 to 1."""
    rank: int = 0
    """This rank's number, for ``delta_bytes`` and for the summary."""
    delta_bytes: int = 0
    """Bytes that each rank keeps on its device more than the rank before it (late pipeline ranks hold fewer
    microbatches)."""
    margin: int = 1
    """How many of a chunk's last groups stay if its own backward comes next."""
    prefetch: int = 1
    """How many groups come back ahead of the one whose backward runs."""
    max_in_flight: int | None = None
    """How many groups may be on their way out before the forward waits. 0 waits for each, None never waits. With a
    number, the device holds at most ``1 + max(max_in_flight, prefetch)`` groups, besides what stays by choice, as long
    as groups come back in the reverse order; in any other order, ``1 + max_in_flight + prefetch``."""
    view_coverage: float = 0.5
    """A strided view that covers at least this share of its storage is stored as the whole storage."""
    compress: str = "none"
    """"none" is exact; "fp16", "bf16", "int8" and "quantization" (4 bits) round what leaves. Their codec states the
    error (``rayzero/codecs``)."""
    device_budget_bytes: int | None = None
    """Bytes of saved activations to hold on the device. Measured cost decides which groups are kept, offloaded or
    recomputed. None: ``fraction`` decides what leaves."""
    host_cap_bytes: int | None = None
    """The most bytes of host buffers; beyond them, tensors stay on the device. None: no bound."""
    pinned_cap_bytes: int | None = None
    """The most bytes of page-locked host buffers; beyond them, buffers are pageable. None: no bound. CUDA only."""
    poison: bool = False
    """For tests: fill buffers with 0xFF (NaN) before and after use, so that a read at the wrong time shows."""

    @classmethod
    def of(cls, config: ZeroConfig, *, rank: int = 0, poison: bool = False) -> Self:
        """The policy of a rank's config."""
        return cls(
            min_bytes=config.activation_min_bytes,
            fraction=config.activation_fraction,
            device_budget_bytes=config.activation_device_budget,
            host_cap_bytes=config.activation_host_budget,
            rank=rank,
            poison=poison,
        )

    def __post_init__(self) -> None:
        for name in ("min_bytes", "rank", "delta_bytes", "margin", "prefetch"):
            _at_least_zero(name, getattr(self, name))
        for name in ("max_in_flight", "device_budget_bytes", "host_cap_bytes", "pinned_cap_bytes"):
            if getattr(self, name) is not None:
                _at_least_zero(name, getattr(self, name))
        if not 0.0 <= self.fraction <= 1.0:
            raise ConfigError(f"fraction must be between 0 and 1, got {self.fraction}")
        if not 0.0 < self.view_coverage <= 1.0:
            raise ConfigError(f"view_coverage must be above 0 and at most 1, got {self.view_coverage}")
        if self.compress not in COMPRESSIONS:
            raise ConfigError(f"compress must be one of {', '.join(COMPRESSIONS)}, got {self.compress!r}")


def _at_least_zero(name: str, value: int) -> None:
    if value < 0:
        raise ConfigError(f"{name} must be >= 0, got {value}")
