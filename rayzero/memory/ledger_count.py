"""Computes the part of a process's memory that is not reported tensor by tensor, from the kernel's and the allocator's
counts.

[Note: the ledger] The code that allocates a tensor reports its bytes by purpose. The rest is measured from other
sources:

- ``process``: the size of the process before the run, by the kernel's count, with its part of what it shares now: code,
  and what its fork server has imported. A rank is counted when its loop hands over its first model, without that model,
  because what it imports and reads belongs to the user.
- ``other``: what the allocator has given out since then, less the tensors that were reported. That is activations,
  gradients on their way, and what the user's program and libraries keep. Malloc counts it, resident or not.
- ``unused``: memory that the program has freed and the allocator keeps. Malloc knows how much that is, but not how much
  of it is resident. So it is the smaller of malloc's number and of what is resident beyond all the rest.

As long as malloc keeps something, ``unused`` makes the sum come out right. Memory that neither malloc nor anybody else
reports is in no kind, and the sum falls short by it. Memory that is reported twice makes the sum too large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayzero.memory.malloc import HeapUse
from rayzero.memory.process_memory import ProcessMemory


@dataclass(frozen=True, slots=True)
class LedgerCount:
    """A process's memory at one moment."""

    process: ProcessMemory
    heap: HeapUse | None  # None: the allocator does not report it
    told: float  # bytes of the heap that other code reports by purpose


def without_model(first: LedgerCount, now: LedgerCount, model_bytes: int) -> LedgerCount:
    """``now`` without the model that the process is about to give away: less ``model_bytes``, but at most what the
    heap has grown by since ``first``, because weights may be in a mapped file."""
    grown = now.process.anonymous - first.process.anonymous
    if first.heap is not None and now.heap is not None:
        grown = min(grown, now.heap.used - first.heap.used)
    gone = max(0, min(model_bytes, grown))
    process = replace(now.process, pss=now.process.pss - gone, anonymous=now.process.anonymous - gone)
    heap = None if now.heap is None else replace(now.heap, used=now.heap.used - gone)
    return LedgerCount(process, heap, now.told)


def ledger_rest(before: LedgerCount, now: LedgerCount) -> dict[str, float]:
    """The bytes by kind; see [Note: the ledger]. ``before``: the count before the run, when nothing was reported."""
    of_others = now.process.split - before.process.split
    rest = {"process": float(before.process.pss + now.process.file - before.process.file - of_others)}
    if before.heap is None or now.heap is None:
        return rest
    used = now.heap.used - before.heap.used
    kept = now.heap.free - before.heap.free
    resident = now.process.anonymous - before.process.anonymous
    return rest | {"other": max(0.0, used - now.told), "unused": float(max(0, min(kept, resident - used)))}
