"""Counts of what was saved, moved and waited for, per group name, and of device bytes held."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, fields

from rayzero.lanes import Event, Lane
from rayzero.telemetry.names import ACTIVATION_BYTES
from rayzero.telemetry.recorder import Recorder


@dataclass(slots=True)
class GroupTotals:
    """Sums over all groups of one name; bytes are device bytes unless said otherwise."""

    groups: int = 0  # committed with at least one eligible tensor
    saved_bytes: int = 0  # eligible, each storage's bytes once
    offloaded_bytes: int = 0  # left for the host
    host_bytes: int = 0  # what those are in host buffers (smaller when compressed)
    kept_bytes: int = 0  # stayed by choice
    no_room_bytes: int = 0  # stayed because the host cap was reached
    shared_bytes: int = 0  # saved again by a view whose bytes were stored already
    recomputed: int = 0  # groups run under recomputation
    released_bytes: int = 0  # handed over as dead, and were
    refused_bytes: int = 0  # handed over as dead, but somebody still holds them
    returned_bytes: int = 0  # came back
    hits: int = 0  # reads that found their bytes back
    late: int = 0  # reads that found them on their way
    misses: int = 0  # reads that had to ask for them
    on_device: int = 0  # reads that found them never gone
    stall_s: float = 0.0  # seconds the backward waited for copies

    def add(self, other: GroupTotals) -> None:
        """Those as well."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def as_dict(self) -> dict[str, int | float]:
        """Plain numbers, ready for JSON."""
        return asdict(self)


class Ledger:
    """Device bytes of saved activations now and at most, and the totals of each group name. Any thread may count."""

    def __init__(self, recorder: Recorder) -> None:
        self._lock = threading.Lock()
        self._recorder = recorder
        self._device = self._peak = 0
        self._totals: dict[str, GroupTotals] = {}
        self._stalls: list[tuple[str, Lane, Event, Event]] = []  # not yet read

    @property
    def device_bytes(self) -> int:
        """Bytes of committed groups on the device now, each byte once."""
        return self._device

    @property
    def peak_device_bytes(self) -> int:
        """The most since the start or the last ``reset_peak``."""
        return self._peak

    def reset_peak(self) -> None:
        """Start the peak anew."""
        with self._lock:
            self._peak = self._device

    def add_device(self, nbytes: int) -> None:
        """More bytes are held."""
        with self._lock:
            self._device += nbytes
            self._peak = max(self._peak, self._device)

    def drop_device(self, nbytes: int) -> None:
        """Fewer bytes are held."""
        with self._lock:
            self._device -= nbytes

    def add(self, name: str, **amounts: int) -> None:
        """Add to the totals of ``name``, by field."""
        with self._lock:
            totals = self._totals.setdefault(name, GroupTotals())
            for field, amount in amounts.items():
                setattr(totals, field, getattr(totals, field) + amount)

    def moved(self, direction: str, nbytes: int) -> None:
        """Tell the recorder of a copy."""
        self._recorder.add(ACTIVATION_BYTES, nbytes, direction=direction)

    def stalled(self, name: str, lane: Lane, start: Event, stop: Event) -> None:
        """The backward of ``name`` waited between two stamps; read once they have passed."""
        with self._lock:
            self._stalls.append((name, lane, start, stop))
        if len(self._stalls) > 64:
            self._read_stalls()

    def _read_stalls(self) -> None:
        with self._lock:
            stalls, self._stalls = self._stalls, []
        for name, lane, start, stop in stalls:
            seconds = lane.seconds(start, stop)
            if seconds is None:
                with self._lock:
                    self._stalls.append((name, lane, start, stop))
                continue
            with self._lock:
                self._totals.setdefault(name, GroupTotals()).stall_s += seconds

    def totals(self) -> dict[str, GroupTotals]:
        """A copy, by group name."""
        self._read_stalls()
        with self._lock:
            copies = {name: GroupTotals() for name in self._totals}
            for name, totals in self._totals.items():
                copies[name].add(totals)
            return copies
