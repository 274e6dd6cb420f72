"""An entry's way out and back, over a lane of threads that a test holds up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rayzero.activations import ThreadLane
from rayzero.activations.entry import Entry, Saved, StoragePiece, View, plan_pieces, view_of
from rayzero.activations.group import Chunk, ChunkKey, ChunkQuota, OffloadPolicy
from rayzero.activations.host_pool import HostPool
from rayzero.activations.ledger import Ledger
from rayzero.activations.shelf import Shelf
from rayzero.telemetry.recorder import NullRecorder
from tests.support.watched_lane import WatchedLane


class Counted:
    """A shelf, and the device bytes that it says are held."""

    def __init__(self, before_copy: Callable[[str, str], None] | None = None, limit: int | None = None) -> None:
        self.lane = ThreadLane() if before_copy is None else WatchedLane(before_copy)
        self.policy = OffloadPolicy(min_bytes=1, max_in_flight=limit)
        self.ledger = Ledger(NullRecorder())
        self.shelf = Shelf(self.lane, HostPool(), self.ledger, self.policy)

    def send(self, values: Tensor) -> tuple[Entry, Saved]:
        """All bytes of ``values`` start on their way."""
        chunk = Chunk(ChunkKey(0, 0), ChunkQuota(self.policy, None, margin=0))
        saved = Saved(values, chunk.open_group("g", "g"), small=False, ends=deque())
        entry = Entry(StoragePiece(0, values.nbytes), [saved], values.untyped_storage(), "g")
        entry.attach(saved)
        saved.leave(entry)
        assert self.shelf.send(entry, values.untyped_storage(), values, values.nbytes)
        return entry, saved


def numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.uint8)


def test_a_copy_in_waits_for_its_copy_out():
    go = threading.Event()
    one = Counted(before_copy=lambda direction, label: direction == "out" and go.wait(60) and None)
    entry, _ = one.send(numbers(100))
    back = one.shelf._copy_in(entry, target := torch.zeros(100, dtype=torch.uint8), entry.departure)
    assert not back.finished()
    go.set()
    back.wait()
    assert torch.equal(target, numbers(100))
    assert one.ledger.device_bytes == 0
    one.lane.close()


def test_a_held_source_stays_and_a_dropped_one_is_not_copied():
    go = threading.Event()
    one = Counted(before_copy=lambda direction, label: go.wait(60) and None)
    held, _ = one.send(numbers(10))
    dropped, _ = one.send(numbers(20))
    assert one.ledger.device_bytes == 30
    dropped.lease.bytes.fill_(255)
    assert held.resident.hold()
    dropped.resident.clear(held=True)
    go.set()
    held.departure.wait()
    dropped.departure.wait()
    assert held.resident.bytes is not None
    assert not dropped.resident.hold()
    assert one.ledger.device_bytes == 10
    assert dropped.lease.bytes.eq(255).all()
    one.shelf.free(held)
    assert one.ledger.device_bytes == 0
    assert [span.nbytes for span in one.lane.spans()] == [10], "what is not copied says nothing of the link's speed"
    one.lane.close()


# ---- which bytes of a storage travel: the view vectors


def pieces(*tensors: torch.Tensor) -> list[StoragePiece]:
    return plan_pieces(tensors[0].untyped_storage().nbytes(), [view_of(t) for t in tensors])


COLUMNS, ROWS, WIDE = torch.empty(64, 96), torch.empty(256, 128), torch.empty(1000, 100)
WHOLE = StoragePiece(0, 64 * 96 * 4)
PIECES: dict[str, tuple[list[Tensor], list[StoragePiece]]] = {
    "a view of 83 percent takes the whole storage": ([COLUMNS[:, :80]], [WHOLE]),
    "one of 8 percent is gathered": (
        [COLUMNS[:, :8]],
        [StoragePiece(0, 63 * 96 * 4 + 32, view_of(COLUMNS[:, :8]))],
    ),
    "two strided halves are one storage": ([COLUMNS[:, :48], COLUMNS[:, 48:]], [WHOLE]),
    "the whole and a slice": ([COLUMNS, COLUMNS[:32]], [WHOLE]),
    "a slice and the whole": ([COLUMNS[:32], COLUMNS], [WHOLE]),
    "a transposed tensor": ([COLUMNS.t()], [WHOLE]),
    "halves of the rows": ([ROWS[:128], ROWS[128:]], [StoragePiece(0, 256 * 128 * 4)]),
    "one half twice": ([ROWS[128:], ROWS[128:]], [StoragePiece(128 * 128 * 4, 256 * 128 * 4)]),
    "an expanded view": ([torch.empty(1, 8).expand(4, 8)], [StoragePiece(0, 32)]),
}


@pytest.mark.parametrize("what", PIECES)
def test_the_bytes_of_a_storage_that_travel(what: str) -> None:
    views, expected = PIECES[what]
    assert pieces(*views) == expected


def test_pieces_begin_aligned_and_a_gathered_view_is_shared() -> None:
    assert pieces(WIDE[3:5])[0].start == 1024
    assert len(pieces(WIDE[:, :3], WIDE[:, :3], WIDE[:, 1:4])) == 2
    assert pieces(COLUMNS[:, :8])[0].nbytes == 64 * 8 * 4
    assert not view_of(torch.empty(1, 8).expand(4, 8)).dense
    assert View(0, (4, 2), (2, 1), 4).dense
