"""Event hooks for CUDA graphs: copies of a captured forward and backward stay inside their graph.

A graph may only contain side-stream work that its own stream has waited for, and may only begin with such work if an
event orders it. At the end of a captured forward, ``forward_record()`` joins the copies out and records ``event``. At
the layer's input, ``backward_record(x)`` does the same with the copies in once the backward has passed it. On a
thread lane both wait for the copies, and ``event`` is None."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rayzero.lanes import Lane


class GraphMarks:
    """The stream and the events between a captured graph and the copies around it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._cuda = lane.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """A stream to capture on, made at the first use; None on a thread lane."""
        if self._cuda and self._stream is None:
            self._stream = torch.cuda.Stream(self._lane.device)  # type: ignore[no-untyped-call]
        return self._stream

    @property
    def event(self) -> torch.cuda.Event | None:
        """The event that both marks record, visible outside the graph; None on a thread lane."""
        if self._cuda and self._event is None:
            self._event = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
        return self._event

    def forward_record(self, event: torch.cuda.Event | None = None) -> None:
        """Join the copies out, then record ``event`` (by default ``self.event``)."""
        self._lane.settle("out")
        self._record(event)

    def backward_record(self, x: Tensor, event: torch.cuda.Event | None = None) -> Tensor:
        """Returns a view of ``x``, of any shape and dtype. Its backward joins the copies in, then records ``event``."""
        marked: Tensor = _BackwardMark.apply(x, self, event)  # type: ignore[no-untyped-call]
        return marked

    def _joined_in(self, event: torch.cuda.Event | None) -> None:
        self._lane.settle("in")
        self._record(event)

    def _record(self, event: torch.cuda.Event | None) -> None:
        event = event if event is not None else self.event
        if event is not None:
            event.record(torch.cuda.current_stream(self._lane.device))


class _BackwardMark(torch.autograd.Function):
    """The identity. Its backward joins the copies in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: GraphMarks, event: torch.cuda.Event | None) -> Tensor:
        ctx.marks, ctx.event = marks, event
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.marks._joined_in(ctx.event)
        return grad, None, None
