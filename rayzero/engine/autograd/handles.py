"""Saved-tensor hooks: in place of a weight, autograd saves a handle.

[Note: handles] While a unit's forward or a touch runs, any tensor that autograd saves over a parameter's storage is
packed as (unit, slot, size, stride, offset, versions), also one that is the values of a sparse tensor; unpacking it
unshards the unit. So backward, recomputation, double backward and retain_graph fetch what they need. Every other tensor
goes to the hooks below ours on the stack; without any, we keep it with its version, because hooks turn off torch's own
check for in-place changes. An activation checkpoint counts saved tensors and must count the same in forward and
recomputation, whichever hooks are above it, so it gets to see the weights too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from rayzero.engine.private_torch import (
    PackHook,
    UnpackHook,
    is_checkpoints,
    lazy_sign,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks_below,
    sparse_parts,
    storage_key,
)
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.modes import outside_modes

Slots = dict[int, tuple[ParamUnit, int]]  # storage key -> unit, slot


class Handle:
    """A weight that autograd saved, as the place to find it again."""

    __slots__ = ("content", "dtype", "form", "offset", "size", "slot", "stride", "unit", "version")

    def __init__(
        self, unit: ParamUnit, slot: int, saved: Tensor, content: int, form: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.unit = unit
        self.slot = slot
        self.dtype = saved.dtype
        self.size = saved.size()
        self.stride = saved.stride()
        self.offset = saved.storage_offset()
        self.version = unit.writes_of(slot)
        self.content = content  # published version of the weights
        self.form = form  # makes what autograd saved from this view of the weight; None: the view is that


class SavedWeights:
    """The pack and unpack hooks of one rank.

    Knows which storages are weights; not when units come or go: ``fetch(unit)`` returns once the unit is up."""

    def __init__(
        self,
        slots: Slots,
        fetch: Callable[[ParamUnit], None],
        content: Callable[[], int],
        used: Callable[[ParamUnit], None],
    ) -> None:
        """``content()``: the published version of the weights. ``used(unit)``: the caller's stream computes with it."""
        self._slots = slots
        self._fetch = fetch
        self._used = used
        self._content = content
        self._plain = self._plain_hooks()

    def push(self) -> None:
        """Push our hooks; they pass tensors that are not weights to the hooks below."""
        below = saved_tensor_hooks_below()
        if below is None:
            pack, unpack = self._plain
        elif getattr(below[0], "weights_of", None) is self:
            pack, unpack = below  # ours are on top already
        else:
            pack, unpack = self._delegating_hooks(*below)
        push_saved_tensor_hooks(pack, unpack)

    def pop(self) -> None:
        """Pop our hooks."""
        pop_saved_tensor_hooks()

    @outside_modes
    def pack(self, saved: Tensor) -> Handle | None:
        """A handle for a weight; None for any other tensor."""
        view, form = saved, None
        try:
            found = self._slots.get(storage_key(saved.untyped_storage()))
        except NotImplementedError:  # no strided tensor; a sparse one's values may be a weight
            if (parts := sparse_parts(saved)) is None:
                return None
            view, form = parts
            found = self._slots.get(storage_key(view.untyped_storage()))
        if found is None:
            return None
        self._used(found[0])
        return Handle(found[0], found[1], view, self._content(), form or lazy_sign(saved))

    @outside_modes
    def unpack(self, handle: Handle) -> Tensor:
        """The weight, with its unit up. Raises RuntimeError if it was written to in place or belongs to another
        step."""
        unit = handle.unit
        if handle.content != self._content() or handle.version != unit.writes_of(handle.slot):
            raise _modified(tuple(handle.size), handle.version, unit.layout.slots[handle.slot].name)
        self._fetch(unit)
        weight = unit.tensor(handle.slot, handle)
        return weight if handle.form is None else handle.form(weight)

    def below(self, hooks: tuple[PackHook, UnpackHook]) -> tuple[bool, tuple[PackHook, UnpackHook] | None]:
        """(whether ``hooks`` are ours, and if so the hooks below them)."""
        ours = getattr(hooks[0], "weights_of", None) is self
        return ours, getattr(hooks[0], "below", None) if ours else hooks

    def _plain_hooks(self) -> tuple[PackHook, UnpackHook]:
        @outside_modes
        def pack(saved: Tensor) -> Any:
            return self.pack(saved) or (saved, saved._version)

        @outside_modes
        def unpack(packed: Any) -> Tensor:
            if type(packed) is Handle:
                return self.unpack(packed)
            saved, version = packed
            if saved._version != version:
                raise _modified(tuple(saved.shape), version, None)
            return saved  # type: ignore[no-any-return]

        return self._mark(pack, None), unpack

    def _delegating_hooks(self, pack_below: PackHook, unpack_below: UnpackHook) -> tuple[PackHook, UnpackHook]:
        show = is_checkpoints(pack_below) or hasattr(pack_below, "weights_of")

        def pack(saved: Tensor) -> Any:
            handle = self.pack(saved)
            shown = pack_below(saved) if handle is None or show else None
            return shown if handle is None else handle

        def unpack(packed: Any) -> Tensor:
            return self.unpack(packed) if type(packed) is Handle else unpack_below(packed)

        return self._mark(pack, (pack_below, unpack_below)), unpack

    def _mark(self, pack: Any, below: tuple[PackHook, UnpackHook] | None) -> PackHook:
        """Mark a hook as ours and note the hooks below it, for ``push`` and ``below``."""
        pack.weights_of, pack.below = self, below
        return cast(PackHook, pack)


def _modified(shape: tuple[int, ...], expected: int, name: str | None) -> RuntimeError:
    what = f"parameter {name!r} of shape {list(shape)}" if name else f"a tensor of shape {list(shape)}"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} is no longer at version {expected}. Hint: a step() or an in-place operation between forward and "
        "backward changed it"
    )
