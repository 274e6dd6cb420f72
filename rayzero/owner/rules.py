"""How a shard is updated: Adam by a tile kernel; any other torch optimizer by its own code, on flat pieces of
parameters if it is element-wise, else on whole parameters in their shapes (``ModelLayout.whole_parameters``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from rayzero.checkpoint.files.tensor_file import DeferredTensor
from rayzero.errors import StoreError, UnsupportedError
from rayzero.kernels import AdamMemory, AdamOptions, adam_states, choose_kernel, segments_of
from rayzero.kernels.moments import CODED, CodedMoment, packed_bytes
from rayzero.kernels.optimizer_class import (
    OptimizerMaker,
    by_group,
    flat_states,
    is_scalar,
    restored_state,
    scalar_like,
    set_options,
    state_template,
    step_alone,
    unkept,
)
from rayzero.kernels.optimizer_trial import require_owned
from rayzero.kernels.optimizers import maker_of_group
from rayzero.kernels.rank_sum import RankSum
from rayzero.kernels.torch_kernel import DEVICE_TILE, TorchKernel
from rayzero.layout.model_layout import aligned
from rayzero.owner.shard import OwnedShard, ShardWork
from rayzero.protocol.hyper import require_numbers
from rayzero.protocol.messages import STEP, Hyper, ModelSpec

OnTile = Callable[[int, int], None]

_ADAM_NUMBERS: Hyper = {"lr": 0.0, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}


class UpdateRule(Protocol):
    """A run's optimizer, applied to one shard at a time. Only the updater thread uses it."""

    kernel: str  # name of the kernel, for handshakes and reports
    packs: str  # how moments are kept, if checkpoints get them so (``ModelSpec.checkpoint_moments``); "": as fp32
    state_kinds: tuple[str, ...]  # fp32 states that live in the owner's planned memory

    def update(self, owned: OwnedShard, work: ShardWork, on_tile: OnTile) -> None:
        """Update master, states and published parameters; slices without contributors stay as they are."""
        ...

    def states(self, owned: OwnedShard) -> dict[str, Tensor]:
        """Kind -> 1D fp32, the shard's elements; copies of the states outside planned memory."""
        ...

    def slice_states(self, owned: OwnedShard, index: int) -> Mapping[str, Tensor | DeferredTensor]:
        """Kind -> 1D fp32 state of slice ``index``, for a checkpoint."""
        ...

    def restore(self, owned: OwnedShard, index: int, values: dict[str, Tensor]) -> None:
        """The inverse of ``slice_states``; ``owned.steps`` is already restored."""
        ...

    def write(self, owned: OwnedShard, kind: str, values: Tensor) -> None:
        """Replace one state of a shard (``values``: 1D fp32, the shard's elements). STEP is written first and is then
        already in ``owned.steps``, because a parameter without updates has no state. Raises StoreError for an unknown
        kind."""
        ...

    def regroup(self, owned: OwnedShard) -> None:
        """``owned.groups`` has changed; states stay."""
        ...


class AdamRule:
    """Adam or AdamW by a tile kernel."""

    def __init__(self, spec: ModelSpec, *, decoupled: bool, device: torch.device | None = None) -> None:
        """``decoupled``: AdamW's weight decay. ``device``: where masters and moments lie; None: the host.

        On CUDA torch's fused kernel computes, with its own rounding; ``kernel`` then names what sums squares on the
        host."""
        host = choose_kernel(spec.kernel)
        on_cuda = device is not None and device.type == "cuda"
        self._kernel = TorchKernel(DEVICE_TILE, threads=1, device=device) if on_cuda else host
        self._decoupled = decoupled
        self._parsed: tuple[tuple[Hyper, ...], list[AdamOptions]] = ((), [])  # of the last decision
        self.kernel = host.name
        self.packs: str = spec.moments if spec.checkpoint_moments == "kept" and spec.moments in CODED else ""
        self.state_kinds = adam_states(amsgrad=any(options.amsgrad for options in self._options(spec.hyper)))

    def _options(self, hyper: tuple[Hyper, ...]) -> list[AdamOptions]:
        if self._parsed[0] is not hyper:
            for group, options in enumerate(hyper):
                require_numbers(group, options, _ADAM_NUMBERS)
            self._parsed = hyper, [AdamOptions.from_hyper(group, decoupled=self._decoupled) for group in hyper]
        return self._parsed[1]

    def update(self, owned: OwnedShard, work: ShardWork, on_tile: OnTile) -> None:
        """See ``UpdateRule.update``: one kernel call a shard."""
        assert owned.master is not None
        memory = AdamMemory.with_moments(owned.master, owned.states, owned.params, owned.stamps(work.version))
        steps = (step + 1 for step in owned.steps)
        parts = zip(owned.slices, work.contributors, owned.groups, steps, strict=True)
        segments = segments_of(
            ((part.start, aligned(part.numel), ranks, group, step) for part, ranks, group, step in parts),
            self._options(work.hyper),
            apart=any(not isinstance(gradient, Tensor) for gradient in work.gradients),
        )
        self._kernel.update(memory, work.gradients, segments, work.scale, on_tile, limit=work.limit)

    def states(self, owned: OwnedShard) -> dict[str, Tensor]:
        """Decoded copies of moments in codes."""
        return {kind: owned.read(kind) for kind, state in owned.states.items() if state.coded}

    def slice_states(self, owned: OwnedShard, index: int) -> dict[str, Tensor | DeferredTensor]:
        """Views of the moments; those in codes are decoded, or packed, when they are written."""
        part = owned.slices[index]
        return {
            kind: self._deferred(state, part.start, part.stop)
            if isinstance(state, CodedMoment)
            else state.read(part.start, part.stop)
            for kind, state in owned.states.items()
        }

    def _deferred(self, state: CodedMoment, start: int, stop: int, *, copied: bool = False) -> DeferredTensor:
        """Elements start..stop of a moment in codes as a checkpoint gets them. ``copied``: nobody overwrites them."""
        numel = stop - start
        return DeferredTensor(
            numel=packed_bytes(self.packs, numel) if self.packs else numel,
            dtype=torch.uint8 if self.packs else torch.float32,
            make=partial(state.packed if self.packs else state.read, start, stop),
            keep=None if copied else lambda: self._deferred(state.copied(start, stop), 0, numel, copied=True),
            kept_bytes=packed_bytes(_name_of(state), numel),
        )

    def restore(self, owned: OwnedShard, index: int, values: dict[str, Tensor]) -> None:
        """Copy the moments back."""
        part = owned.slices[index]
        for kind, state in owned.states.items():
            state.write(part.start, part.stop, values[kind])

    def write(self, owned: OwnedShard, kind: str, values: Tensor) -> None:
        """Copy moments in place; the shard keeps step counts itself."""
        if kind == STEP:
            return
        if kind not in owned.states:
            owned.read(kind)  # raises
        for part in owned.slices:
            owned.states[kind].write(part.start, part.stop, values[part.start : part.stop])

    def regroup(self, owned: OwnedShard) -> None:
        """Nothing to do: options are looked up at every update."""


def _name_of(state: CodedMoment) -> str:
    return next(name for name, dtype in CODED.items() if dtype is state.codes.dtype)


class ClassRule:
    """Runs one instance of the class per shard, on fp32 parameters that are views of the shard's master.

    Knows the class and each shard's instance; nothing about what the class computes. The class creates its states
    itself at a parameter's first update, as in torch, so they are outside the planned memory."""

    kernel = "torch class"
    packs = ""
    state_kinds: tuple[str, ...] = ()

    def __init__(self, spec: ModelSpec, cls: type[torch.optim.Optimizer]) -> None:
        """Raises UnsupportedError when owners cannot run ``cls`` with the options of one of the parameter groups."""
        self._make, self._whole = OptimizerMaker(cls, spec.attributes), spec.layout.whole_parameters
        for group in spec.hyper:
            require_owned(self._make, group, whole=self._whole)
        self._hyper = spec.hyper
        self._kinds = {kind for group in spec.hyper for kind in state_template(self._make, group)} - {STEP}
        self._shards: dict[int, _ShardOptimizer] = {}

    def _of(self, owned: OwnedShard) -> _ShardOptimizer:
        if owned.shard.index not in self._shards:
            self._shards[owned.shard.index] = _ShardOptimizer(self._make, self._hyper, owned, whole=self._whole)
        return self._shards[owned.shard.index]

    def update(self, owned: OwnedShard, work: ShardWork, on_tile: OnTile) -> None:
        """See ``UpdateRule.update``: one ``step()`` of the shard's instance."""
        stamps = owned.stamps(work.version)
        with stamps.writing(0, owned.shard.numel) if stamps is not None else nullcontext():
            self._of(owned).step(work)
            assert owned.master is not None
            owned.publish(owned.master)
        on_tile(1, 1)

    def states(self, owned: OwnedShard) -> dict[str, Tensor]:
        """Element-wise states of the whole shard; zero where a parameter was never updated."""
        return {
            kind: torch.zeros(owned.shard.numel, dtype=torch.float32, device="cpu") for kind in self._kinds
        } | self._of(owned).gathered()

    def slice_states(self, owned: OwnedShard, index: int) -> dict[str, Tensor]:
        """Every tensor or number that the class keeps for the slice, except the step count; a number fills the
        slice."""
        return self._of(owned).states_of(index)

    def restore(self, owned: OwnedShard, index: int, values: dict[str, Tensor]) -> None:
        """See ``UpdateRule.restore``. The step count is restored from the shard's."""
        self._of(owned).restore(index, values, owned.steps[index])

    def write(self, owned: OwnedShard, kind: str, values: Tensor) -> None:
        """See ``UpdateRule.write``."""
        if kind not in self._kinds and kind != STEP:
            raise StoreError(f"{self._make.name} keeps no {kind!r}; it keeps {', '.join(sorted(self._kinds))}")
        self._of(owned).write(kind, values)

    def regroup(self, owned: OwnedShard) -> None:
        """Create an instance over the new groups, which takes over the states."""
        was = self._shards.pop(owned.shard.index, None)
        if was is not None:
            self._of(owned).take_states(was)


class _ShardOptimizer:
    """One shard's instance of the class."""

    def __init__(self, make: OptimizerMaker, hyper: Sequence[Hyper], owned: OwnedShard, *, whole: bool) -> None:
        """``hyper``: options to build the instance with; each step brings its own options, those of later groups
        included. ``whole``: the slices are whole parameters."""
        assert owned.master is not None
        self._make, self._owned = make, owned
        self._begun: set[int] = set()  # slices whose first step has left states that can be kept
        self._ranges = [(part.start, part.start + aligned(part.numel)) for part in owned.slices]
        shapes = [owned.unit.slots[part.slot].shape if whole else (aligned(part.numel),) for part in owned.slices]
        self.params = [
            Parameter(_shaped(owned.master[start:stop], shape))
            for (start, stop), shape in zip(self._ranges, shapes, strict=True)
        ]
        slices = by_group(owned.groups)  # groups without a slice here would be empty
        self._used = list(slices)
        members = [[self.params[index] for index in own] for own in slices.values()]
        self._hyper = [hyper[group if group < len(hyper) else 0] for group in owned.groups]  # of each slice
        self._optimizer = make.build([self._hyper[own[0]] for own in slices.values()], members)

    def step(self, work: ShardWork) -> None:
        set_options(self._optimizer, [work.hyper[used] for used in self._used])
        for param, ranks, (start, stop) in zip(self.params, work.contributors, self._ranges, strict=True):
            param.grad = _shaped(_gradient(work, ranks, start, stop), param.shape).to(param.device) if ranks else None
        if first := {index for index, ranks in enumerate(work.contributors) if ranks} - self._begun:
            self._first_step(first)
        else:
            step_alone(self._optimizer)
        for param in self.params:
            param.grad = None

    def _first_step(self, slices: set[int]) -> None:
        """Step slices that have not stepped before. Raises UnsupportedError, and changes nothing, if this leaves states
        that cannot be kept: a class may change its mind at sizes that no trial has."""
        master = self._owned.master
        assert master is not None
        before = master.clone()
        step_alone(self._optimizer)
        for index in sorted(slices):
            param = self.params[index]
            if odd := unkept(self._optimizer.state.get(param, {}), param.shape):
                with torch.no_grad():
                    master.copy_(before)
                name = maker_of_group(self._make, self._hyper[index]).name
                raise UnsupportedError(
                    f"{name} cannot run on shards: at its first step it made {odd}; no value was changed. Use "
                    "an optimizer that keeps numbers or one value for each element"
                )
        self._begun |= slices

    def states_of(self, index: int) -> dict[str, Tensor]:
        state = self._optimizer.state.get(self.params[index], {})
        return flat_states(state, self._owned.slices[index].numel, self._owned.steps[index])

    def gathered(self) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        for index, part in enumerate(self._owned.slices):
            for name, value in self.states_of(index).items():
                out = whole.setdefault(name, torch.zeros(self._owned.shard.numel, dtype=torch.float32, device="cpu"))
                out[part.start : part.stop] = value
        return whole

    def restore(self, index: int, values: dict[str, Tensor], step: int) -> None:
        if not step:
            return
        self._optimizer.state[self.params[index]] = restored_state(self._instance(index), values, step)

    def write(self, kind: str, values: Tensor) -> None:
        for index, part in enumerate(self._owned.slices):
            if kind == STEP:
                self._restart(index, self._owned.steps[index])
                continue
            state, new = self._optimizer.state.get(self.params[index], {}), values[part.start : part.stop]
            if kind in state and is_scalar(state[kind]):
                state[kind] = scalar_like(state[kind], float(new[0]))
            elif kind in state:
                state[kind].reshape(-1)[: part.numel].copy_(new)

    def _restart(self, index: int, step: int) -> None:
        """Set a parameter's state to that after ``step`` updates; its values are written later."""
        param = self.params[index]
        self._optimizer.state.pop(param, None)
        if step:
            self.restore(index, {}, step)
            return
        initial = self._instance(index)
        if initial.state:  # made before the first step
            self._optimizer.state[param] = dict(next(iter(initial.state.values())))

    def take_states(self, other: _ShardOptimizer) -> None:
        for ours, theirs in zip(self.params, other.params, strict=True):
            if theirs in other._optimizer.state:
                self._optimizer.state[ours] = other._optimizer.state[theirs]

    def _instance(self, index: int) -> torch.optim.Optimizer:
        """A new instance over a copy of one slice's parameter alone."""
        return self._make.build([self._hyper[index]], [[Parameter(self.params[index].detach().clone())]])


def _shaped(values: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of flat ``values``, in a shape."""
    return values[: math.prod(shape)].view(shape)


def _gradient(work: ShardWork, ranks: Sequence[int], start: int, stop: int) -> Tensor:
    summed = RankSum(stop - start).sum(work.gradients, ranks, start, stop)
    return (summed * work.scale).clamp_(-work.limit, work.limit)
