"""A CUDA stream beside the one that computes. On the host it does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rayzero.concurrency.cuda_device import on_device, sleep_until_done


class SideStream:
    """A stream for updates on a CUDA device, so that they do not wait for the work that the rank has queued."""

    def __init__(self, device: torch.device | None) -> None:
        """``device``: None, or a device that is not CUDA, means that there is no stream."""
        on_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Work that is queued inside this context runs on the stream and is done at the end. Any thread may use it; it
        is on the stream's device meanwhile, and sleeps at the end."""
        if self._stream is None:
            yield
            return
        with on_device(self._stream.device):
            with torch.cuda.stream(self._stream):
                yield
            sleep_until_done(self._stream)
