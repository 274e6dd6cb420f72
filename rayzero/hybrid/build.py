"""Builds the host side and the device side of the optimizer from its settings and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayzero.hybrid.buckets import Bucket, ClassRule, Rule, TileAdam, plan_buckets
from rayzero.hybrid.host_side import BucketRun, HostSide
from rayzero.hybrid.options import Group, HyperLink, OptimizerClass, fused, numbers_of
from rayzero.hybrid.placement import Piece, Targets, check_param, decide, the_device
from rayzero.hybrid.sides import DeviceSide, Sides
from rayzero.kernels import ADAMS, Kernel
from rayzero.kernels.torch_classes.optimizer_class import OptimizerMaker, on_cpu, options_of
from rayzero.kernels.torch_classes.optimizer_states import state_bytes, state_names
from rayzero.kernels.torch_classes.optimizer_trial import Scope, try_class
from rayzero.kernels.torch_classes.parameter_reads import refuse_reads
from rayzero.lanes import Lane, make_lane

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
        scopes = {try_class(make, group).scope for make in (cpu, gpu) for group in options}
        return scopes == {Scope.ELEMENT} and all(
            state_names(cpu, group) == state_names(gpu, group) for group in options
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
