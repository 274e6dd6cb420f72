"""Adam in plain float arithmetic, element by element, with which the kernels are compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rayzero.kernels.kernel import AdamMemory, AdamOptions, AdamUpdate, Kernel, Segment
from rayzero.kernels.moments import PlainMoment
from rayzero.kernels.rank_sum import RankSum

_LARGEST = torch.finfo(torch.float32).max


def plain_states(mean: Tensor, square: Tensor, largest: Tensor | None = None) -> dict[str, PlainMoment]:
    """Adam's states in fp32."""
    found = {"exp_avg": mean, "exp_avg_sq": square, "max_exp_avg_sq": largest}
    return {kind: PlainMoment(values) for kind, values in found.items() if values is not None}


def tensors_of(memory: AdamMemory) -> list[Tensor]:
    """All that a kernel writes: master, states, published parameters."""
    states = [tensor for state in memory.states.values() for tensor in state.tensors]
    return [memory.master, *states, *([] if memory.params is None else [memory.params])]


class ReferenceKernel(Kernel):
    """The formulas of the papers, in Python's double precision, rounded to fp32 when stored. Without stamps."""

    name = "reference"

    def run(self, update: AdamUpdate) -> None:
        """See ``Kernel.update``."""
        for segment in update.segments:
            self._update(update, segment)

    def _update(self, update: AdamUpdate, segment: Segment) -> None:
        memory, start, stop = update.memory, segment.offset, segment.offset + segment.length
        summed = RankSum(segment.length).sum(update.gradients, segment.ranks, start, stop).tolist()
        wide = {kind: state.read(0, stop) for kind, state in memory.states.items()}  # element i is element i
        for i, grad in enumerate(summed, start):
            limited = min(max(grad * update.scale, -update.limit), update.limit)
            _update_element(memory.master, wide, i, limited, segment.options, segment.step)
        for kind, state in memory.states.items() if memory.is_coded else ():
            state.write(start, stop, wide[kind][start:])
        if memory.params is not None:
            memory.params[start:stop] = memory.master[start:stop]


def _update_element(
    master: Tensor, states: dict[str, Tensor], i: int, grad: float, options: AdamOptions, step: int
) -> None:
    means, squares, largest = states["exp_avg"], states["exp_avg_sq"], states.get("max_exp_avg_sq")
    weight = float(master[i])
    grad = -grad if options.maximize else grad
    if options.decoupled:
        weight -= options.lr * options.weight_decay * weight
    else:
        grad += options.weight_decay * weight
    mean = options.beta1 * float(means[i]) + (1 - options.beta1) * grad
    square = options.beta2 * float(squares[i]) + (1 - options.beta2) * grad * grad
    square = square if square <= _LARGEST else math.inf  # as fp32 has it
    means[i], squares[i] = mean, square
    if options.amsgrad and largest is not None:
        square = max(float(largest[i]), square)
        largest[i] = square
    denominator = math.sqrt(square / (1 - options.beta2**step)) + options.eps
    step_size = options.lr / (1 - options.beta1**step)
    master[i] = weight - step_size * mean / denominator if denominator else math.nan
