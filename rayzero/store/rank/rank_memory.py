"""What one rank has in common with its host: its gradients, the owners' parameters and the copy of those of other
hosts, and the gradients that leave as one sum. It stays when other owners take over."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from rayzero.config.zero import HostPush
from rayzero.errors import MemoryPlanError, RayZeroError, UnsupportedError
from rayzero.kernels.rank_sum import summed_with
from rayzero.protocol.gradient_sum import NOTHING_LEFT, FormerRank
from rayzero.protocol.messages import SharedPaths
from rayzero.quantities import format_bytes
from rayzero.slabs.arena import Arena
from rayzero.store.host.waits import PublishBoard
from rayzero.store.rank.gradient_region import GradientRegion, gradient_memory, gradient_region
from rayzero.store.rank.shared_memory import SharedRank, doubt_of_locks
from rayzero.store.rank.unit_windows import UnitWindows
from rayzero.store.shm.recovery import former_ranks
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.shm.signals import host_identity
from rayzero.store.shm.words import GradientBytes, adding_threads

log = logging.getLogger(__name__)


class RankMemory:
    """The memory of one rank that others map, and theirs that it maps. Each part is None until ``meet`` and ``open``
    have found a use for it.

    Knows who maps what; not links, transfers or steps."""

    def __init__(
        self,
        rank: int,
        directory: Path | None,
        *,
        life: int,
        key: str,
        ranks: Sequence[int],
        host_push: HostPush,
        keeps_pushed: bool,
    ) -> None:
        """``directory``: of shared memory; None: nothing is shared. ``life``: how often the rank has died and come
        back. ``key``: a secret that all ranks of one start of a run have, and no others. ``ranks``: of
        this host. ``host_push``: see ``ZeroConfig``. ``keeps_pushed``: gradients stay in memory until they are
        published, also if no owner reads them there."""
        self._rank, self._directory, self._life, self._key = rank, directory, life, key
        self._ranks, self._host_push = ranks, host_push
        self._keeps_pushed = keeps_pushed
        self.summed: tuple[int, ...] = ()  # the ranks whose gradients come elsewhere as one sum
        self.shares = False  # with owners of this host; a rank that began without any goes on without
        self.shared: SharedRank | None = None  # with owners, or other ranks. freed by: close()
        self.windows: UnitWindows | None = None  # freed by: close()
        self._copy: Arena | None = None  # of what owners on other hosts publish
        self.gradients: GradientRegion | None = None

    @property
    def identity(self) -> str:
        """Equal in processes that can map each other's memory; "" if this one shares none."""
        return host_identity(self._directory) if self._directory is not None else ""

    @property
    def may_sum(self) -> bool:
        """Whether this rank's gradients may be added to those of others before they travel."""
        return self._host_push != "never" and self._directory is not None and len(self._ranks) > 1

    def choose_sums(self, plan: SharedPlan, here: Sequence[int]) -> None:
        """Set ``summed``: the ranks of this host, itself included, whose gradients its door adds before they travel;
        empty: each rank's travel alone. The same for all of them, so it depends on nothing that they may see
        differently. ``here``: the owners of this host. Raises UnsupportedError if sums are wanted and there is none."""
        assert self._directory is not None
        ranks, layout = summed_with(self._rank, self._ranks), plan.spec.layout
        gain = GradientBytes.of(layout.units, plan.spec.accumulation_steps).sums_gain(len(ranks))
        if not ranks or (self._host_push == "auto" and not gain):
            return
        needed = len(self._ranks) * plan.gradient_bytes(pooled=False)
        needed += sum(unit.size_bytes for unit in layout.units)
        if not here:
            self._without_door()
            return
        if self._host_push == "auto" and needed > _size_of(self._directory):
            log.warning(
                "rank %d: the gradients of this host leave it rank by rank, because %s is too small for %s; set "
                "slab_dir to a larger one",
                self._rank,
                self._directory,
                format_bytes(needed),
            )
            return
        self.summed = ranks

    def _without_door(self) -> None:
        why = f"no optimizer shares memory with rank {self._rank}"
        if self._host_push == "always":
            raise UnsupportedError(f"zero.host_push='always' adds up gradients on their host, but {why}; set 'auto'")
        log.warning("rank %d: the gradients of this host leave it rank by rank, because %s", self._rank, why)

    def require_door(self, away: Sequence[int], offers: Collection[int]) -> None:
        """Raise UnsupportedError if sums were chosen and no owner of this host is there that sends them, because other
        owners have taken over. ``away``: the owners of other hosts. ``offers``: of this one."""
        if self.summed and away and not offers:
            raise UnsupportedError(
                f"rank {self._rank}: the gradients of this host leave it in sums, and no optimizer of it is left"
            )

    # ---- owners

    def meet(
        self,
        plan: SharedPlan,
        offers: Mapping[int, SharedPaths],
        away: Sequence[int],
        page_lock: torch.device | None,
    ) -> None:
        """Map what owners of this host offer. ``away``: the owners of other hosts. ``page_lock``: see
        ``ParameterStore.attach``. Raises HandshakeError if an offer is not from this run, MemoryPlanError if there is
        no room; without an owner here, memory of its own will do for what is kept."""
        if self._directory is None or not (offers or self._keeps_pushed):
            return
        pooled = not away
        if page_lock is not None and (doubt := doubt_of_locks(plan, list(offers), pooled=pooled)) is not None:
            log.warning("rank %d: %s", self._rank, doubt)
        try:
            self.shared = SharedRank(
                self._rank, plan, self._directory, life=self._life, key=self._key, page_lock=page_lock, pooled=pooled
            )
        except MemoryPlanError as why:
            if offers:
                raise
            log.warning("rank %d keeps what it pushes in memory that dies with it: %s", self._rank, why)
            return
        self.shared.meet(offers)
        self.shares = bool(offers)

    def meet_mirror(self, memory: SharedPaths | RayZeroError | None) -> bool:
        """Map this host's copy; whether there is one. ``memory``: where it is, or why there is none: then this
        rank fetches for itself."""
        self._copy = None
        if isinstance(memory, RayZeroError):
            log.warning("rank %d fetches parameters for itself, not once for its host: %s", self._rank, memory)
        elif memory is not None and self.shared is not None:
            self._copy = self.shared.meet_mirror(memory)
        return self._copy is not None

    def open(self, plan: SharedPlan, away: Sequence[int], board: PublishBoard, page_lock: torch.device | None) -> None:
        """Begin to use what ``meet`` has mapped, once the owners of this host have mapped this rank's. ``board``: hears
        what they publish."""
        if self.shared is not None:
            if self.shares:
                self.windows = self.shared.windows({} if page_lock is not None else self._elsewhere(away))
            self._say_sums(away)
            self.gradients = gradient_region(plan.spec, self.shared.gradients(), self.shared)
            self.shared.listen(board)
        elif self._keeps_pushed:
            self.gradients = gradient_region(plan.spec, gradient_memory(plan.spec, pinned_for=page_lock))

    def enter(
        self, plan: SharedPlan, offers: Mapping[int, SharedPaths], away: Sequence[int], board: PublishBoard
    ) -> None:
        """Go on with the owners of the next epoch; see ``meet``. ``enter_windows`` comes once they know of this rank's
        memory."""
        if self.shared is not None:
            self.shared.enter(plan, offers, board)
        self._say_sums(away)

    def enter_windows(self, away: Sequence[int]) -> None:
        """Let windows show the owners of this epoch; see ``open``."""
        if self.shared is not None and self.windows is not None:
            self.shared.enter_windows({} if self.page_locked else self._elsewhere(away))

    def _elsewhere(self, away: Sequence[int]) -> dict[int, Arena]:
        """What this host has of the parameters of the owners ``away``, by owner."""
        return {} if self._copy is None else dict.fromkeys(away, self._copy)

    @property
    def page_locked(self) -> bool:
        """Whether what is mapped is locked for copies to a device."""
        return self.windows is not None and self.windows.page_locked

    def _say_sums(self, away: Sequence[int]) -> None:
        if self.summed and away:
            log.info("rank %d: gradients of ranks %s leave this host as one sum", self._rank, list(self.summed))

    def adding_threads(self, *, on_gpu: bool) -> int:
        """How many threads of this host's door may add gradients for this rank."""
        return adding_threads(len(os.sched_getaffinity(0)), len(self._ranks), on_gpu=on_gpu)

    # ---- a former life

    def left(self, plan: SharedPlan, step: int) -> FormerRank | None:
        """What this rank's former life had pushed of ``step``, the last decided one, and owners on other hosts may need
        again; None: nothing of it is here. Of what is part of sums, there is nothing to send: the door of this host
        makes them again."""
        if self.summed or not self._keeps_pushed:
            return NOTHING_LEFT
        if self.shared is None:
            return None
        return former_ranks(plan, f"rank {self._rank}", self.shared.directory, step).get(self._rank)

    # ---- the end

    def close(self, error: RayZeroError) -> None:
        """Release everything, once nothing moves bytes any more. Questions to a lead of this host fail with ``error``.
        Idempotent."""
        if self.windows is not None:
            self.windows.close()
        if self.shared is not None:
            self.shared.close(error)


def _size_of(directory: Path) -> int:
    """Bytes of the file system of a directory, used or not."""
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize
