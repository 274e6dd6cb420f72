"""Copies bytes between a device and host memory beside the computation. Importing this has no effect."""

from __future__ import annotations

import torch

from rayzero.lanes.cuda_lane import CudaLane, GraphMarks
from rayzero.lanes.lane import AT_ONCE_S, Direction, Event, Lane, Span, StreamUses, ThreadLane

__all__ = [
    "AT_ONCE_S",
    "CudaLane",
    "Direction",
    "Event",
    "GraphMarks",
    "Lane",
    "Span",
    "StreamUses",
    "ThreadLane",
    "make_lane",
]


def make_lane(device: torch.device, *, overlap: bool = True) -> Lane:
    """A new lane for a device: with streams on CUDA, with threads elsewhere. ``overlap=False``: copies do not run
    beside the computation, but in its stream or thread."""
    return CudaLane(device, overlap=overlap) if device.type == "cuda" else ThreadLane(device, overlap=overlap)
