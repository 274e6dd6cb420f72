"""How a shard is updated: Adam by a tile kernel; any other element-wise torch optimizer by its own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rayzero.checkpoint.files.tensor_file import DeferredTensor
from rayzero.kernels import AdamMemory, AdamOptions, adam_states, choose_kernel, segments_of
from rayzero.kernels.moments import CODED, CodedMoment, packed_bytes
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
