"""What dead ranks have left in their slabs on this host: the gradients that they had pushed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rayzero.errors import HandshakeError
from rayzero.protocol.gradient_sum import FormerRank
from rayzero.protocol.messages import AT_HOME, ModelSpec, SharedPaths
from rayzero.slabs.arena import Arena
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import Slab
from rayzero.store.shm.shared_plan import RANK, SharedPlan, life_of, of_lineage
from rayzero.store.shm.words import Stamps


def former_ranks(plan: SharedPlan, who: str, directory: Path, step: int) -> Mapping[int, FormerRank]:
    """What dead ranks have pushed of ``step``, by rank. If several lives of a rank have, only the last one counts.
    ``who``: the process that maps it, for messages."""
    lives: dict[int, dict[int, dict[str, list[Path]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for slab, facts in of_lineage(plan.spec, directory):
        if not slab.alive and _is_of_rank(facts):
            lives[facts.index][facts.incarnation][facts.role].append(slab.path)
    found = {}
    for rank, slabs in lives.items():
        for incarnation in sorted(slabs, reverse=True):
            control, grads = slabs[incarnation]["control"], slabs[incarnation]["grads"]
            if not control or len(grads) < len(plan.gradients().slabs):
                continue  # it died while it made them
            try:
                left = _former_rank(plan, who, SharedPaths(str(control[0]), tuple(map(str, grads))))
            except HandshakeError:
                if all(path.exists() for path in (control[0], *grads)):
                    raise
                continue  # the rank's present life has removed it: all that was pushed there is applied
            if any(pushed.step == step for _, pushed in left.pushed):
                found[rank] = left
                break
    return found


def _former_rank(plan: SharedPlan, who: str, files: SharedPaths) -> FormerRank:
    control = plan.attach(files.control, who, writable=False)
    slabs = [plan.attach(path, who, writable=False, life=control.header.facts) for path in files.tensors]
    slabs.sort(key=lambda slab: slab.header.facts.number)
    gradients, announced = Arena(plan.gradients(), slabs), Stamps(control, plan).news()
    memory = plan.gradient_memory(gradients)
    pushed = [(unit, each) for unit, pushes in announced for each in pushes]
    homes = {(unit, AT_HOME - each.place) for unit, each in pushed if each.place < AT_HOME}
    more = {key: gradients.tensor(key) for key in homes}
    left = FormerRank(replace(memory, more=lambda unit, number: more[unit, number]), pushed)
    for slab in (control, *slabs):
        slab.close()  # the tensors keep what is mapped
    return left


def remove_former_lives(spec: ModelSpec, rank: int, life: int, directory: Path) -> None:
    """Remove what the lives of a rank before ``life`` have left. What is mapped stays mapped."""
    for slab, facts in of_lineage(spec, directory):
        theirs = _is_of_rank(facts) or facts.role == "loop"
        if not slab.alive and theirs and facts.index == rank and life_of(facts.incarnation) < life:
            Slab.adopt(slab.path).close()


def _is_of_rank(facts: SlabFacts) -> bool:
    return facts.role == "grads" or (facts.role, facts.kernel) == ("control", RANK)
