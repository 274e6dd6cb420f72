"""Moves entries between the device and host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rayzero.activations.entry import Entry, EntryPlace, Resident, Saved, alive, shown, source_of
from rayzero.activations.group import OffloadPolicy
from rayzero.activations.host_pool import HostBuffer, HostPool
from rayzero.activations.ledger import Ledger
from rayzero.codecs import RAW, Codec, codec_for
from rayzero.errors import RayZeroError, UnsupportedError
from rayzero.lanes import Event, Lane


class Shelf:
    """Starts and awaits copies of entries, and frees their memory.

    Knows the lane, the pool and the ledger; not groups, their order, or shares."""

    def __init__(self, lane: Lane, pool: HostPool, ledger: Ledger, policy: OffloadPolicy) -> None:
        self._lane, self._pool, self._ledger, self._policy = lane, pool, ledger, policy
        self._lets_go = policy.max_in_flight is not None  # otherwise each copy out frees its source itself
        self._graph_leases: list[HostBuffer] = []  # belong to captured graphs; freed by: release_graph_leases()

    def keep(self, entry: Entry) -> None:
        """Count an entry that stays on the device, where its handles hold it."""
        self._ledger.add_device(entry.piece.nbytes)

    def send(self, entry: Entry, storage: torch.UntypedStorage, tensor: Tensor, take: int) -> bool:
        """Start to copy out the last ``take`` bytes of the entry. ``tensor``: a view of ``storage``, which has
        them. What has computed them is ordered before the caller's stream.

        Returns False, and does nothing, if the pool has no room. Raises UnsupportedError inside a CUDA graph capture if
        the policy has no ``max_in_flight``, or the pool too few buffers."""
        if self._lane.capturing() and not self._lets_go:
            raise UnsupportedError("activation offload inside a CUDA graph capture needs max_in_flight to be a number")
        self._lane.used(tensor)  # the caller's stream may gather its bytes, or cut some off
        source = source_of(entry.piece, storage, tensor)
        codec = codec_for(self._policy.compress, entry.dtype)
        values = _values(source[source.numel() - take :], codec, entry.dtype)
        lease = self._pool.acquire(codec.most_bytes(values.numel(), values.dtype), captured=self._lane.capturing())
        if lease is None:
            return False
        entry.lease, entry.codec, entry.captured = lease, codec, self._lane.capturing()
        entry.head = source[: source.numel() - take].clone() if take < source.numel() else None
        self._ledger.add_device(source.numel() + (0 if entry.head is None else entry.head.numel()))
        entry.resident = Resident(source, self._ledger)
        self._ledger.moved("out", take)
        entry.departure = self._copy_out(entry, entry.resident, source, take)
        return True

    def _copy_out(self, entry: Entry, resident: Resident, source: Tensor, take: int) -> Event:
        host, codec, dtype, label = _host(entry), entry.codec, entry.dtype, entry.label
        before = None if entry.lease is None else entry.lease.after  # [Note: reuse in the device's order]
        frees = not self._lets_go
        del entry

        def copy() -> bool:
            data = resident.bytes
            if data is None:
                return False  # the bytes were dropped while the copy waited
            if before is not None:
                before.settle()
            host.copy_(codec.encode(_values(data[-take:], codec, dtype)), non_blocking=True)
            if frees:
                resident.clear()
            return True

        return self._lane.issue("out", copy, holds=[source] if frees else [], label=label, nbytes=host.numel())

    def let_go(self, entry: Entry) -> None:
        """Wait for the copy of an entry on its way out, then free its device bytes. If the copy failed, they stay."""
        data = None if entry.resident is None else entry.resident.bytes
        if entry.resident is None or data is None or entry.departure is None:
            return
        if entry.departure.settle() is None:
            self._lane.used(data)  # its own stream may be another one, which has not waited
            entry.resident.clear()

    def fetch(self, entry: Entry, *, ahead: bool) -> bool:
        """Start the entry's return if it is away; returns whether it did. ``ahead``: nobody waits for it yet.

        An entry that is still leaving stays instead: its bytes are on the device until the entry is freed. Raises
        UnsupportedError inside a CUDA graph capture for an entry that left outside of any."""
        if self._lane.capturing() and not entry.captured and entry.lease is not None:
            if ahead:
                return False
            raise UnsupportedError(
                f"a backward that is captured into a CUDA graph reads activations of {entry.label!r} that were "
                "offloaded outside a capture: capture their forward too, or disable() the offload before it"
            )
        if entry.place is EntryPlace.LEAVING and entry.resident is not None and entry.resident.hold():
            return False
        if entry.place is not EntryPlace.AWAY or alive(entry) is not None:
            return False
        assert entry.departure is not None
        target = torch.empty(entry.piece.nbytes, dtype=torch.uint8, device=self._lane.device)
        if self._policy.poison:
            target.fill_(255)
        self._ledger.add_device(target.numel())
        self._ledger.moved("in", target.numel() - (0 if entry.head is None else entry.head.numel()))
        entry.arrival = self._copy_in(entry, target, entry.departure)
        entry.back = target
        entry.ahead = ahead
        entry.epoch += 1
        entry.waiting = entry.handles
        return True

    def _copy_in(self, entry: Entry, target: Tensor, departure: Event) -> Event:
        """Fill ``target`` (the entry's bytes, 1D uint8). The head is copied there too: the stream that cut it off may
        be another than the caller's, and only ``departure`` comes after it."""
        host, codec, dtype, device = _host(entry), entry.codec, entry.dtype, self._lane.device
        head, label = entry.head, entry.label
        cut = 0 if head is None else head.numel()
        del entry

        def copy() -> None:
            if head is not None:
                target[:cut].copy_(head)
            landed = host if codec is RAW else host.to(device, non_blocking=True)
            codec.decode(landed, _values(target[cut:], codec, dtype))

        return self._lane.issue("in", copy, after=[self._lane.now(), departure], label=label, nbytes=host.numel())

    def wait(self, entry: Entry) -> None:
        """Order the caller's work after the entry's return. Raises RayZeroError if a copy has failed."""
        error = entry.arrival.settle() if entry.arrival is not None else None
        if error is not None:  # raised as a new error: this one's traceback would hold the graph, which holds it
            raise RayZeroError(f"a copy of saved activations failed: {error!r}") from error

    def read(self, entry: Entry, saved: Saved[Any]) -> Tensor:
        """``saved``'s tensor over the returned bytes. The last handle that reads them lets go of them."""
        assert entry.back is not None
        self._lane.used(entry.back)  # it was allocated on the stream that asked for it
        tensor = shown(entry.back, entry.piece, saved)
        if saved.epoch != entry.epoch:
            saved.epoch = entry.epoch
            self._one_less(entry)
        return tensor

    def end(self, entry: Entry, epoch: int) -> bool:
        """A handle has ended that last read the return number ``epoch``. If it was the last handle, frees the entry and
        returns True."""
        entry.handles -= 1
        if entry.handles == 0:
            self.free(entry)
            return True
        if epoch != entry.epoch:
            self._one_less(entry)
        return False

    def free(self, entry: Entry) -> None:
        """Free all of the entry's memory. The host buffer goes back to the pool once no copy uses it."""
        if entry.freed:
            return
        if entry.lease is None:
            self._ledger.drop_device(entry.piece.nbytes)
        else:
            self._free_moved(entry, entry.lease)
        entry.freed = True

    def release_graph_leases(self) -> None:
        """Give back the host buffers that captured CUDA graphs use. Call it when the graphs are gone."""
        for lease in self._graph_leases:
            self._pool.give_back(lease)
        self._graph_leases.clear()

    def _free_moved(self, entry: Entry, lease: HostBuffer) -> None:
        data = None if entry.resident is None else entry.resident.bytes
        if entry.resident is not None and data is not None and entry.departure is not None:
            entry.departure.before_free(data)
            entry.resident.clear(held=True)
        self._drop_back(entry)
        if entry.head is not None:
            if entry.arrival is not None:
                entry.arrival.before_free(entry.head)
            self._ledger.drop_device(entry.head.numel())
            entry.head = None
        if entry.captured:
            self._graph_leases.append(lease)
        else:
            self._pool.give_back(lease, after=entry.arrival or entry.departure)

    def _one_less(self, entry: Entry) -> None:
        entry.waiting -= 1
        if entry.waiting <= 0:
            self._drop_back(entry)

    def _drop_back(self, entry: Entry) -> None:
        if entry.back is None:
            return
        if entry.arrival is not None:
            entry.arrival.before_free(entry.back)
        self._ledger.drop_device(entry.back.numel())
        entry.back = None


def _values(data: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
    """Bytes as what the codec encodes: values of ``dtype``, or the bytes themselves where they stay as they are."""
    return data if codec is RAW else data.view(dtype)


def _host(entry: Entry) -> Tensor:
    assert entry.lease is not None
    return entry.lease.bytes
