"""One unit's parameters and the one state they share.

[Note: swap] A Parameter stays the same object for the whole training. It owns a storage of its own, which is empty
while the unit is SHARDED. Lanes fill a buffer ahead of use, or it is the memory that the owners write
(``UnitBuffer.mapped``); going up swaps the buffer's slices under the storages, going down swaps them back. No byte is
copied.

[Note: use count] A storage at rest is held by its Parameter, by our alias of it and by our wrapper. Anything above
that is a view, a tensor autograd saved, a numpy alias: bytes somebody may still read. Such a unit is *pinned*: it is
not taken down, because reading freed memory is a crash, not an error. The count does not see a Parameter that
autograd saved as it is. Hooks make handles of those (handles.py); where somebody got round them, the version counters
that move when a unit goes down make its backward torch's in-place error.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from rayzero.engine.private_torch import (
    AT_REST,
    empty_storage,
    increment_versions,
    storage_key,
    swap_all,
    swap_bytes,
    use_count,
)
from rayzero.engine.units.fetch import Fetching, Waited
from rayzero.engine.units.residency import UnitBuffer
from rayzero.layout.model_layout import UnitLayout
from rayzero.tensor_metadata import plain


class UnitState(Enum):
    """Where a unit's full parameters are."""

    SHARDED = auto()  # only with the owners; the Parameters' storages are empty
    UNSHARDING = auto()  # a fetch into a leased buffer was asked for; the storages are still empty
    UNSHARDED = auto()  # the buffer is under the Parameters, every byte of it valid


S = UnitState
_MOVES = {S.SHARDED: {S.UNSHARDING}, S.UNSHARDING: {S.UNSHARDED, S.SHARDED}, S.UNSHARDED: {S.SHARDED}}


class SavedShape(Protocol):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any  # elements


class ParamUnit:
    """Parameters gathered, released and reduced together (usually one transformer block).

    Knows its layout, its state and what is in flight; not modules, other units, or who carries the bytes."""

    def __init__(self, layout: UnitLayout, params: list[nn.Parameter], guard: type[nn.Parameter]) -> None:
        """``params``: one per slot, each on the device in the unit's dtype. Their storages are replaced; their
        values are gone after this."""
        self.layout = layout
        self.index = layout.index
        self.name = layout.name
        self.size_bytes = layout.size_bytes
        self.params = params
        self.guard = guard  # the class the Parameters have while a touch must be seen (touch.py)
        self.state = S.SHARDED
        self.fetching: Fetching | None = None
        self.buffer: UnitBuffer | None = None  # while UNSHARDED. freed by: reshard()
        self.kept: UnitBuffer | None = None  # while SHARDED: memory with bytes of ``version``. freed by: take_kept()
        self.version = -1  # published version that the bytes in ``buffer`` or ``kept`` were right for
        self.open_calls = 0  # forward calls that are running, and touches
        self.storages = [_own_storage(param) for param in params]
        self.keys = [storage_key(storage) for storage in self.storages]
        self._aliases = [param.detach() for param in params]  # plain tensors over the same storages and versions
        self._filled = [i for i, slot in enumerate(layout.slots) if slot.numel]
        self._outdated = 0  # how often we moved the Parameters' version counters ourselves
        self._written = self.writes()
        self.guarded = False
        self.set_guard(True)

    def __repr__(self) -> str:
        return f"<ParamUnit {self.name!r} {self.state.name}>"

    def _become(self, state: UnitState) -> None:
        assert state in _MOVES[self.state], f"{self} cannot become {state}"
        self.state = state

    # ---- up

    def unshard(self, fetching: Fetching) -> None:
        """Take charge of a fetch that was just asked for."""
        self._become(S.UNSHARDING)
        self.fetching = fetching

    def wait_unsharded(self) -> Waited:
        """Block until every byte is there and put the buffer under the Parameters.

        Returns what was waited for. A fetch that failed raises its own error and leaves the unit SHARDED."""
        fetching = self.fetching
        assert fetching is not None
        waited = fetching.wait()
        self._swap(fetching.buffer)
        self.buffer, self.version, self.fetching = fetching.buffer, fetching.version, None
        self._become(S.UNSHARDED)  # last: from here on the bytes are read
        return waited

    def abandon(self) -> Fetching:
        """Give up a fetch that is no longer wanted; the caller sees to its end."""
        fetching, self.fetching = self.fetching, None
        assert fetching is not None
        self._become(S.SHARDED)
        return fetching

    def take_kept(self) -> UnitBuffer | None:
        """Hand over the memory that was kept, if any."""
        kept, self.kept = self.kept, None
        return kept

    # ---- down

    def reshard(self) -> UnitBuffer:
        """Take the buffer away from under the Parameters and hand it over. Only where ``can_reshard()``."""
        buffer, self.buffer = self.buffer, None
        assert buffer is not None
        self._become(S.SHARDED)  # first: from here on nothing may be read
        self._outdate()
        self._swap(buffer)
        return buffer

    def can_reshard(self) -> bool:
        """Whether it is up, no call of it is open, and nobody but the Parameters holds its bytes."""
        return self.state is S.UNSHARDED and not self.open_calls and not self.pinned_slots()

    def pinned_slots(self) -> list[int]:
        """Slots whose bytes somebody else holds. [Note: use count]"""
        return [i for i in self._filled if use_count(self.keys[i]) != AT_REST + 1]  # + alias

    def _swap(self, buffer: UnitBuffer) -> None:
        if len(self._filled) == len(self.storages):
            swap_all(self.storages, buffer.slices)
            return
        for i in self._filled:
            swap_bytes(self.storages[i], buffer.slices[i])

    # ---- guard, gradients, writes

    def set_guard(self, on: bool) -> None:
        """Have every operation on the Parameters seen (touch.py), or none."""
        if self.guarded is on:
            return
        self.guarded = on
        kind = self.guard if on else nn.Parameter
        for param in self.params:
            param.__class__ = kind

    def _outdate(self) -> None:
        """Have autograd refuse what it saved of a Parameter itself. [Note: use count]"""
        increment_versions(self.params)
        self._outdated += 1

    def writes_of(self, slot: int) -> int:
        """How often the user has written into a slot's Parameter in place."""
        return self._aliases[slot]._version - self._outdated

    def writes(self) -> list[int]:
        """Per slot, how often the user has written in place."""
        return [alias._version - self._outdated for alias in self._aliases]

    def was_written(self) -> bool:
        """Whether the user has written into a Parameter since the last ``settle_writes``."""
        return self.writes() != self._written

    def settle_writes(self) -> None:
        """What the user has written so far is accounted for."""
        self._written = self.writes()

    def count_writes(self, slots: Sequence[int]) -> None:
        """Other values were put into these slots for the user: have autograd see that as it sees an in-place write."""
        increment_versions([self._aliases[slot] for slot in slots])

    def take_grads(self, slots: Sequence[int]) -> list[Tensor | None]:
        """Per slot ``.grad``, dense, which is None afterwards; slots not in ``slots`` keep theirs and give None."""
        taken: list[Tensor | None] = [None] * len(self.params)
        with plain():
            for slot in slots:
                param = self.params[slot]
                grad = param.grad
                if grad is not None:
                    taken[slot] = grad if grad.layout is torch.strided else grad.to_dense()
                    param.grad = None
        return taken

    def refreshed(self, version: int) -> None:
        """A new version was written into the buffer in place: what autograd saved of the old one is out of date."""
        self.version = version
        self._outdate()

    def tensor(self, slot: int, like: SavedShape) -> Tensor:
        """A detached tensor over a slot's storage, of the shape and dtype of ``like``. It counts as a holder."""
        alias = self._aliases[slot]
        if like.dtype is alias.dtype:
            return torch.as_strided(alias, like.size, like.stride, like.offset)
        other: Any = torch.empty(0, dtype=like.dtype, device=alias.device)
        return cast(Tensor, other.set_(self.storages[slot], like.offset, like.size, like.stride))


def _own_storage(param: nn.Parameter) -> torch.UntypedStorage:
    """Give ``param`` a contiguous storage of its own, empty. Its size, dtype and device stay as they are."""
    param.data = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    storage = param.untyped_storage()
    if param.numel():
        swap_bytes(storage, empty_storage(param.device))
    return storage
