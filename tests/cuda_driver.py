"""CUDA's runtime as far as it registers host memory, without a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from rayzero.memory import mapping
from tests.cuda_streams import OURS, Devices

__all__ = ["OURS", "Driver", "driver"]


class Driver:
    """The part of CUDA's runtime that registers memory, without a device. What would make a context on another device
    than ``OURS`` fails."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.events: list[tuple[str, int]] = []
        self.registered: dict[int, int] = {}  # address -> bytes
        self.most: float = float("inf")  # bytes of a range that it takes
        self.last_error = 0
        self.fault: str | None = None  # what waiting for the device raises

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.devices.touch()
        self.events.append(("register", size))
        refused = size > self.most
        if not refused:
            self.registered[address] = size
        else:
            self.last_error = 2
        return 2 if refused else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.devices.touch()
        self.events.append(("unregister", self.registered.pop(address)))
        return 0

    def synchronize(self, device: torch.device | None = None) -> None:
        with torch.cuda.device(device):
            self.devices.touch()
            self.events.append(("synchronize", self.devices.current()))
        if self.fault is not None:
            raise RuntimeError(self.fault)

    def launch(self, device: torch.device) -> None:
        """What torch does after each kernel launch: raise the last error, which is over then."""
        assert device == OURS
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver(Devices(monkeypatch))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(mapping, "_launch", made.launch)
    yield made
    made.launch(OURS)  # raises if a refusal was left behind
    gc.collect()  # while the driver is this one
    assert not mapping._locked
