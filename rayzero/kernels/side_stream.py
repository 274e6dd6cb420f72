"""A CUDA stream beside the one that computes; on the host nothing at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Where an update runs on a CUDA device, so that it does not wait for what the rank has queued there."""

    def __init__(self, device: torch.device | None) -> None:
        """``device``: None, or one that is not CUDA: whatever is done is done in place."""
        on_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]

    @contextmanager
    def used(self) -> Iterator[None]:
        """What is queued inside runs there, and is over at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
