"""Memory in which the ranks of a host agree on the units that they all-gather.

One control slab, which the rank that comes first makes; the others find it by the run, the model and a digest of the
run's token, under a lock of the directory. Who leaves last removes it. Its words are in gather_words.py.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rayzero.concurrency.processes import has_died, kernel_word, this_process
from rayzero.errors import StallError, UnsupportedError
from rayzero.protocol.gathers import Stop
from rayzero.slabs.directory_lock import locked
from rayzero.slabs.header import lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.store.rank.gathers.gather_words import UNIT_BYTES, Answer, GatherWords, check_gathering
from rayzero.store.shm.listener import Listener
from rayzero.store.shm.plan import SharedPlan, of_lineage
from rayzero.store.shm.signals import BELL_BYTES, compare_exchange_64, load_acquire_64, store_release_64
from rayzero.store.shm.words import bell_of, key_name, region

log = logging.getLogger(__name__)

ROLE = "gathers"  # of the slab
_MEMBER_BYTES = 64
_KERNEL, _PID, _STARTED, _DEVICE, _ISSUED = range(0, 40, 8)
"""Bytes from a member's start: its process, a digest of its device, how many gathers it has issued."""
_LEFT = (1 << 32) - 1  # in place of a pid
_LOOK_S = 0.25  # how often a rank looks for others that have died, if no bell rings
_LONGEST_REST_MS = 60_000
_TIDY_S = 1.0  # how long the lock may take when a rank leaves; else a sweep removes the slab


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The ranks of a host, as one of them knows them before they meet."""

    ranks: Sequence[int]  # ascending, the caller's included
    rank: int
    key: str  # a secret that all ranks of one start of a run have, and no others
    model: int  # the prepared model's number
    directory: Path  # that they share
    stall_s: float


class HostGathers:
    """``UnitGathers`` over shared memory. Made by ``join_gathers``."""

    def __init__(self, control: Slab, host: Host, num_units: int, device: str) -> None:
        """Take the rank's place, under the directory's lock. ``device``: what no two ranks may share, or "cpu"."""
        assert control.path is not None
        self.place, self.size, self.stall_s = host.ranks.index(host.rank), len(host.ranks), host.stall_s
        self.meeting = control.path.with_suffix(".meeting")
        self._host, self._control, self._bell = host, control, bell_of(control)
        self._members, self._stop = (control.address(region(control, kind).offset) for kind in ("members", "stop"))
        self._words = GatherWords(
            control.address(region(control, "units").offset),
            control.address(region(control, "order").offset),
            control.keeper,
            num_units=num_units,
            place=self.place,
            size=self.size,
        )
        self._keeper = control.keeper
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._closed = False
        me = this_process()
        written = ((_KERNEL, kernel_word(me)), (_STARTED, me.started), (_DEVICE, _digest(device)), (_PID, me.pid))
        for word, value in written:
            store_release_64(self._at(self.place, word), value)
        self._bell.ring()

    # ---- meeting

    def meet(self) -> bool:
        """Wait until all ranks of the host are there; whether they are. False: one has died or left already. Raises
        StallError, naming those that have not come, and what ``_check_devices`` raises."""
        deadline = time.monotonic() + self.stall_s
        while True:
            heard = self._bell.value
            missing = [place for place in range(self.size) if not load_acquire_64(self._at(place, _PID))]
            if not missing:
                self._check_devices()  # first: every rank refuses by itself, also if another has and is gone
                return self.stopped() is None
            if self.stopped() is not None:
                return False
            if time.monotonic() > deadline:
                self.stop(Stop.STALLED)
                raise StallError(
                    f"rank {self._host.rank} has waited {self.stall_s:g} s for rank"
                    f"{'s' * (len(missing) > 1)} {', '.join(str(self._host.ranks[place]) for place in missing)} of "
                    "its host to prepare the same model with host_gather=True; set it on all ranks, or on none"
                )
            self._look_for_deaths()
            self._bell.wait(heard, _LOOK_S)

    def _check_devices(self) -> None:
        """Raise UnsupportedError unless all ranks compute on a CPU, or each on a GPU of its own."""
        devices = [load_acquire_64(self._at(place, _DEVICE)) for place in range(self.size)]
        cpu = _digest("cpu")
        for place, device in enumerate(devices):
            for other in range(place):
                pair = f"ranks {self._host.ranks[other]} and {self._host.ranks[place]} of one host"
                if (device == cpu) != (devices[other] == cpu):
                    raise UnsupportedError(
                        f"host_gather=True, but of {pair} one computes on a CPU and the other on a GPU; use the same "
                        "kind of device, or host_gather=False"
                    )
                if device == devices[other] != cpu:
                    raise UnsupportedError(
                        f"host_gather=True, but {pair} share a GPU, which NCCL does not support; give each its own, or "
                        "use host_gather=False"
                    )

    # ---- units

    def announce(self, unit: int, content: int) -> bool:
        """See ``UnitGathers``."""
        with self._lock:
            if self._closed or self.stopped() is not None or self._words.rests(unit, _now_ms()):
                return False
            answer = self._words.announce(unit, content)
            if answer is Answer.AGREED:
                self._words.rested(unit)
        if answer is Answer.AGREED:
            self._bell.ring()
        return answer is not Answer.ALONE

    def withdraw(self, unit: int, *, in_vain: bool) -> bool:
        """See ``UnitGathers``."""
        with self._lock:
            withdrawn = self._words.withdraw(unit)
            if withdrawn and in_vain:
                self._words.rest(unit, _now_ms(), _LONGEST_REST_MS)
        return withdrawn

    def next(self) -> int | None:
        """See ``UnitGathers``."""
        with self._lock:
            return self._words.next()

    def issued(self) -> None:
        """See ``UnitGathers``."""
        at = self._at(self.place, _ISSUED)
        store_release_64(at, load_acquire_64(at) + 1)

    def behind(self) -> str:
        """See ``UnitGathers``."""
        counts = [load_acquire_64(self._at(place, _ISSUED)) for place in range(self.size)]
        others = [place for place in range(self.size) if place != self.place]
        late = [place for place in others if counts[place] < counts[self.place]] or others
        return " and ".join(self._name(place) for place in late)

    # ---- the end

    def stop(self, why: Stop) -> None:
        """See ``UnitGathers``."""
        self._end(why, self.place)

    def _end(self, why: Stop, place: int) -> None:
        compare_exchange_64(self._stop, 0, why << 8 | place + 1)  # the first reason stays
        self._bell.ring()

    def stopped(self) -> str | None:
        """See ``UnitGathers``."""
        why, who = divmod(load_acquire_64(self._stop), 1 << 8)
        if not why:
            return None
        name = self._name(who - 1)
        return {
            Stop.LEFT: f"{name} has left the run",
            Stop.DIED: f"{name} has died",
            Stop.FAILED: f"an all-gather of {name} has failed",
            Stop.STALLED: f"{name} has waited too long for another rank",
        }[Stop(why)]

    @property
    def was_left(self) -> bool:
        """See ``UnitGathers``."""
        return load_acquire_64(self._stop) >> 8 == Stop.LEFT

    def listen(self, look: Callable[[], None]) -> None:
        """See ``UnitGathers``."""

        def look_around() -> None:
            self._look_for_deaths()
            look()

        self._listener = Listener(self._bell, look_around, f"rayzero-rank{self._host.rank}-gathers", _LOOK_S)

    def _look_for_deaths(self) -> None:
        for place in range(self.size):
            if place != self.place and self._has_died(place):
                self._end(Stop.DIED, place)

    def _has_died(self, place: int) -> bool:
        kernel, pid, started = (load_acquire_64(self._at(place, word)) for word in (_KERNEL, _PID, _STARTED))
        return pid not in (0, _LEFT) and has_died(kernel, pid, started)

    def close(self) -> None:
        """See ``UnitGathers``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.stop(Stop.LEFT)
        if self._listener is not None:
            self._listener.close()
        with suppress(StallError), locked(self._host.directory, _TIDY_S):
            store_release_64(self._at(self.place, _PID), _LEFT)
            last = not any(_is_there(self._members, place) for place in range(self.size))
            if last and self._control.path is not None:
                self.meeting.unlink(missing_ok=True)
                self._control.path.unlink(missing_ok=True)
            self._control.close(unlink=last)

    def _name(self, place: int) -> str:
        pid = load_acquire_64(self._at(place, _PID))
        return f"rank {self._host.ranks[place]}" + (f" (pid {pid})" if pid not in (0, _LEFT) else "")

    def _at(self, place: int, word: int) -> int:
        return self._members + place * _MEMBER_BYTES + word


def join_gathers(plan: SharedPlan, host: Host, device: str) -> HostGathers | None:
    """Meet the other ranks of a host; blocks until all are there.

    device: what no two ranks may share, or "cpu". None: a rank has come back after its death, and nobody gathers any
    more. Raises StallError, naming the ranks that have not come, and UnsupportedError for more ranks than fit, and for
    devices that cannot gather."""
    check_gathering(len(host.ranks))
    num_units = len(plan.spec.layout.units)
    with locked(host.directory, host.stall_s):
        control = _found(plan, host) or _make(plan, host, num_units)
        again = _pid_in(control, host.ranks.index(host.rank)) != 0
        if again:
            stop = control.address(region(control, "stop").offset)
            compare_exchange_64(stop, 0, Stop.DIED << 8 | host.ranks.index(host.rank) + 1)
            bell_of(control).ring()
            control.close(unlink=False)
        else:
            gathers = HostGathers(control, host, num_units, device)
    if again:
        log.warning("rank %d has come back: the ranks of its host gather no more units together", host.rank)
        return None
    try:
        if gathers.meet():
            return gathers
    except BaseException:
        gathers.close()
        raise
    log.warning("rank %d copies whole units: %s", host.rank, gathers.stopped())
    gathers.close()
    return None


def _found(plan: SharedPlan, host: Host) -> Slab | None:
    """The slab that another rank of this start of the run has made, or an earlier life of this one."""
    for found, facts in of_lineage(plan.spec, host.directory):
        if (facts.role, facts.index, facts.kernel) == (ROLE, host.model, key_name(host.key)):
            control = plan.attach(str(found.path), f"rank {host.rank}", writable=True)
            members = control.address(region(control, "members").offset)
            if found.alive or any(_is_there(members, place) for place in range(len(host.ranks))):
                return control
            control.close(unlink=False)
            found.path.unlink(missing_ok=True)  # all that were there are dead
    return None


def _make(plan: SharedPlan, host: Host, num_units: int) -> Slab:
    facts = plan.facts(ROLE, host.model, key_name(host.key), secrets.randbits(63))
    wanted = (
        ("bell", BELL_BYTES, 0),
        ("units", num_units * UNIT_BYTES, UNIT_BYTES),
        ("order", 8 + num_units * 8, 0),
        ("members", len(host.ranks) * _MEMBER_BYTES, _MEMBER_BYTES),
        ("stop", 8, 0),
    )
    return Slab.create(lay_out_slab(facts, wanted), host.directory)


def _pid_in(control: Slab, place: int) -> int:
    return load_acquire_64(control.address(region(control, "members").offset) + place * _MEMBER_BYTES + _PID)


def _is_there(members: int, place: int) -> bool:
    """Whether a rank has come, has not left, and is not known to have died."""
    kernel, pid, started = (load_acquire_64(members + place * _MEMBER_BYTES + w) for w in (_KERNEL, _PID, _STARTED))
    return pid not in (0, _LEFT) and not has_died(kernel, pid, started)


def _digest(device: str) -> int:
    return int.from_bytes(hashlib.sha256(device.encode()).digest()[:8], "little")


def _now_ms() -> int:
    """The same clock in all processes of a host."""
    return time.monotonic_ns() // 1_000_000
