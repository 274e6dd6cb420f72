"""What the caller of a commit is done with: whether a tensor that was handed over is really dead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.activations.tensors.saved import Saved, view_bytes


@dataclass(frozen=True, slots=True)
class Handed:
    """One tensor that was handed over. Knows its bytes and the handles that keep them; not where those go."""

    nbytes: int
    sharing: list[Saved] | None  # handles that share its storage; None: somebody else holds it too

    @property
    def dead(self) -> bool:
        """True when nobody holds its bytes on the device any more."""
        return self.sharing is not None and all(saved.tensor is None for saved in self.sharing)


def take_over(found: Sequence[Saved], release: list[Tensor] | None) -> list[Handed]:
    """Empty the list. ``found``: the handles of the group that is committed.

    Proof that only they hold a tensor: nobody else has the Python object, and every reference to the storage is one of
    these handles'."""
    handed: list[Handed] = []
    while release:
        tensor = release.pop()
        storage = tensor.untyped_storage()
        sharing = [s for s in found if s.tensor is not None and s.tensor.untyped_storage()._cdata == storage._cdata]
        alone = torch._C._storage_Use_Count(storage._cdata) <= 2 + len(sharing)
        proven = alone and sys.getrefcount(tensor) <= 2
        handed.append(Handed(view_bytes(tensor), sharing if proven else None))
    return handed
