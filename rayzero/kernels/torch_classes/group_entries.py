"""What ``step()`` of an optimizer class writes into its parameter groups: a count of steps, a rate that warms up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from rayzero.kernels.torch_classes.optimizer_class import (
    OptimizerMaker,
    as_options,
    options_of,
    plain_value,
    set_options,
    step_alone,
)
from rayzero.protocol.messages import Hyper

_SHAPE = (8, 8)  # of a stand-in: some classes take matrices only


class GroupEntries:
    """Writes those entries where the parameters are not: an instance over stand-ins steps with zero gradients.

    For classes whose entries depend on other entries alone, which ``optimizer_trial`` makes sure of. Knows options; not
    the parameters that the user's groups train."""

    def __init__(self, make: OptimizerMaker, hyper: Sequence[Hyper]) -> None:
        """``hyper``: each group's options."""
        members = [[Parameter(torch.zeros(_SHAPE, dtype=torch.float32, device="cpu"))] for _ in hyper]
        for (param,) in members:
            param.grad = torch.zeros(_SHAPE, dtype=torch.float32, device="cpu")
        self._optimizer = make.build(hyper, members)
        self.num_groups = len(members)

    def step(self, groups: Sequence[Hyper]) -> None:
        """Give the groups, which have the options of this step, the entries that the step leaves in them."""
        told = [{name: plain_value(value, name) for name, value in options_of(group).items()} for group in groups]
        set_options(self._optimizer, told)
        step_alone(self._optimizer)
        for group, was, ours in zip(groups, told, self._optimizer.param_groups, strict=True):
            now = {name: plain_value(value, name) for name, value in options_of(ours).items()}
            group.update(as_options({name: value for name, value in now.items() if value != was.get(name, was)}))
