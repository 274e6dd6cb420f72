"""Cables between hosts: what one host sends, this process reads from its TUN device and hands to another one.

A cable can be cut, and can be slow, long or lossy, on any kernel that has TUN devices. Traffic control could do most of
that in the kernel, but many kernels have only parts of it.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count

MTU = 9000  # bytes: one packet costs this process about 20 us, however long it is
_QUEUE_S = 0.25  # how much a sender's end of a slow cable holds before it drops packets, as a switch does


class Cable:
    """What happens to packets between two hosts. Set by any thread, at any time."""

    def __init__(self, ends: tuple[int, int]) -> None:
        self.mend()
        self.sent: dict[int, int] = dict.fromkeys(ends, 0)  # bytes that were delivered, by sender
        self._free_at = dict.fromkeys(ends, 0.0)  # when all has left that a sender has queued
        self._random = random.Random(f"{ends}")

    def cut(self) -> None:
        """Swallow every packet from now on. Nobody is told, as with a switch that has lost its power."""
        self.loss = 1.0

    def mend(self) -> None:
        """Carry every packet from now on, both ways, at once."""
        self.bytes_per_s: float | None = None  # each way; None: no limit
        self.delay_s = 0.0  # each way
        self.loss = 0.0  # the share of packets that are lost
        self.loses_only_from: int | None = None  # the one sender whose packets are; None: both

    def arrival(self, sender: int, size: int, now: float) -> float | None:
        """When a packet arrives that is sent now; None: never."""
        if self.loses_only_from in (None, sender) and self._random.random() < self.loss:
            return None
        leaves = now
        if self.bytes_per_s is not None:
            begins = max(now, self._free_at[sender])
            if begins - now > _QUEUE_S:
                return None
            leaves = self._free_at[sender] = begins + size / self.bytes_per_s
        self.sent[sender] += size
        return leaves + self.delay_s


class Switch:
    """Carries packets between the TUN devices of all hosts, in a thread, until it is closed."""

    def __init__(self, devices: Mapping[bytes, int], cables: Mapping[frozenset[int], Cable]) -> None:
        """``devices``: the file of each device, by its IPv4 or IPv6 address in network order; all stay open until the
        switch is closed. ``cables``: by the two files at their ends."""
        self._devices, self._cables = dict(devices), dict(cables)
        self._late: list[tuple[float, int, int, bytes]] = []  # arrival, a number, receiver, packet
        self._numbers = count()
        self._wake = os.eventfd(0)
        self._poll = select.poll()
        for file in (*self._devices.values(), self._wake):
            self._poll.register(file, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            patience_ms = max(0.0, self._late[0][0] - time.monotonic()) * 1e3 if self._late else None
            for file, events in self._poll.poll(patience_ms):
                if file == self._wake:
                    return
                if events & ~select.POLLIN or not self._read(file):
                    self._poll.unregister(file)  # its host has no power
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, receiver, packet = heapq.heappop(self._late)
                self._deliver(receiver, packet)

    def _read(self, sender: int) -> bool:
        """Take some of the packets that a host has sent. False: its device is gone."""
        try:
            for _ in range(64):  # then it is the turn of the others
                self._carry(sender, os.read(sender, MTU))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _carry(self, sender: int, packet: bytes) -> None:
        receiver = self._devices.get(packet[16:20] if packet[0] >> 4 == 4 else packet[24:40])  # IPv6 asks for routers
        cable = None if receiver is None else self._cables.get(frozenset((sender, receiver)))
        if receiver is None or cable is None:
            return
        now = time.monotonic()
        arrival = cable.arrival(sender, len(packet), now)
        if arrival is not None and arrival <= now:
            self._deliver(receiver, packet)
        elif arrival is not None:
            heapq.heappush(self._late, (arrival, next(self._numbers), receiver, packet))

    def _deliver(self, receiver: int, packet: bytes) -> None:
        with suppress(OSError):  # the receiver has no power, or no room: a packet is lost
            os.write(receiver, packet)
