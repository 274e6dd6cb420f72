"""What a run's programs take by themselves: the interpreter, their imports, and what torch keeps once it was used."""

from __future__ import annotations

from dataclasses import dataclass

from rayzero.memory.process_memory import ProcessMemory

__all__ = ["Programs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Bytes of a run's processes while they hold nothing of it."""

    rank: int  # heaps and stacks of a rank
    other: int  # of an optimizer actor, or of the coordinator
    files: int  # code of libraries, which all processes of a host share

    @classmethod
    def between(cls, imported: ProcessMemory, used: ProcessMemory) -> Programs:
        """As one process was found to be: when it had ``imported`` what every process of a run imports, and when it
        had ``used`` that as a rank does, on a model without values."""
        return cls(rank=used.anonymous, other=imported.anonymous, files=used.rss - used.anonymous - used.shm)

    def of_host(self, ranks: int, others: int) -> int:
        """All that are on one host."""
        return ranks * self.rank + others * self.other + (self.files if ranks + others else 0)
