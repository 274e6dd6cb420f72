"""How a shard is updated: Adam by a tile kernel; any other torch optimizer by its own code, on flat pieces of
parameters if it is element-wise, else on whole parameters in their shapes (``ModelLayout.whole_parameters``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from rayzero.checkpoint.tensor_file import DeferredTensor
from rayzero.errors import StoreError
from rayzero.kernels import AdamMemory, AdamOptions, adam_states, choose_kernel, segments_of, splits_masters
from rayzero.kernels.moments import CODED, CodedMoment, Moment, packed_bytes
from rayzero.kernels.optimizer_class import OptimizerMaker
from rayzero.kernels.optimizer_states import in_pieces, is_scalar, leaves
from rayzero.kernels.optimizer_trial import require_owned
from rayzero.kernels.rank_sum import RankSum
from rayzero.kernels.torch_kernel import DEVICE_TILE, TILE, TorchKernel
from rayzero.layout.model_layout import Shard, aligned
from rayzero.owner.class_states import ShardOptimizer, StateRoom
from rayzero.owner.shard import OwnedShard, ShardWork
from rayzero.protocol.hyper import require_numbers
from rayzero.protocol.messages import STEP, Hyper, ModelSpec, group_and_like, group_number

_ADAM_NUMBERS: Hyper = {"lr": 0.0, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}


class UpdateRule(ABC):
    """A run's optimizer, applied to one shard at a time. Only the updater thread uses it."""

    kernel: str  # name of the kernel, for handshakes and reports
    packs = ""  # how moments are kept, if checkpoints get them so (``ModelSpec.checkpoint_moments``); "": as fp32
    state_kinds: tuple[str, ...] = ()  # fp32 states with a value for each element
    notes = False  # whether an update fills ``OwnedShard.changed``
    splits = False  # whether it keeps masters of trained bf16 units split
    room: Callable[[Shard], int] | None = None  # bytes of other states that a trained shard has; None: there are none

    @abstractmethod
    def update(self, owned: OwnedShard, work: ShardWork) -> None:
        """Update master, states and published parameters; slices without contributors stay as they are."""

    def fed(self, owned: OwnedShard, work: ShardWork, slices: Sequence[int]) -> Mapping[int, Tensor]:
        """What the update will feed into Newton-Schulz for these slices, (m, n) in bf16; changes nothing. Without those
        that have no gradient; empty if a former life has made the update."""
        return {}

    @abstractmethod
    def states(self, owned: OwnedShard) -> dict[str, Tensor]:
        """Kind -> 1D fp32, the shard's elements; copies of the states outside planned memory."""

    @abstractmethod
    def slice_states(self, owned: OwnedShard, index: int) -> Mapping[str, Tensor | DeferredTensor]:
        """Kind -> 1D fp32 state of slice ``index``, for a checkpoint."""

    def own_shapes(self, owned: OwnedShard, index: int) -> Mapping[str, tuple[int, ...]]:
        """Those of these states that have another shape than the parameter, whatever it is that they have."""
        return {}

    @abstractmethod
    def adopt(self, owned: OwnedShard, index: int, kinds: Collection[str]) -> None:
        """A checkpoint has states of these kinds for a slice, which may be in no group yet. ``own_shapes`` and
        ``restore`` follow; ``owned.steps`` is already restored."""

    @abstractmethod
    def restore(self, owned: OwnedShard, index: int, values: dict[str, Tensor]) -> None:
        """The inverse of ``slice_states``; ``owned.steps`` is already restored."""

    @abstractmethod
    def write(self, owned: OwnedShard, kind: str, values: Tensor) -> None:
        """Replace one state of a shard (``values``: 1D fp32, the shard's elements). STEP is written first and is then
        already in ``owned.steps``, because a parameter without updates has no state. Raises StoreError for an unknown
        kind."""

    @abstractmethod
    def regroup(self, owned: OwnedShard) -> None:
        """``owned.groups`` has changed; states stay."""


class AdamRule(UpdateRule):
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
        self.kernel, self.notes = host.name, self._kernel.notes
        self.splits = device is None and splits_masters(host.name, spec.moments)
        self.packs = spec.moments if spec.checkpoint_moments == "kept" and spec.moments in CODED else ""
        self.state_kinds = adam_states(amsgrad=any(options.amsgrad for options in self._options(spec.hyper)))

    def _options(self, hyper: tuple[Hyper, ...]) -> list[AdamOptions]:
        if self._parsed[0] is not hyper:
            for group, options in enumerate(hyper):
                require_numbers(group, options, _ADAM_NUMBERS)
            self._parsed = hyper, [AdamOptions.from_hyper(group, decoupled=self._decoupled) for group in hyper]
        return self._parsed[1]

    def update(self, owned: OwnedShard, work: ShardWork) -> None:
        """See ``UpdateRule.update``: one kernel call a shard."""
        assert owned.master is not None
        stamps = owned.stamps(work.version)
        params = None if owned.params is owned.master else owned.params
        memory = AdamMemory(
            master=owned.master, states=owned.states, params=params, stamps=stamps, changed=owned.changed
        )
        steps = (step + 1 for step in owned.steps)
        parts = zip(owned.slices, work.contributors, owned.groups, steps, strict=True)
        segments = segments_of(
            ((part.start, aligned(part.numel), ranks, group_and_like(of)[0], step) for part, ranks, of, step in parts),
            self._options(work.hyper),
            apart=any(not isinstance(gradient, Tensor) for gradient in work.gradients),
        )
        self._kernel.update(memory, work.gradients, segments, work.scale, limit=work.limit)

    def states(self, owned: OwnedShard) -> dict[str, Tensor]:
        """Decoded copies of moments in codes."""
        return {kind: owned.read(kind) for kind, state in owned.states.items() if state.coded}

    def slice_states(self, owned: OwnedShard, index: int) -> dict[str, Tensor | DeferredTensor]:
        """Views of the moments; those that are not kept as they are read are made when they are written."""
        part = owned.slices[index]
        return {
            kind: self._deferred(state, part.start, part.stop) if state.coded else state.read(part.start, part.stop)
            for kind, state in owned.states.items()
        }

    def _deferred(self, state: Moment, start: int, stop: int, *, copied: bool = False) -> DeferredTensor:
        """Elements start..stop of a moment in codes as a checkpoint gets them. ``copied``: nobody overwrites them."""
        numel = stop - start
        if not isinstance(state, CodedMoment):
            return DeferredTensor(numel=numel, dtype=torch.float32, make=partial(state.read, start, stop))
        return DeferredTensor(
            numel=packed_bytes(self.packs, numel) if self.packs else numel,
            dtype=torch.uint8 if self.packs else torch.float32,
            make=partial(state.packed if self.packs else state.read, start, stop),
            keep=None if copied else lambda: self._deferred(state.copied(start, stop), 0, numel, copied=True),
            kept_bytes=packed_bytes(_name_of(state), numel),
        )

    def adopt(self, owned: OwnedShard, index: int, kinds: Collection[str]) -> None:
        """Moments are there from the start."""

    def regroup(self, owned: OwnedShard) -> None:
        """Options come with each decision."""

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


def _name_of(state: CodedMoment) -> str:
    return next(name for name, dtype in CODED.items() if dtype is state.codes.dtype)


class ClassRule(UpdateRule):
    """Runs one instance of the class per shard, on fp32 parameters that are views of the shard's master.

    Knows the class and each shard's instance; nothing about what the class computes. What it keeps is in the shard's
    memory: [Note: states in place] in class_states.py."""

    kernel = "torch class"

    def __init__(self, spec: ModelSpec, cls: type[torch.optim.Optimizer]) -> None:
        """Raises UnsupportedError when owners cannot run ``cls`` with the options of one of the parameter groups."""
        self._make = OptimizerMaker(cls, spec.attributes)
        for group in spec.hyper:
            require_owned(self._make, group, whole=spec.layout.whole_parameters)
        self.room: StateRoom = StateRoom(self._make, spec)
        self._sums = RankSum(TILE)
        self._shards: dict[int, ShardOptimizer] = {}

    def _of(self, owned: OwnedShard) -> ShardOptimizer:
        if owned.shard.index not in self._shards:
            self._shards[owned.shard.index] = ShardOptimizer(self._make, self.room, owned)
        return self._shards[owned.shard.index]

    def update(self, owned: OwnedShard, work: ShardWork) -> None:
        """See ``UpdateRule.update``: one ``step()`` of the shard's instance, unless a former life has made it."""
        done, stamps = self._is_done(owned, work), owned.stamps(work.version)
        assert owned.master is not None
        assert owned.class_states is not None
        kept = owned.master, owned.class_states
        with nullcontext() if done or stamps is None else stamps.overwriting(kept):
            if not done:
                self._of(owned).step(work, self._sums)
            owned.publish(owned.master)

    def _is_done(self, owned: OwnedShard, work: ShardWork) -> bool:
        """Whether a former life has made this update. One that it was making when it ended is undone."""
        if self.room.meet(work.hyper):
            self._shards.clear()  # a class may make states of options when an instance is made
        stamps = owned.stamps(work.version)
        assert owned.master is not None
        assert owned.class_states is not None
        undone = stamps is not None and stamps.undone((owned.master, owned.class_states))
        done = stamps is not None and stamps.are_whole(0, owned.shard.numel)
        if undone or done:
            self._shards.pop(owned.shard.index, None)  # what it knows is not what the memory has
        return done

    def fed(self, owned: OwnedShard, work: ShardWork, slices: Sequence[int]) -> Mapping[int, Tensor]:
        """See ``UpdateRule.fed``."""
        return {} if self._is_done(owned, work) else self._of(owned).fed(work, self._sums, slices)

    def states(self, owned: OwnedShard) -> dict[str, Tensor]:
        """States of the whole shard by kinds; zero where a parameter has none."""
        kinds = self.room.kinds(owned.unit) - {STEP}
        found = {kind: torch.zeros(owned.shard.numel, dtype=torch.float32, device="cpu") for kind in kinds}
        for index, part in enumerate(owned.slices):
            for name, flat in self._of(owned).states_of(index).items():
                for kind, value in in_pieces(name, flat, part.numel).items():
                    if kind in found:
                        found[kind][part.start : part.start + value.numel()] = value
        return found

    def slice_states(self, owned: OwnedShard, index: int) -> dict[str, Tensor]:
        """Every tensor or number that the class keeps for the slice, except the step count; a number fills the
        slice."""
        return self._of(owned).states_of(index)

    def own_shapes(self, owned: OwnedShard, index: int) -> dict[str, tuple[int, ...]]:
        """See ``UpdateRule.own_shapes``."""
        ours = self._of(owned)
        tensors = {name: value for name, value in leaves(ours.form(index)).items() if not is_scalar(value)}
        return {name: tuple(each.shape) for name, each in tensors.items() if tuple(each.shape) != ours.shapes[index]}

    def adopt(self, owned: OwnedShard, index: int, kinds: Collection[str]) -> None:
        """See ``UpdateRule.adopt``."""
        if owned.groups[index] < 0 and owned.steps[index]:
            like = self.room.like(owned.unit, owned.slices[index], kinds)
            numbers = list(owned.groups)
            numbers[index] = group_number(-1, like)
            owned.groups = tuple(numbers)

    def restore(self, owned: OwnedShard, index: int, values: dict[str, Tensor]) -> None:
        """See ``UpdateRule.restore``. The step count is restored from the shard's."""
        self._of(owned).restore(index, values)

    def write(self, owned: OwnedShard, kind: str, values: Tensor) -> None:
        """See ``UpdateRule.write``."""
        if kind != STEP and kind not in (kinds := self.room.kinds(owned.unit)):
            raise StoreError(f"{self._make.name} keeps no {kind!r}; it keeps {', '.join(sorted(kinds - {STEP}))}")
        self._of(owned).write(kind, values)

    def regroup(self, owned: OwnedShard) -> None:
        """Let an instance over the new groups go on with what is in the shard's memory."""
        self._shards.pop(owned.shard.index, None)
