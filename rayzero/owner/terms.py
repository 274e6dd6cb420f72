"""What an owner may use, and what it measures: the same for all prepared models of its process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerTerms:
    """The options of one owner."""

    threads: int = 1  # torch threads that compute updates
    memory_budget: int | None = None  # bytes that the plans of its models may need; None: the host's free memory
    norms_every: int | None = None  # steps between measurements of norms by layer group; None: never
    device: torch.device = CPU  # where masters and states lie if it is one of the owners beside ranks
