"""The device side: a torch optimizer that updates the parameters that stay there, or their fp32 masters. Both sides
together: which side has which piece, and masters and states in torch's format. And how both are built from the
optimizer's settings and parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from rayzero.hybrid.buckets import Bucket, ClassRule, Groups, PieceOptimizer, Rule, TileAdam, plan_buckets, range_of
from rayzero.hybrid.host_side import BucketRun, HostSide, gradient_of
from rayzero.hybrid.placement import (
    Group,
    HyperLink,
    OptimizerClass,
    Piece,
    Placement,
    Targets,
    check_param,
    decide,
    fused,
    numbers_of,
    the_device,
)
from rayzero.kernels import ADAMS, Kernel
from rayzero.kernels.optimizer_class import (
    OptimizerMaker,
    State,
    on_cpu,
    options_of,
    refuse_reads,
    step_alone,
)
from rayzero.kernels.optimizer_states import state_bytes, zero_state
from rayzero.kernels.optimizer_trial import try_class
from rayzero.lanes import Lane, make_lane

MASTER = "master_param"  # key of a parameter's fp32 master in its state
_CPU = torch.device("cpu")
_Place = tuple[Piece, "Rule | DeviceSide", int]  # a piece, what updates it, and its position there
States = Mapping[Tensor, State]


class DeviceSide(PieceOptimizer):
    """The pieces that stay on the device, and the optimizer that updates them.

    The optimizer updates a whole parameter directly if it needs no master; for a range of one, it updates a Parameter
    over the same memory. Knows the device's pieces; not the host's."""

    def __init__(
        self,
        pieces: Sequence[tuple[Piece, Tensor]],
        groups: Groups,
        group_of: Sequence[int],
        cls: type[torch.optim.Optimizer],
        *,
        fp32: bool,
    ) -> None:
        """``fp32``: 16-bit parameters are updated through fp32 masters."""
        self.pieces = [piece for piece, _ in pieces]
        self._params = [param for _, param in pieces]
        self.is_master = [fp32 and param.dtype in (torch.bfloat16, torch.float16) for param in self._params]
        super().__init__([self._stepped(at) for at in range(len(pieces))], self.pieces, groups, group_of, cls)

    def _stepped(self, at: int) -> Tensor:
        piece, param = self.pieces[at], self._params[at]
        if self.is_master[at]:
            return nn.Parameter(range_of(param, piece).float())
        return param if piece.whole else nn.Parameter(range_of(param, piece))

    def masters(self) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces that are updated through a master, each with that."""
        stepped = zip(self.pieces, self.tensors, self.is_master, strict=True)
        return ((piece, tensor) for piece, tensor, is_master in stepped if is_master)

    def step(self) -> list[int]:
        """Update every piece that has a gradient and round its master back; returns the positions of those pieces."""
        grads = [gradient_of(param) for param in self._params]
        present = [at for at, grad in enumerate(grads) if grad is not None]
        lent = [at for at in present if self.tensors[at].grad is not grads[at]]
        kept = [self.tensors[at].grad for at in lent]  # beside a decoupled_grad
        for at in lent:
            self.tensors[at].grad = _fit(cast("Tensor", grads[at]), self.pieces[at], self.tensors[at])
        step_alone(self.optimizer)
        for at, grad in zip(lent, kept, strict=True):
            self.tensors[at].grad = grad
        back = [at for at in present if self.is_master[at]]
        if back:
            targets = [range_of(self._params[at], self.pieces[at]) for at in back]
            torch._foreach_copy_(targets, [self.tensors[at] for at in back])
        return present


def _fit(grad: Tensor, piece: Piece, stepped: Tensor) -> Tensor:
    """The piece's gradient in the shape and dtype of ``stepped``; ``grad`` itself if they already agree."""
    found = grad if piece.whole else range_of(grad, piece)
    return found if found.dtype is stepped.dtype else found.to(stepped.dtype)


class Sides:
    """The host's buckets and the device's optimizer, joined parameter by parameter.

    Knows pieces, masters and states; not steps, gradients, or why a side has a piece. No copy or update may be in
    flight when masters or states are read or written."""

    def __init__(
        self,
        params: Sequence[Tensor],
        host: HostSide,
        device: DeviceSide | None,
        device_link: HyperLink,
        working: Sequence[torch.dtype],
    ) -> None:
        """``working``: the dtype that each parameter is updated in."""
        self.params, self.host, self.device, self.device_link = list(params), host, device, device_link
        self._apart = [kind is not param.dtype for kind, param in zip(working, params, strict=True)]
        self._places = _places(host.runs, device)
        self.begun: set[int] = set()  # parameters (ids) that were updated or loaded
        self._versions: dict[int, int] = {}  # parameter -> torch's count of writes to it when its master was last equal

    # ---- masters

    @torch.no_grad()
    def load_masters(self, states: States) -> None:
        """Set every master to its parameter's value, or to the ``master_param`` that ``states`` has for it."""
        for piece, master in self._masters():
            master.copy_(range_of(self._master_for(piece, states), piece))
        self.remember(range(len(self.params)))

    def _master_for(self, piece: Piece, states: States) -> Tensor:
        param = self.params[piece.param]
        master = states.get(param, {}).get(MASTER) if self._apart[piece.param] else None
        return param if master is None else master

    def _masters(self) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces that the host has, and those that the device updates through a master; each with its master."""
        for run in self.host.runs:
            yield from zip(run.bucket.pieces, run.bucket.master_views, strict=True)
        if self.device is not None:
            yield from self.device.masters()

    def written(self, indices: Iterable[int]) -> set[int]:
        """Which of these parameters were written to, not by this optimizer, since they last equalled their masters."""
        return {index for index in indices if self.params[index]._version != self._versions.get(index)}

    def take_over(self, written: set[int]) -> None:
        """Update the masters, on both sides, of parameters that were written to."""
        for piece, master in self._masters():
            if piece.param in written:
                _take_over(master, range_of(self.params[piece.param], piece))
        self.remember(written)

    def remember(self, indices: Iterable[int]) -> None:
        """Record that these parameters equal their masters now."""
        for index in indices:
            self._versions[index] = self.params[index]._version

    def forget_writes(self) -> None:
        """Treat all parameters as written to."""
        self._versions.clear()

    # ---- states

    def states(self) -> dict[Tensor, State]:
        """Parameter -> its state, for those with a first update; includes masters that are separate from the
        parameter."""
        found = {self.params[index]: self._state_of(index) for index in self._places}
        return {param: state for param, state in found.items() if state}

    def captured(self) -> dict[Tensor, State]:
        """``states`` with the masters of all parameters."""
        return {
            self.params[index]: self._state_of(index) | ({MASTER: self._master_of(index)} if self._apart[index] else {})
            for index in self._places
        }

    def _state_of(self, index: int) -> State:
        parts = [(piece, updater.state_of(at)) for piece, updater, at in self._places[index]]
        state = join(parts, self.params[index].shape, _CPU)
        return (
            {**state, MASTER: self._master_of(index)}
            if self._apart[index] and id(self.params[index]) in self.begun
            else state
        )

    def _master_of(self, index: int) -> Tensor:
        parts = [(piece, {MASTER: updater.tensors[at].detach()}) for piece, updater, at in self._places[index]]
        master: Tensor = join(parts, self.params[index].shape, _CPU)[MASTER]
        return master

    def load_states(self, states: States, groups: Sequence[Group]) -> None:
        """Replace every parameter's state by a copy of ``states``, or by that before the first step if it has none
        there. ``groups``: the options that belong to it."""
        for link in (*(run.link for run in self.host.runs), self.device_link):
            link.push(groups)
        for run in self.host.runs:
            run.rule.load([self._given(piece, states) for piece in run.bucket.pieces])
        if self.device is not None:
            self.device.load([self._given(piece, states) for piece in self.device.pieces])

    def _given(self, piece: Piece, states: States) -> State:
        param = self.params[piece.param]
        state = {key: value for key, value in states.get(param, {}).items() if key != MASTER}
        return cut(state, piece, param.shape)

    def prepare(self) -> None:
        """Create the states of all parameters, as they are before a first step."""
        for run in self.host.runs:
            run.rule.prepare()
        if self.device is not None:
            self.device.prepare()
        self.begun.update(id(self.params[index]) for index in self._places)

    # ---- what it came to

    def placement(self, device: torch.device) -> Placement:
        """What each side updates. ``device``: of the parameters that either side could update."""
        movable = [p for run in self.host.runs for p in run.bucket.pieces if self.params[p.param].device == device]
        offloaded = self._param_bytes(movable)
        kept = 0 if self.device is None else self._param_bytes(self.device.pieces)
        return Placement(
            offload_fraction=offloaded / max(1, offloaded + kept),
            offloaded_bytes=offloaded,
            device_bytes=kept,
            num_buckets=len(self.host.runs),
            host_memory_bytes=sum(run.bucket.host_bytes + _state_bytes(run.rule.state) for run in self.host.runs),
            device_memory_bytes=0 if self.device is None else self._device_memory(self.device),
        )

    def _param_bytes(self, pieces: Iterable[Piece]) -> int:
        return sum(piece.numel * self.params[piece.param].element_size() for piece in pieces)

    def _device_memory(self, side: DeviceSide) -> int:
        return _state_bytes(side.optimizer.state) + sum(master.nbytes for _, master in side.masters())


def _places(runs: Sequence[BucketRun], device: DeviceSide | None) -> dict[int, list[_Place]]:
    """Parameter -> the places of its pieces, ascending."""
    found: dict[int, list[_Place]] = defaultdict(list)
    updaters: list[tuple[Rule | DeviceSide, Sequence[Piece]]] = [(run.rule, run.bucket.pieces) for run in runs]
    for updater, pieces in updaters + ([] if device is None else [(device, device.pieces)]):
        for position, piece in enumerate(pieces):
            found[piece.param].append((piece, updater, position))
    return {index: sorted(places, key=lambda place: place[0].start) for index, places in sorted(found.items())}


def _take_over(master: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``master``, except where ``master`` already rounds to it: there it keeps its low bits."""
    now = value.to(master.device)
    master.copy_(now if now.dtype is master.dtype else torch.where(master.to(now.dtype) == now, master, now.to(master)))


def _state_bytes(states: Mapping[Any, State]) -> int:
    return sum(value.nbytes for state in states.values() for value in state.values() if isinstance(value, Tensor))


def join(parts: Sequence[tuple[Piece, State]], shape: Sequence[int], device: torch.device) -> State:
    """A parameter's state. ``parts``: its pieces in ascending order. A single whole piece gives its live tensors; of
    several pieces, tensors with one value per element are joined into new ones of ``shape`` on ``device``."""
    if len(parts) == 1 and parts[0][0].whole:
        return dict(parts[0][1])
    first = next((state for _, state in parts if state), {})
    return {key: _joined(key, parts, shape, device) for key in first}


def _joined(key: str, parts: Sequence[tuple[Piece, State]], shape: Sequence[int], device: torch.device) -> Any:
    values = [state[key] for _, state in parts]
    if not all(_per_element(value, piece) for value, (piece, _) in zip(values, parts, strict=True)):
        return values[0]
    return torch.cat([value.to(device) for value in values]).view(*shape)


def _per_element(value: Any, piece: Piece) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == piece.numel


def cut(state: State, piece: Piece, shape: Sequence[int]) -> State:
    """One piece's state, taken from the whole parameter's: slices of tensors that have ``shape``, other entries
    unchanged."""
    if piece.whole:
        return dict(state)
    return {
        key: value.reshape(-1)[piece.start : piece.stop]
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == torch.Size(shape)
        else value
        for key, value in state.items()
    }


# ---- building -------------------------------------------------------------------------------------------------------


_TILED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(kw_only=True)
class Builder:
    """Builds one optimizer's two sides, at first and whenever parameters move between them. Owns the lanes."""

    cpu_class: OptimizerClass
    gpu_class: OptimizerClass
    fp32: bool  # 16-bit parameters are updated through fp32 masters
    pin_grads: bool
    pin_params: bool
    overlap: bool
    kernel: Kernel
    lane: Lane | None  # who copies; None: made here
    _lanes: dict[torch.device, Lane] = field(default_factory=dict)

    def build(self, params: Sequence[Tensor], group_of: Sequence[int], groups: Sequence[Group], to: Targets) -> Sides:
        """Both sides; the caller loads masters and states into them. ``group_of``: parameter index -> group. Raises
        UnsupportedError for a parameter or class that cannot be offloaded, and names it."""
        for index, param in enumerate(params):
            check_param(index, param)
        working = [self._working(param) for param in params]
        host, kept = decide(
            params,
            to,
            the_device(params),
            elementwise=self._can_cut(groups),
            device_cost=[] if to.device_memory_budget is None else self._device_costs(params, group_of, groups),
        )
        placed = ((piece, params[piece.param].dtype, params[piece.param].device) for piece in host)
        runs = [self._run(run, params, group_of, groups) for run in plan_buckets(placed, to.bucket_bytes)]
        device = self._device_side(kept, params, group_of, groups) if kept else None
        return Sides(
            params,
            HostSide(runs, threads=self.overlap),
            device,
            self._device_link(device),
            working,
        )

    def close(self) -> None:
        """End the lanes that were made here. Idempotent."""
        for lane in self._lanes.values():
            lane.close()

    def _working(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.fp32 and param.dtype in (torch.bfloat16, torch.float16) else param.dtype

    def _can_cut(self, groups: Sequence[Group]) -> bool:
        """Whether a parameter may lie on both sides: both classes are element-wise and keep the same states. Raises
        UnsupportedError for a class that mixes parameters, needs a closure or draws random numbers."""
        options = [on_cpu(options_of(group)) for group in groups]
        cpu, gpu = OptimizerMaker(self.cpu_class), OptimizerMaker(self.gpu_class)
        for make in (cpu, gpu):
            refuse_reads(make, groups, options[0])
        whole = [try_class(make, group).whole for make in (cpu, gpu) for group in options]  # each class is tried
        like = torch.ones(2, 2, dtype=torch.float32, device="cpu")
        return not any(whole) and all(
            zero_state(cpu, group, like).keys() == zero_state(gpu, group, like).keys() for group in options
        )

    def _device_costs(self, params: Sequence[Tensor], group_of: Sequence[int], groups: Sequence[Group]) -> list[int]:
        costs: dict[tuple[int, torch.dtype], int] = {}
        for group, param in zip(group_of, params, strict=True):
            working = self._working(param)
            if (group, param.dtype) not in costs:
                master = 0 if working is param.dtype else working.itemsize
                states = state_bytes(OptimizerMaker(self.gpu_class), options_of(groups[group]), working)
                costs[group, param.dtype] = master + states
        return [costs[group, param.dtype] for group, param in zip(group_of, params, strict=True)]

    def _run(
        self, pieces: Sequence[Piece], params: Sequence[Tensor], group_of: Sequence[int], groups: Sequence[Group]
    ) -> BucketRun:
        members = [params[piece.param] for piece in pieces]
        device = members[0].device
        cuda = device.type == "cuda"
        bucket = Bucket(
            pieces,
            {piece.param: tuple(params[piece.param].shape) for piece in pieces},
            members[0].dtype,
            working=self._working(members[0]),
            params_pinned_for=device if self.pin_params and cuda else None,
            grads_pinned_for=device if self.pin_grads and cuda else None,
        )
        rule = self._rule(bucket, {index: self._host_options(group) for index, group in enumerate(groups)}, group_of)
        link = HyperLink(rule.group_indices, lambda: rule.param_groups, self._host_options)
        return BucketRun(bucket, rule, link, members, self._lane(device))

    def _host_options(self, group: Group) -> Group:
        return fused(numbers_of(group), self.cpu_class)

    def _rule(self, bucket: Bucket, groups: Mapping[int, Group], group_of: Sequence[int]) -> Rule:
        if self.cpu_class in ADAMS and bucket.master.dtype is torch.float32 and bucket.dtype in _TILED:
            decoupled = self.cpu_class is torch.optim.AdamW
            return TileAdam(bucket, groups, group_of, self.kernel, decoupled=decoupled)
        return ClassRule(bucket, groups, group_of, self.cpu_class)

    def _device_side(
        self, pieces: Sequence[Piece], params: Sequence[Tensor], group_of: Sequence[int], groups: Sequence[Group]
    ) -> DeviceSide:
        return DeviceSide(
            [(piece, params[piece.param]) for piece in pieces],
            {index: fused(options_of(group), self.gpu_class) for index, group in enumerate(groups)},
            group_of,
            self.gpu_class,
            fp32=self.fp32,
        )

    def _device_link(self, side: DeviceSide | None) -> HyperLink:
        if side is None:
            return HyperLink([], lambda: [])
        return HyperLink(
            side.group_indices, lambda: side.param_groups, lambda group: fused(options_of(group), self.gpu_class)
        )

    def _lane(self, device: torch.device) -> Lane:
        if self.lane is not None:
            return self.lane
        if device not in self._lanes:
            self._lanes[device] = make_lane(device, overlap=self.overlap)
        return self._lanes[device]
