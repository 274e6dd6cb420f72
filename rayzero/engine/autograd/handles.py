"""Saved-tensor hooks: in place of a weight, autograd saves a handle.

[Note: handles] While a unit's forward or a touch runs, any tensor that autograd saves over a parameter's storage is
packed as (unit, slot, size, stride, offset, versions), also one that is the values of a sparse tensor; unpacking it
unshards the unit. So backward, recomputation, double backward and retain_graph fetch what they need. Every other tensor
goes to the hooks below ours on the stack; without any, we keep it with its version, because hooks turn off torch's own
check for in-place changes.

[Note: checkpointed weights] An activation checkpoint counts saved tensors and must count the same in forward and
recomputation, whichever hooks are above it, so it gets to see the weights too. Unpacking a weight asks it first, as
plain torch does, because the recomputation may write to the weight; a change of the weight since is then no error.
What the checkpoint keeps in a recomputation is then a stand-in without memory: the weight would pin its unit. Of a unit
that was open already when the checkpoint began, the forward gave the checkpoint the weight itself, so the recomputation
does, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from rayzero.engine.autograd.gradients import GradientCollector
from rayzero.engine.private_torch import (
    PackHook,
    UnpackHook,
    awaited_holder,
    is_checkpoints,
    is_recomputations,
    lazy_sign,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks_allowed,
    saved_tensor_hooks_below,
    sparse_parts,
    storage_key,
)
from rayzero.engine.step_clock import PassTimes
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.engine.units.schedule import Phase
from rayzero.engine.units.unit_cache import UnitCache
from rayzero.errors import UnsupportedError
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
        self.version: int | None = unit.writes_of(slot)  # None: it may be written to
        self.content = content  # published version of the weights
        self.form = form  # makes what autograd saved from this view of the weight; None: the view is that


class Checkpointed:
    """A weight that autograd saved inside an activation checkpoint, and what the checkpoint keeps for it."""

    __slots__ = ("handle", "shown")

    def __init__(self, handle: Handle, shown: Any) -> None:
        handle.version = None
        self.handle = handle
        self.shown = shown


class SavedWeights:
    """The pack and unpack hooks of one rank.

    Knows which storages are weights; not when units come or go."""

    def __init__(
        self, slots: Slots, collector: GradientCollector, passes: PassTimes, cache: UnitCache, *, resident: bool
    ) -> None:
        """``resident``: everything stays up until the step, so that weights that autograd saves stay valid."""
        self._slots = slots
        self._collector, self._passes, self._cache = collector, passes, cache
        self._resident = resident
        self._plain = self._plain_hooks()
        self._stand_ins: dict[Any, Tensor] = {}  # by size, dtype and device
        self._shown: WeakSet[Any] = WeakSet()  # what checkpoints gave for weights that have handles

    def push(self) -> bool:
        """Push our hooks, which pass tensors that are not weights to the hooks below; returns whether they are needed.
        Raises UnsupportedError where torch allows none."""
        if self._resident:
            return False
        if not saved_tensor_hooks_allowed():
            raise UnsupportedError(
                "torch.func.grad and vjp allow no saved-tensor hooks, but a model needs them unless all of its "
                "parameters are gathered; raise prefetch_buffer_size and gpu_param_memory_budget until they are, or "
                "use torch.autograd"
            )
        below = saved_tensor_hooks_below()
        if below is None:
            pack, unpack = self._plain
        elif getattr(below[0], "weights_of", None) is self:
            pack, unpack = below  # ours are on top already
        else:
            pack, unpack = self._delegating_hooks(*below)
        push_saved_tensor_hooks(pack, unpack)
        return True

    def pop(self) -> None:
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
        self._cache.used(found[0])
        return Handle(found[0], found[1], view, self._cache.version, form or lazy_sign(saved))

    @outside_modes
    def unpack(self, handle: Handle) -> Tensor:
        """The weight, with its unit up. Raises RuntimeError if it was written to in place or belongs to another
        step."""
        unit = handle.unit
        written = handle.version is not None and handle.version != unit.writes_of(handle.slot)
        if written or handle.content != self._cache.version:
            raise _modified(tuple(handle.size), handle.version, unit.layout.slots[handle.slot].name)
        if type(unit.params[handle.slot]).made is not nn.Parameter:  # type: ignore[attr-defined]
            _refuse_python(unit, handle.slot)
        self._bring_up(unit)
        weight = unit.tensor(handle.slot, handle.dtype, handle.size, handle.stride, handle.offset)
        return weight if handle.form is None else handle.form(weight)

    def _bring_up(self, unit: ParamUnit) -> None:
        """Under create_graph the node that unpacks the weight saves it again. Hooks pushed here see that; autograd pops
        them, because it restores its thread's state after every node."""
        backward = self._collector.in_backward()
        if backward:
            self._passes.begin_backward()
            if torch.is_grad_enabled():
                self.push()
        self._cache.use(unit, Phase.BACKWARD if backward else Phase.FORWARD)

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
        last = pack_below
        while (further := getattr(last, "below", None)) is not None:  # through hooks of other engines
            last = further[0]
        checkpoints, recomputes = is_checkpoints(last), is_recomputations(last)

        def pack(saved: Tensor) -> Any:
            handle = self.pack(saved)
            if handle is None:
                return pack_below(saved)
            if recomputes:
                pack_below(self._stand_in(saved) if awaited_holder(last) in self._shown else saved)
            if not checkpoints:
                return handle
            shown = pack_below(saved)
            self._shown.add(shown)
            return Checkpointed(handle, shown)

        def unpack(packed: Any) -> Tensor:
            if type(packed) is Checkpointed:
                unpack_below(packed.shown)
                return self.unpack(packed.handle)
            return self.unpack(packed) if type(packed) is Handle else unpack_below(packed)

        return self._mark(pack, (pack_below, unpack_below)), unpack

    @outside_modes
    def _stand_in(self, saved: Tensor) -> Tensor:
        """A tensor of one element that looks like ``saved``."""
        like = (saved.size(), saved.dtype, saved.device)
        found = self._stand_ins.get(like)
        if found is None:
            with torch.inference_mode(False):
                found = torch.empty(1, dtype=saved.dtype, device=saved.device).expand(saved.size())
            self._stand_ins[like] = found
        return found

    def _mark(self, pack: Any, below: tuple[PackHook, UnpackHook] | None) -> PackHook:
        """Mark a hook as ours and note the hooks below it, for ``push`` and ``below``."""
        pack.weights_of, pack.below = self, below
        return cast(PackHook, pack)


_OURS = (__file__, outside_modes.__code__.co_filename)


def _refuse_python(unit: ParamUnit, slot: int) -> None:
    """Raise UnsupportedError if Python code unpacks a weight of another class than nn.Parameter: torch gives it a plain
    tensor for what a hook has packed, so that the code would do something else. Torch's own operations do not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OURS:
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name != "_engine_run_backward":
        kind = type(unit.params[slot]).made.__name__  # type: ignore[attr-defined]
        raise UnsupportedError(
            f"a backward in Python ({frame.f_code.co_name} at {frame.f_code.co_filename}:{frame.f_lineno}) reads "
            f"{unit.layout.slots[slot].name!r} from what autograd saved, where it is no {kind} any more; save a "
            "copy of it (weight.detach().clone()), or raise prefetch_buffer_size and gpu_param_memory_budget until the "
            "whole model stays up"
        )


def _modified(shape: tuple[int, ...], expected: int | None, name: str | None) -> RuntimeError:
    what = f"parameter {name!r} of shape {list(shape)}" if name else f"a tensor of shape {list(shape)}"
    same = "the same" if expected is None else f"at version {expected}"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} is no longer {same}. Hint: a step() or an in-place operation between forward and backward changed it"
    )
