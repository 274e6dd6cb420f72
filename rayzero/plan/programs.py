"""The memory of a run's programs without their data: interpreter, imports, and what torch keeps after first use."""

from __future__ import annotations

from dataclasses import dataclass

from rayzero.memory.process_memory import ProcessMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """One process's memory after it imported, one after the other, what ..."""

    coordinator: ProcessMemory  # ... a coordinator imports,
    owner: ProcessMemory  # ... owners and ranks import,
    compiler: (
        ProcessMemory  # ... and torch.compile's compiler, which a plan needs and a rank that compiles nothing does not
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Bytes of a run's processes before they hold anything of the run."""

    rank: int  # heaps and stacks of a rank
    owner: int  # of an optimizer actor
    coordinator: int
    files: int  # code of libraries, shared by all processes of a host

    @classmethod
    def between(cls, imported: Imported, used: ProcessMemory) -> Programs:
        """From measurements of one process: after it had ``imported`` what programs import, and after it had ``used``
        that as a rank does, on a model without values."""
        compiler = imported.compiler.anonymous - imported.owner.anonymous
        return cls(
            rank=used.anonymous - compiler,
            owner=imported.owner.anonymous,
            coordinator=imported.coordinator.anonymous,
            files=_files(used) - (_files(imported.compiler) - _files(imported.owner)),
        )

    def of_host(self, ranks: int, owners: int, coordinators: int = 0) -> int:
        """Bytes of all programs on one host, at most: as if each had its own imports. Those of a run on Ray share most
        of theirs with their fork server (cluster/nodes)."""
        programs = ranks * self.rank + owners * self.owner + coordinators * self.coordinator
        return programs + (self.files if ranks + owners + coordinators else 0)


def _files(memory: ProcessMemory) -> int:
    return memory.rss - memory.anonymous - memory.shm
