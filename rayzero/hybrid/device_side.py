"""The device side: a torch optimizer that updates the parameters that stay there, or their fp32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from rayzero.hybrid.host.bucket_rules import Groups, PieceOptimizer
from rayzero.hybrid.host.buckets import range_of
from rayzero.hybrid.host.side import gradient_of
from rayzero.hybrid.split import Piece
from rayzero.kernels.optimizer_class import step_alone


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
