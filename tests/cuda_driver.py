"""CUDA's runtime as far as it registers host memory, without a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from rayzero.memory import page_lock


class Driver:
    """The part of CUDA's runtime that registers memory, without a device."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.registered: dict[int, int] = {}  # address -> bytes
        self.most: float = float("inf")  # bytes of a range that it takes
        self.last_error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.events.append(("register", size))
        refused = size > self.most
        if not refused:
            self.registered[address] = size
        else:
            self.last_error = 2
        return 2 if refused else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.events.append(("unregister", self.registered.pop(address)))
        return 0

    def launch(self) -> None:
        """What torch does after each kernel launch: raise the last error, which is over then."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.events.append(("synchronize", 0)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(page_lock, "_launch", made.launch)
    yield made
    made.launch()  # raises if a refusal was left behind
    gc.collect()  # while the driver is this one
    assert not page_lock._locked
