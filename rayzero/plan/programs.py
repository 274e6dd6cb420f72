"""What a run's programs take by themselves: the interpreter, their imports, and what torch keeps once it was used."""

from __future__ import annotations

from dataclasses import dataclass

from rayzero.memory.process_memory import ProcessMemory

__all__ = ["Imported", "Programs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """One process's memory as it imported, one after the other, what ..."""

    coordinator: ProcessMemory  # ... a coordinator imports,
    owner: ProcessMemory  # ... owners and ranks import,
    compiler: (
        ProcessMemory  # ... and torch.compile's compiler, which a plan needs and a rank that compiles nothing does not
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Bytes of a run's processes while they hold nothing of it."""

    rank: int  # heaps and stacks of a rank
    owner: int  # of an optimizer actor
    coordinator: int
    files: int  # code of libraries, which all processes of a host share

    @classmethod
    def between(cls, imported: Imported, used: ProcessMemory) -> Programs:
        """As one process was found to be: when it had ``imported`` what programs import, and when it had ``used`` that
        as a rank does, on a model without values."""
        compiler = imported.compiler.anonymous - imported.owner.anonymous
        return cls(
            rank=used.anonymous - compiler,
            owner=imported.owner.anonymous,
            coordinator=imported.coordinator.anonymous,
            files=_files(used) - (_files(imported.compiler) - _files(imported.owner)),
        )

    def of_host(self, ranks: int, owners: int, coordinators: int = 0) -> int:
        """All that are on one host."""
        programs = ranks * self.rank + owners * self.owner + coordinators * self.coordinator
        return programs + (self.files if ranks + owners + coordinators else 0)


def _files(memory: ProcessMemory) -> int:
    return memory.rss - memory.anonymous - memory.shm
