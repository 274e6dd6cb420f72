"""Which entries were saved from which storage: the same bytes are stored once."""

from __future__ import annotations

import torch

from rayzero.activations.tensors.entry import Entry
from rayzero.activations.tensors.saved import Saved


class Entries:
    """All entries that are not freed, by the storage they were saved from.

    Knows storages' addresses; not where an entry's bytes are, nor who needs it. An entry keeps its storage's address
    from being used again."""

    def __init__(self) -> None:
        self._of_storage: dict[int, list[Entry]] = {}  # storage address -> entries saved from it

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._of_storage.values())

    def add(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        """``entry`` has bytes of ``storage``."""
        self._of_storage.setdefault(storage._cdata, []).append(entry)

    def with_content(self, storage: torch.UntypedStorage, saved: Saved) -> Entry | None:
        """The entry that already has the bytes that ``saved`` shows of ``storage``."""
        return next((entry for entry in self._of_storage.get(storage._cdata, ()) if entry.same_content(saved)), None)

    def forget(self, entry: Entry) -> None:
        """It is freed."""
        address = entry.storage.cdata
        left = [other for other in self._of_storage.get(address, ()) if other is not entry]
        if left:
            self._of_storage[address] = left
        else:
            self._of_storage.pop(address, None)
