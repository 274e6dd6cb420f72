"""Adam in plain float arithmetic, element by element, with which the kernels are compared."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from rayzero.kernels.kernel import AdamMemory, AdamOptions, AdamUpdate, Kernel, Segment
from rayzero.kernels.rank_sum import RankSum

_LARGEST = torch.finfo(torch.float32).max


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
        coded = memory.coded
        if coded is not None:  # element i of copies in fp32 is element i of the memory
            mean, square = (moment.read(0, stop) for moment in coded)
            wide = replace(memory, exp_avg=mean, exp_avg_sq=square, scales=None)
        else:
            wide = memory
        for i, grad in enumerate(summed, start):
            limited = min(max(grad * update.scale, -update.limit), update.limit)
            _update_element(wide, i, limited, segment.options, segment.step)
        if coded is not None:
            coded[0].write(start, stop, wide.exp_avg[start:])
            coded[1].write(start, stop, wide.exp_avg_sq[start:])
        if memory.params is not None:
            memory.params[start:stop] = memory.master[start:stop]


def _update_element(memory: AdamMemory, i: int, grad: float, options: AdamOptions, step: int) -> None:
    weight = float(memory.master[i])
    grad = -grad if options.maximize else grad
    if options.decoupled:
        weight -= options.lr * options.weight_decay * weight
    else:
        grad += options.weight_decay * weight
    mean = options.beta1 * float(memory.exp_avg[i]) + (1 - options.beta1) * grad
    square = options.beta2 * float(memory.exp_avg_sq[i]) + (1 - options.beta2) * grad * grad
    square = square if square <= _LARGEST else math.inf  # as fp32 has it
    memory.exp_avg[i], memory.exp_avg_sq[i] = mean, square
    if options.amsgrad and memory.max_exp_avg_sq is not None:
        square = max(float(memory.max_exp_avg_sq[i]), square)
        memory.max_exp_avg_sq[i] = square
    denominator = math.sqrt(square / (1 - options.beta2**step)) + options.eps
    step_size = options.lr / (1 - options.beta1**step)
    memory.master[i] = weight - step_size * mean / denominator if denominator else math.nan
