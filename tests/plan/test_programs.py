"""What programs take by themselves, from one process that imports what they do."""

from __future__ import annotations

from rayzero.cluster.processes.program_memory import Imported
from rayzero.memory.process_memory import ProcessMemory
from rayzero.plan.tiers import Programs
from rayzero.recipes.planning import programs_between


def memory(anonymous: int, files: int) -> ProcessMemory:
    return ProcessMemory(rss=anonymous + files + 5, shm=5, pss=0, uss=0, anonymous=anonymous, split=0, file=0)


def test_a_rank_does_not_hold_the_compiler_that_a_plan_imports() -> None:
    imported = Imported(coordinator=memory(40, 30), owner=memory(170, 100), compiler=memory(240, 104))
    found = programs_between(imported, used=memory(260, 106))
    assert found == Programs(rank=190, owner=170, coordinator=40, files=102)
    assert found.of_host(2, 1, coordinators=1) == 2 * 190 + 170 + 40 + 102
    assert found.of_host(0, 0) == 0
