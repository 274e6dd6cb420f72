"""Computes the part of a process's memory that is not reported tensor by tensor, from the kernel's and the allocator's
counts.

[Note: the ledger] The code that allocates a tensor reports its bytes by purpose. The rest is measured from other
sources:

- ``process``: what the process was before the run (the kernel's count), with as much code as it has now. A rank is
  counted when its loop hands over its first model, without that model: what it imports and reads is the user's.
- ``other``: what the allocator has given out since, less the tensors that were told: activations, gradients on their
  way, what the user's program and libraries keep. From malloc's own books, resident or not.
- ``unused``: memory given back that the allocator keeps. Malloc knows how much that is, not how much of it is
  resident: it is the smaller of that and of what is resident beyond all the rest. So this kind closes the sum by
  construction as far as malloc keeps something. Memory that neither malloc nor anybody else knows of is in no kind, and
  the sum falls short by it; memory that is reported twice makes it too large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayzero.memory.heap import HeapUse
from rayzero.memory.process_memory import ProcessMemory


@dataclass(frozen=True, slots=True)
class LedgerCount:
    """A process's memory at one moment."""

    process: ProcessMemory
    heap: HeapUse | None  # None: the allocator does not tell
    told: float  # bytes of the heap whose purpose others tell


def without_model(first: LedgerCount, now: LedgerCount, model_bytes: int) -> LedgerCount:
    """``now`` as it will be when the process has given its model away: ``model_bytes``, as far as the heap has grown
    by them since ``first`` (weights may lie in a mapped file)."""
    grown = now.process.anonymous - first.process.anonymous
    if first.heap is not None and now.heap is not None:
        grown = min(grown, now.heap.used - first.heap.used)
    gone = max(0, min(model_bytes, grown))
    process = replace(now.process, pss=now.process.pss - gone, anonymous=now.process.anonymous - gone)
    heap = None if now.heap is None else replace(now.heap, used=now.heap.used - gone)
    return LedgerCount(process, heap, now.told)


def ledger_rest(before: LedgerCount, now: LedgerCount) -> dict[str, float]:
    """Bytes by kind; see [Note: the ledger]. ``before``: the run, with nothing told."""
    rest = {"process": float(before.process.pss + now.process.file - before.process.file)}
    if before.heap is None or now.heap is None:
        return rest
    used = now.heap.used - before.heap.used
    kept = now.heap.free - before.heap.free
    resident = now.process.anonymous - before.process.anonymous
    return rest | {"other": max(0.0, used - now.told), "unused": float(max(0, min(kept, resident - used)))}
