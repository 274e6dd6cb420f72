"""Buckets: flat host memory for pieces that are copied and updated together; each begins at a multiple of 64. And how a
bucket is updated: Adam by the tile kernels, or any other torch optimizer class by its own code.

[Note: tails] Torch computes the elements after a tensor's last full vector with scalar code, which rounds differently.
So the tile kernel updates whole lines of 64 elements, and torch's kernel the rest of each piece, as a tensor that
begins at a line. Vector widths divide 64, so torch splits this tensor into vectors and scalars exactly as it splits the
whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from rayzero.errors import ConfigError
from rayzero.hybrid.placement import Group, Piece
from rayzero.kernels import AdamMemory, AdamOptions, Kernel, adam_states, segments_of
from rayzero.kernels.moments import PlainMoment
from rayzero.kernels.optimizer_class import OptimizerMaker, State, by_group, step_alone
from rayzero.kernels.optimizer_states import load_into, prepare_states
from rayzero.kernels.torch_kernel import fused_adam
from rayzero.layout.model_layout import ALIGN, aligned
from rayzero.memory.mapping import host_zeros

Shape = tuple[int, ...]


def plan_buckets(pieces: Iterable[tuple[Piece, torch.dtype, torch.device]], bucket_bytes: int) -> list[list[Piece]]:
    """Group neighbouring pieces of one dtype and device into buckets of at most ``bucket_bytes`` of parameters; a piece
    larger than that has a bucket to itself."""
    buckets: list[list[Piece]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Piece], int]] = {}
    for piece, dtype, device in pieces:
        size = aligned(piece.numel) * dtype.itemsize
        bucket, filled = filling.get((dtype, device), ([], bucket_bytes))
        if filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(piece)
        filling[dtype, device] = bucket, filled + size
    return buckets


class Bucket:
    """Flat host memory for some pieces: masters, their rounded values for the device, and gradients. Knows memory; not
    who computes, copies or waits. Padding between pieces is always zero."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        shapes: Mapping[int, Shape],
        dtype: torch.dtype,
        *,
        working: torch.dtype,
        params_pinned_for: torch.device | None,
        grads_pinned_for: torch.device | None,
    ) -> None:
        """``shapes``: parameter index -> shape. ``dtype``: of the parameters and of their copies. ``working``: of the
        masters. ``params_pinned_for``, ``grads_pinned_for``: the CUDA device whose copies read or write them, if they
        are page-locked."""
        self.pieces = tuple(pieces)
        self.dtype = dtype
        self._shapes = [shapes[piece.param] if piece.whole else (piece.numel,) for piece in pieces]
        ends = list(accumulate(aligned(piece.numel) for piece in pieces))
        self.offsets = [end - aligned(piece.numel) for end, piece in zip(ends, pieces, strict=True)]
        self.numel = ends[-1]
        same = working is dtype
        self.master = host_zeros(self.numel, working, pinned_for=params_pinned_for if same else None)
        self.params = self.master if same else host_zeros(self.numel, dtype, pinned_for=params_pinned_for)
        self.grads: Tensor | None = None  # made at the first use, kept: gradients of every step land in it
        self.master_views = self.views(self.master)
        self.param_views = self.master_views if same else self.views(self.params)
        self.grad_views: list[Tensor] = []
        self._grads_pinned_for = grads_pinned_for

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat``, which is laid out like the bucket: one per piece, in the piece's shape."""
        cut = zip(self.offsets, self.pieces, self._shapes, strict=True)
        return [flat[at : at + piece.numel].view(shape) for at, piece, shape in cut]

    def gradient_memory(self, dtype: torch.dtype) -> Tensor:
        """1D memory for gradients of ``dtype``. Asking for another dtype replaces it and loses its contents."""
        if self.grads is None or self.grads.dtype is not dtype:
            self.grads = host_zeros(self.numel, dtype, pinned_for=self._grads_pinned_for)
            self.grad_views = self.views(self.grads)
        return self.grads

    def publish(self) -> None:
        """Round the masters to the parameters' dtype, if that differs."""
        if self.params is not self.master:
            self.params.copy_(self.master)

    @property
    def host_bytes(self) -> int:
        """Bytes of masters, rounded values and gradients (0 before the first one); optimizer states are not
        included."""
        apart = [] if self.params is self.master else [self.params]
        return sum(t.nbytes for t in (self.master, *apart, *([] if self.grads is None else [self.grads])))


def range_of(param: Tensor, piece: Piece) -> Tensor:
    """The piece's elements of ``param``, or of a tensor of its shape. A view if the piece is the whole parameter or
    ``param`` is contiguous; otherwise possibly a copy."""
    whole = param.detach()
    return whole if piece.whole else whole.reshape(-1)[piece.start : piece.stop]


# ---- updates --------------------------------------------------------------------------------------------------------


Groups = Mapping[int, Group]  # index of a parameter group -> its options


class TileAdam:
    """Adam or AdamW over a whole bucket, bit-equal to torch's fused kernel on the parameters. See [Note: tails].

    ``param_groups`` and ``state`` are like a torch optimizer's, over the masters. Knows moments and step counts; not
    where gradients come from. Moments are allocated at the first update."""

    def __init__(
        self, bucket: Bucket, groups: Groups, group_of: Sequence[int], kernel: Kernel, *, decoupled: bool
    ) -> None:
        """``group_of``: parameter index -> group. ``decoupled``: AdamW's weight decay."""
        self._bucket, self._kernel, self._decoupled = bucket, kernel, decoupled
        self.tensors: Sequence[Tensor] = bucket.master_views
        members = by_group(group_of[piece.param] for piece in bucket.pieces)
        self.group_indices = list(members)
        self.param_groups: list[Group] = [
            {"params": [bucket.master_views[i] for i in own], **groups[g]} for g, own in members.items()
        ]
        self._group_at = {i: at for at, own in enumerate(members.values()) for i in own}
        self._lengths = [piece.numel // ALIGN * ALIGN for piece in bucket.pieces]  # of their whole lines
        self._steps = [0] * len(bucket.pieces)
        self._begun = [False] * len(bucket.pieces)
        self._moments: dict[str, Tensor] = {}  # kind -> fp32, flat like the bucket
        self._views: dict[str, list[Tensor]] = {}
        self._options()  # refused now, not at the first step

    @property
    def state(self) -> Mapping[Tensor, State]:
        """Master -> its state, for masters that have one."""
        views = self._bucket.master_views
        return {views[i]: self.state_of(i) for i in range(len(views)) if self._begun[i]}

    @torch.no_grad()
    def update(self, present: Sequence[int], scales: Sequence[float]) -> None:
        """Update the masters of the pieces ``present`` (ascending) by their gradients, each multiplied by all of
        ``scales``."""
        options = self._options()
        self._allocate(amsgrad=any(option.amsgrad for option in options))
        gradients, scale = _scaled(self._bucket, scales)
        for index in present:
            self._steps[index] += 1
            self._begun[index] = True
        bucket = self._bucket
        segments = segments_of(
            ((bucket.offsets[i], self._lengths[i], (0,), self._group_at[i], self._steps[i]) for i in present), options
        )
        moments = {kind: PlainMoment(values) for kind, values in self._moments.items()}
        params = None if bucket.params is bucket.master else bucket.params
        memory = AdamMemory(master=bucket.master, states=moments, params=params)
        self._kernel.update(memory, [gradients], segments, scale)
        tails: dict[tuple[AdamOptions, int], list[int]] = {}
        for index in present:
            if self._lengths[index] < bucket.pieces[index].numel:
                tails.setdefault((options[self._group_at[index]], self._steps[index]), []).append(index)
        for (chosen, step), members in tails.items():
            self._update_tails(members, chosen, step, gradients, scale)

    def _update_tails(
        self, members: Sequence[int], options: AdamOptions, step: int, gradients: Tensor, scale: float
    ) -> None:
        """Update the elements of pieces after their last whole line. ``step`` counts this update."""
        bucket = self._bucket
        ranges = [
            slice(bucket.offsets[i] + self._lengths[i], bucket.offsets[i] + bucket.pieces[i].numel) for i in members
        ]
        grads = [gradients[tail].float() for tail in ranges]
        flats = [bucket.master, *self._moments.values()]
        masters, means, squares, *largest = [[flat[tail] for tail in ranges] for flat in flats]
        fused_adam(
            options,
            masters,
            grads if scale == 1.0 else torch._foreach_mul(grads, scale),
            means,
            squares,
            largest[0] if options.amsgrad else [],
            [torch.tensor(float(step), dtype=torch.float32, device="cpu")] * len(members),
        )
        if bucket.params is not bucket.master:
            torch._foreach_copy_([bucket.params[tail] for tail in ranges], masters)

    def _options(self) -> list[AdamOptions]:
        return [AdamOptions.from_hyper(group, decoupled=self._decoupled) for group in self.param_groups]

    def _allocate(self, *, amsgrad: bool) -> None:
        for kind in adam_states(amsgrad=amsgrad):
            if kind not in self._moments:
                self._moments[kind] = host_zeros(self._bucket.numel, torch.float32, pinned_for=None)
                self._views[kind] = self._bucket.views(self._moments[kind])

    def _kinds(self, index: int) -> tuple[str, ...]:
        return adam_states(amsgrad=bool(self.param_groups[self._group_at[index]].get("amsgrad")))

    def state_of(self, index: int) -> State:
        """The state of piece ``index`` in torch's format, the live tensors; empty before its first update."""
        if not self._begun[index]:
            return {}
        moments = {kind: self._views[kind][index] for kind in self._kinds(index) if kind in self._views}
        return {"step": torch.tensor(float(self._steps[index]), dtype=torch.float32, device="cpu"), **moments}

    def load(self, states: Sequence[State]) -> None:
        """Replace every piece's state by a copy of ``states``; an empty one is the state before the first update.
        Raises ConfigError that names what the state lacks for Adam."""
        for index, state in enumerate(states):
            self._begun[index], self._steps[index] = bool(state), int(state.get("step", 0))
            kinds = self._kinds(index)
            lacking = [kind for kind in ("step", *kinds) if kind not in state]
            if state and lacking:
                raise ConfigError(
                    f"the state to load has no {', '.join(lacking)} (it has {', '.join(state)}): "
                    "it was saved by another optimizer than Adam or AdamW with these options"
                )
            if state or self._moments:
                self._allocate(amsgrad="max_exp_avg_sq" in kinds)
            for kind, views in self._views.items():
                views[index].zero_()
                if kind in state:
                    views[index].copy_(state[kind].view_as(views[index]))

    def prepare(self) -> None:
        """Create the state of pieces that have none, with step count zero; weights do not change."""
        self._allocate(amsgrad=any(group.get("amsgrad") for group in self.param_groups))
        self._begun = [True] * len(self._begun)


class PieceOptimizer:
    """One torch optimizer over a tensor for each piece. Its class creates its states at the first update."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        pieces: Sequence[Piece],
        groups: Groups,
        group_of: Sequence[int],
        cls: type[torch.optim.Optimizer],
    ) -> None:
        """``tensors``: what is updated, by piece. ``group_of``: parameter index -> group."""
        self.tensors = tensors
        members = by_group(group_of[piece.param] for piece in pieces)
        self.group_indices = list(members)
        self._at = [i for own in members.values() for i in own]  # pieces in the optimizer's order
        params = [[cast("nn.Parameter", tensors[i]) for i in own] for own in members.values()]  # or leaves
        self.optimizer = OptimizerMaker(cls).build([groups[g] for g in self.group_indices], params)

    @property
    def param_groups(self) -> list[Group]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[Tensor, State]:
        return self.optimizer.state

    def state_of(self, index: int) -> State:
        return dict(self.optimizer.state.get(self.tensors[index], {}))

    def load(self, states: Sequence[State]) -> None:
        load_into(self.optimizer, [states[index] for index in self._at])

    def prepare(self) -> None:
        prepare_states(self.optimizer)


class ClassRule(PieceOptimizer):
    """An optimizer class of torch over a bucket's masters."""

    def __init__(
        self, bucket: Bucket, groups: Groups, group_of: Sequence[int], cls: type[torch.optim.Optimizer]
    ) -> None:
        """``group_of``: parameter index -> group."""
        self._bucket = bucket
        super().__init__([nn.Parameter(view) for view in bucket.master_views], bucket.pieces, groups, group_of, cls)

    @torch.no_grad()
    def update(self, present: Sequence[int], scales: Sequence[float]) -> None:
        _, scale = _scaled(self._bucket, scales)
        for index in present:
            grad = self._bucket.grad_views[index].to(self.tensors[index].dtype)
            self.tensors[index].grad = grad if scale == 1.0 else grad * scale
        step_alone(self.optimizer)
        for index in present:
            self.tensors[index].grad = None
        self._bucket.publish()


Rule = TileAdam | ClassRule  # the optimizer of one bucket


def _scaled(bucket: Bucket, scales: Sequence[float]) -> tuple[Tensor, float]:
    """The bucket's gradients, and the scale that the kernel still has to apply. The kernel applies a single fp32 scale
    itself; other products are rounded in the gradients' own memory, as torch would round them on the device."""
    grads = bucket.grads
    assert grads is not None, "gradients must arrive before a bucket's update"
    if not scales:
        return grads, 1.0
    now = len(scales) if grads.dtype is not torch.float32 else len(scales) - 1
    for scale in scales[:now]:
        grads.mul_(scale)
    return grads, 1.0 if now == len(scales) else scales[now]
