"""Storages that never leave the device: those of parameters and buffers, and those that the user marked."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rayzero.tensor_metadata import plain


class ProtectedStorages:
    """Recognises tensors by storage, because autograd saves detached views and not the objects themselves.

    Knows storages; not why they are protected."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._of_modules: frozenset[int] = frozenset()
        self._marked: dict[int, StorageWeakRef] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the modules' parameters and buffers again: they may have been replaced or moved."""
        with plain():  # otherwise an engine would unshard its parameters
            self._of_modules = frozenset(
                tensor.untyped_storage()._cdata
                for module in self._modules
                for tensor in (*module.parameters(), *module.buffers())
                if tensor.layout is torch.strided
            )
        self._marked = {cdata: ref for cdata, ref in self._marked.items() if not _expired(ref)}

    def mark(self, tensor: Tensor) -> None:
        """Keep this tensor's storage on the device as long as it lives."""
        ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._marked[ref.cdata] = ref

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        cdata = storage._cdata
        return cdata in self._of_modules or cdata in self._marked


def _expired(ref: StorageWeakRef) -> bool:
    return bool(ref.expired())  # type: ignore[no-untyped-call]
