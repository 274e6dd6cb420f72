"""What of a process's memory the ledger measures instead of being told."""

from __future__ import annotations

import mmap

import pytest
import torch

from rayzero.memory.process_memory import (
    HeapUse,
    LedgerCount,
    ProcessMemory,
    heap_use,
    ledger_rest,
    process_memory,
    without_model,
)

MIB = 1 << 20
BASE = {"rss": 300, "shm": 0, "pss": 250, "uss": 200, "anonymous": 200, "split": 0, "file": 50}


def count(used: int, free: int, told: float = 0.0, **process: int) -> LedgerCount:
    return LedgerCount(ProcessMemory(**BASE | process), HeapUse(used=used, free=free), told)


BEFORE = count(100, 10)


def test_the_heaps_rest_is_what_nobody_told() -> None:
    now = count(1000, 10, told=700.0, anonymous=1100)
    assert ledger_rest(BEFORE, now) == {"process": 250, "other": 200, "unused": 0}


def test_code_that_was_loaded_or_is_shared_with_more_processes_is_the_processs() -> None:
    assert ledger_rest(BEFORE, count(100, 10, file=70))["process"] == 270
    assert ledger_rest(BEFORE, count(100, 10, file=30))["process"] == 230


def test_what_a_fork_server_has_imported_is_each_workers_in_part() -> None:
    before = count(100, 10, split=80, pss=170)
    assert ledger_rest(before, count(100, 10, split=120))["process"] == 130, "with more workers it is less of each"
    assert ledger_rest(before, count(100, 10, split=20))["process"] == 230, "what one of them writes to is its own"


def test_what_malloc_keeps_counts_as_far_as_it_is_resident() -> None:
    assert ledger_rest(BEFORE, count(100, 510, anonymous=300))["unused"] == 100
    assert ledger_rest(BEFORE, count(100, 510, anonymous=200))["unused"] == 0


def test_what_is_resident_and_not_mallocs_is_in_no_kind() -> None:
    assert ledger_rest(BEFORE, count(100, 30, anonymous=900)) == {"process": 250, "other": 0, "unused": 20}


def test_memory_told_twice_is_not_taken_off_elsewhere() -> None:
    now = count(1000, 10, told=1800.0, anonymous=1100)
    assert sum(ledger_rest(BEFORE, now).values()) + now.told == 250 + 1800


def test_without_books_of_the_allocator_there_is_the_process_alone() -> None:
    bare = LedgerCount(ProcessMemory(**BASE), None, 0.0)
    assert ledger_rest(bare, bare) == {"process": 250}


def test_a_model_that_will_be_given_away_is_not_the_processs() -> None:
    now = count(1500, 30, anonymous=1700, pss=1750)
    found = without_model(BEFORE, now, 1000)
    assert (found.heap, found.process.anonymous, found.process.pss) == (HeapUse(used=500, free=30), 700, 750)
    assert found.process.file == now.process.file


def test_weights_in_a_mapped_file_are_not_taken_off_the_heap() -> None:
    now = count(150, 30, anonymous=280, pss=330)
    assert without_model(BEFORE, now, 1000).heap == HeapUse(used=100, free=30)
    bare = [LedgerCount(ProcessMemory(**BASE | {"anonymous": size}), None, 0.0) for size in (200, 900)]
    assert without_model(*bare, 1000).process.anonymous == 200
    assert without_model(bare[1], bare[0], 1000).process.anonymous == 200, "it has grown by nothing"


def test_the_heap_tells_of_a_tensor_whole_before_it_is_touched_and_not_after_it_is_freed() -> None:
    before = heap_use()
    assert before is not None
    tensor = torch.empty(64 * MIB, dtype=torch.uint8)
    assert heap_use().used - before.used == pytest.approx(tensor.nbytes, abs=4 * MIB)
    del tensor
    assert heap_use().used == pytest.approx(before.used, abs=4 * MIB)


def test_memory_that_is_not_mallocs_is_not_in_its_books() -> None:
    heap, process = heap_use(), process_memory()
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        mapped.write(b"x" * len(mapped))
        assert process_memory().anonymous - process.anonymous >= 31 * MIB
        assert heap_use().used - heap.used < 4 * MIB
