"""The device side: a torch optimizer that updates the parameters that stay there, or their fp32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from rayzero.hybrid.host.bucket_rules import Groups
from rayzero.hybrid.host.buckets import range_of
from rayzero.hybrid.host.side import gradient_of
from rayzero.hybrid.split import Piece
from rayzero.kernels.optimizer_class import OptimizerMaker, State, by_group, load_into, prepare_states, step_alone


class DeviceSide:
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
        self.stepped = [self._stepped(at) for at in range(len(pieces))]
        members = by_group(group_of[piece.param] for piece in self.pieces)
        self.group_indices = list(members)
        self._at = [at for own in members.values() for at in own]
        stepped = [[cast("nn.Parameter", self.stepped[at]) for at in own] for own in members.values()]  # or leaves
        self.optimizer = OptimizerMaker(cls).build([groups[g] for g in self.group_indices], stepped)

    def _stepped(self, at: int) -> Tensor:
        piece, param = self.pieces[at], self._params[at]
        if self.is_master[at]:
            return nn.Parameter(range_of(param, piece).float())
        return param if piece.whole else nn.Parameter(range_of(param, piece))

    def step(self) -> list[int]:
        """Update every piece that has a gradient and round its master back; returns the positions of those pieces."""
        grads = [gradient_of(param) for param in self._params]
        present = [at for at, grad in enumerate(grads) if grad is not None]
        lent = [at for at in present if self.stepped[at].grad is not grads[at]]
        kept = [self.stepped[at].grad for at in lent]  # beside a decoupled_grad
        for at in lent:
            self.stepped[at].grad = _fit(cast("Tensor", grads[at]), self.pieces[at], self.stepped[at])
        step_alone(self.optimizer)
        for at, grad in zip(lent, kept, strict=True):
            self.stepped[at].grad = grad
        back = [at for at in present if self.is_master[at]]
        if back:
            targets = [range_of(self._params[at], self.pieces[at]) for at in back]
            torch._foreach_copy_(targets, [self.stepped[at] for at in back])
        return present

    def state_of(self, at: int) -> State:
        """A piece's state in torch's format; empty before its first step."""
        return dict(self.optimizer.state.get(self.stepped[at], {}))

    def load(self, states: Sequence[State]) -> None:
        """Replace every piece's state by a copy of ``states``; an empty one is the state before the first step."""
        load_into(self.optimizer, [states[at] for at in self._at])

    def prepare(self) -> None:
        prepare_states(self.optimizer)


def _fit(grad: Tensor, piece: Piece, stepped: Tensor) -> Tensor:
    """The piece's gradient in the shape and dtype of ``stepped``; ``grad`` itself if they already agree."""
    found = grad if piece.whole else range_of(grad, piece)
    return found if found.dtype is stepped.dtype else found.to(stepped.dtype)
