"""Faults at named points of a run's processes, for tests: at rank 1's third push, inside the update of optimizer 0.

::

    faults = Faults(folder, (Fault("optimizer 0", "owner.adam"), Fault("rank 1", "rank.push", nth=3)))
    run_ranks(train, transport="shm", processes=True, max_failures=2, faults=faults)
    assert all(faults.struck(index) for index in range(2))

A point is a function of the package, which ``arm`` wraps in the processes that a fault was asked for, and in no other:
the functions themselves know nothing of faults. A fault strikes once, in whichever life of its member: a file that
outlives the process says that it has, and when.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Any

from rayzero.elastic.members import MemberId, MemberKind
from rayzero.errors import ConfigError
from rayzero.quantities import count
from tests.support import strikes


class FaultError(RuntimeError):
    """What a fault raises in the middle of a process."""


class Act(StrEnum):
    """What a fault does to its process, or to the call that it strikes."""

    KILL = "kill"  # SIGKILL; inside native code, a death at a fixed element
    STOP = "stop"  # SIGSTOP
    RAISE = "raise"  # FaultError
    DELAY = "delay"  # wait, then go on
    DROP = "drop"  # a call or its answer is lost
    DUPLICATE = "duplicate"  # a call is made twice


class When(Enum):
    """Where a fault strikes: before its function runs, after it, or inside."""

    BEFORE = auto()
    AFTER = auto()
    INSIDE = auto()


_ANYWHERE = frozenset({Act.KILL, Act.STOP, Act.RAISE, Act.DELAY})


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the package where a fault can strike."""

    function: str  # module:name, or module:Class.name
    when: When
    repeats: bool = False  # it may be called twice with the same arguments
    inside: Callable[..., None] | None = None  # ends the process in the middle of the function
    lost: Callable[..., Any] | None = None  # what the caller sees of a call that is dropped
    counts: Callable[..., Any] | None = None  # of its arguments: None: such a call is not counted; else what is called

    @property
    def acts(self) -> frozenset[Act]:
        """What a fault can do here."""
        if self.when is When.INSIDE:
            return frozenset({Act.KILL})
        more = {Act.DUPLICATE: self.repeats, Act.DROP: self.lost is not None}
        return _ANYWHERE | {act for act, can in more.items() if can}


_BEFORE, _AFTER, _INSIDE = When.BEFORE, When.AFTER, When.INSIDE
_SERVICE = "rayzero.owner.service:ShardService"
_UPDATES, _LEAD = "rayzero.owner.updates:StepUpdates", "rayzero.lead.lead:StepLead"
_SERVER = "rayzero.store.owner.server:OwnerServer"
_MIRROR = "rayzero.store.host.mirrors:Mirror"
_MIRRORED = "rayzero.store.host.mirror_memory:MirrorMemory"
_SUMS, _SUMMED = "rayzero.store.host.host_sums:HostSums", "rayzero.store.host.host_sums:SummedRanks"
_ENGINE, _STEP, _STORE = (
    "rayzero.engine.engine:Engine",
    "rayzero.engine.rank_step:RankStep",
    "rayzero.store.rank.rank_store:RankStore",
)

POINTS = {
    # an owner: its start, also as a successor
    "owner.start": Point("rayzero.store.owner.hosted:HostedModels._make", _BEFORE),
    "owner.took-over": Point("rayzero.store.owner.memory.shared_owner:SharedOwner._take_over", _AFTER),
    "owner.attach": Point(f"{_SERVICE}.attach", _BEFORE),
    "owner.redo": Point(f"{_SERVICE}.redo", _BEFORE, repeats=True),
    # an owner: a step
    "owner.receive": Point(f"{_SERVICE}.observe", _AFTER, repeats=True),
    "owner.landing": Point(f"{_SERVICE}.reserve_when_free", _BEFORE),
    "owner.collect": Point(f"{_SERVICE}.collect", _BEFORE, repeats=True),
    "owner.norm": Point("rayzero.owner.gradients.shard_sums:ShardSums._squares_of", _BEFORE),
    "owner.apply": Point(f"{_SERVICE}.apply", _BEFORE, repeats=True),
    "owner.decided": Point("rayzero.owner.publisher:Publisher.decided", _AFTER),
    "owner.adam": Point(
        "rayzero.owner.rules:AdamRule.update",
        _INSIDE,
        inside=strikes.die_in_the_update,
        counts=strikes.middle_page,
    ),
    "owner.step": Point(
        "rayzero.owner.rules:ClassRule.update",
        _INSIDE,
        inside=strikes.die_in_the_update,
        counts=strikes.middle_page,
    ),
    "owner.awaits-products": Point("rayzero.owner.products:ShardProducts._awaited", _BEFORE),
    "owner.has-products": Point("rayzero.owner.products:ShardProducts._awaited", _AFTER),
    "owner.updated": Point("rayzero.owner.shard:OwnedShard.applied", _BEFORE),
    "owner.publish": Point("rayzero.store.shm.shard_lines:ShardLines.publish", _AFTER),
    "owner.between-shards": Point(f"{_UPDATES}._publish", _AFTER),
    "owner.idle": Point(f"{_UPDATES}.run", _AFTER),
    # an owner: what it copies for its host
    "owner.mirror": Point(f"{_MIRRORED}.open", _AFTER),
    "owner.copies": Point(f"{_MIRROR}._fetch", _BEFORE),
    "owner.copying": Point(f"{_MIRRORED}.tensor", _BEFORE),
    "owner.copied": Point(f"{_MIRROR}._came", _BEFORE),
    "owner.shows": Point(f"{_MIRRORED}.show", _AFTER),
    "owner.forgets": Point(f"{_MIRRORED}.forget", _AFTER),
    "owner.brings": Point(f"{_MIRROR}.bring", _BEFORE, repeats=True),
    # an owner: what the ranks of its host push to other hosts
    "owner.finds-ranks": Point(f"{_SUMMED}.find", _AFTER, repeats=True),
    "owner.sums-up": Point(f"{_SUMMED}.add", _BEFORE),
    "owner.summed-up": Point(f"{_SUMMED}.add", _AFTER),
    "owner.sent-sum": Point(f"{_SUMS}._ended", _BEFORE),
    "owner.sends-again": Point(f"{_SUMS}.send_again", _BEFORE),
    # an owner: writes and checkpoints
    "owner.write": Point(f"{_SERVICE}.write", _BEFORE, repeats=True),
    "owner.begin-save": Point(f"{_SERVICE}.begin_checkpoint", _AFTER, repeats=True),
    "owner.save": Point("rayzero.owner.checkpoint:CheckpointWriter._write_file", _BEFORE),
    "owner.saved": Point("rayzero.owner.checkpoint:CheckpointWriter._write_file", _AFTER),
    # an owner: a change of the owners
    "owner.hold": Point(f"{_SERVER}.hold", _BEFORE),
    "owner.held": Point(f"{_SERVER}.hold", _AFTER),
    "owner.settle": Point(f"{_SERVER}.settle", _BEFORE, repeats=True),
    "owner.settled": Point(f"{_SERVER}.settle", _AFTER),
    "owner.prepare": Point(f"{_SERVER}.prepare", _BEFORE, repeats=True),
    "owner.preparing": Point("rayzero.store.owner.memory.next_epoch:_fill", _BEFORE),
    "owner.gives": Point("rayzero.store.owner.memory.shared_owner:SharedOwner.carried", _BEFORE),
    "owner.takes-in": Point("rayzero.store.owner.memory.next_epoch:_take_in", _BEFORE),
    "owner.prepared": Point(f"{_SERVER}.prepare", _AFTER),
    "owner.let-stand": Point(f"{_SERVER}.let_stand", _BEFORE, repeats=True),
    "owner.takes-question": Point("rayzero.store.host.lead_questions:LeadQuestions.ask", _BEFORE, repeats=True),
    "owner.asks": Point("rayzero.store.host.lead_questions:LeadQuestions._call", _BEFORE, repeats=True),
    "owner.answers": Point("rayzero.store.host.lead_questions:LeadQuestions._answered", _BEFORE, repeats=True),
    "owner.stands": Point(f"{_SERVER}.let_stand", _AFTER),
    "owner.enter": Point(f"{_SERVER}.enter", _BEFORE),
    "owner.entering": Point("rayzero.store.owner.hosted:HostedModels.enter", _BEFORE),
    "owner.entered": Point(f"{_SERVER}.enter", _AFTER),
    # the lead, which is an owner too
    "lead.finish": Point(f"{_LEAD}.finish", _BEFORE, repeats=True),
    "lead.commit": Point(f"{_LEAD}.commit", _BEFORE, repeats=True),
    "lead.norm": Point(f"{_LEAD}._take_parts", _AFTER),
    "lead.before-record": Point("rayzero.lead.decide:DecisionJournal.write", _BEFORE),
    "lead.record": Point(
        "rayzero.store.owner.memory.shared_owner:write_record", _INSIDE, inside=strikes.die_in_the_record
    ),
    "lead.after-record": Point("rayzero.lead.decide:DecisionJournal.write", _AFTER),
    "lead.ordered": Point("rayzero.store.owner.peers:RemotePeer.apply", _AFTER),
    "lead.tell": Point(f"{_LEAD}._tell_ranks", _BEFORE),
    "lead.mean": Point(f"{_LEAD}.mean", _BEFORE, repeats=True),
    "lead.write": Point(f"{_LEAD}.write", _BEFORE),  # each counts: whoever brings calls to the lead drops repeats
    "lead.wrote": Point(f"{_LEAD}._write_made", _BEFORE),
    "lead.begin-save": Point(f"{_LEAD}.begin_save", _BEFORE, repeats=True),
    "lead.save": Point(f"{_LEAD}.save", _BEFORE, repeats=True),
    "lead.before-manifest": Point("rayzero.checkpoint.writer:_commit_staged", _BEFORE),
    "lead.after-manifest": Point("rayzero.checkpoint.writer:_commit_staged", _AFTER),
    "lead.call": Point(
        "rayzero.store.host.channel:Channel.start",
        _BEFORE,
        repeats=True,
        lost=strikes.lose_call,
        counts=strikes.method_of_call,
    ),
    # a rank: its start, also in a later life
    "rank.attach": Point(f"{_STORE}.attach", _BEFORE),
    "rank.attached": Point(f"{_STORE}.attach", _AFTER),
    "rank.meet": Point("rayzero.store.rank.shared_memory:SharedRank._met", _BEFORE),
    "rank.met": Point("rayzero.store.rank.shared_memory:SharedRank._met", _AFTER),
    "rank.rejoin": Point("rayzero.store.remote.remote_connection:RemoteConnection.rejoin", _BEFORE),
    # a rank: a step
    "rank.fetch": Point("rayzero.engine.units.unit_cache:UnitCache._fetch", _BEFORE),
    "rank.forward": Point(f"{_ENGINE}.close_units", _BEFORE),
    "rank.backward": Point(f"{_ENGINE}.completed", _BEFORE),
    "rank.push": Point(f"{_STEP}.push", _BEFORE),
    "rank.announce": Point("rayzero.store.rank.shared_memory:SharedRank.announce", _BEFORE, repeats=True),
    "rank.tells-door": Point("rayzero.store.rank.shared_memory:SharedRank.finished", _BEFORE),
    "rank.pushed": Point(f"{_STEP}.push", _AFTER),
    "rank.pushed-last": Point(f"{_STEP}.landed", _AFTER),
    "rank.clip": Point(f"{_STEP}.clip_norm", _BEFORE),
    "rank.clipped": Point(f"{_STEP}.clip_norm", _AFTER),
    "rank.asks-for-products": Point(f"{_STORE}.product", _AFTER, repeats=True),
    "rank.has-multiplied": Point(f"{_STORE}.multiplied", _BEFORE, repeats=True),
    "rank.keep": Point(f"{_STORE}.keep", _BEFORE),
    "rank.finish": Point(f"{_STEP}.commit", _BEFORE),
    "rank.finished": Point(f"{_STEP}.commit", _AFTER),
    # a rank: a change of the owners
    "rank.change": Point(f"{_STORE}.change", _BEFORE),
    "rank.take-over": Point("rayzero.store.remote.remote_connection:RemoteConnection.take_over", _BEFORE),
    "rank.greeted": Point("rayzero.store.rank.shared_memory:SharedRank.enter", _BEFORE),
    "rank.shared": Point("rayzero.store.remote.lead_line:RemoteLead.meet_door", _BEFORE),
    "rank.changed": Point(f"{_STORE}.change", _AFTER),
    # a rank: means, writes, checkpoints, calls
    "rank.mean": Point(f"{_STORE}.mean", _BEFORE),
    "rank.mean-asked": Point(f"{_STORE}.mean", _AFTER),
    "rank.write": Point(f"{_STORE}.write", _BEFORE),
    "rank.write-asked": Point(f"{_STORE}.write", _AFTER),
    "rank.began-save": Point("rayzero.engine.engine:Engine.begin_save", _AFTER),
    "rank.save": Point(f"{_STORE}.save", _BEFORE),
    "rank.save-asked": Point(f"{_STORE}.save", _AFTER),
    "rank.call": Point(
        "rayzero.store.host.channel:Channel.start",
        _BEFORE,
        repeats=True,
        lost=strikes.lose_call,
        counts=strikes.method_of_call,
    ),
    "rank.answer": Point(
        "rayzero.store.host.owner_link:_Ask._answered",
        _BEFORE,
        lost=strikes.lose_answer,
        counts=strikes.method_of_ask,
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: whom it strikes, where, and what it does."""

    member: str  # "rank 1", "optimizer 0"
    point: str  # one of POINTS
    act: str = "kill"
    nth: int = 1  # it strikes when the process comes there for the nth time
    life: int | None = None  # only in this life of the member; None: in any
    method: str = ""  # of calls, only those of this gRPC method are counted
    seconds: float = 0.3  # of a delay

    def __post_init__(self) -> None:
        """Raise ConfigError in one line for what does not exist."""
        if not re.fullmatch(r"(rank|optimizer) \d+", self.member):
            raise ConfigError(f"a fault's member is {self.member!r}; it must be like 'rank 1' or 'optimizer 0'")
        if self.point not in POINTS:
            raise ConfigError(f"a fault's point is {self.point!r}; it must be one of {', '.join(POINTS)}")
        role = MemberKind.RANK if self.point.startswith("rank.") else MemberKind.OWNER
        if self.who.kind is not role:
            raise ConfigError(f"a fault of {self.member} is at {self.point!r}, where no {self.who.kind} comes")
        acts = POINTS[self.point].acts
        if self.act not in acts:
            raise ConfigError(
                f"a fault's act at {self.point!r} is {self.act!r}; it must be one of {', '.join(sorted(acts))}"
            )
        if self.nth < 1 or self.seconds < 0 or (self.life is not None and self.life < 0):
            raise ConfigError(
                f"a fault has nth {self.nth}, life {self.life} and seconds {self.seconds}; nth counts from 1, the "
                "others from 0"
            )
        if self.method and POINTS[self.point].counts not in (strikes.method_of_call, strikes.method_of_ask):
            raise ConfigError(f"a fault at {self.point!r} has method {self.method!r}; only calls have one")

    @property
    def who(self) -> MemberId:
        """The member that it strikes."""
        kind, _, index = self.member.partition(" ")
        return MemberId(MemberKind(kind), int(index))

    def __str__(self) -> str:
        return f"{self.member} {self.point} {self.act}"


@dataclass(frozen=True, slots=True)
class Struck:
    """What a fault did."""

    pid: int
    life: int
    at: float  # time.monotonic(), in seconds


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a run. Picklable; every process of the run gets it."""

    folder: Path  # where it is noted what has struck; it must exist
    faults: tuple[Fault, ...]
    waits: bool = False  # no fault strikes before it is asked for by ``ask``

    def check(self, num_ranks: int, num_owners: int | None) -> None:
        """Raise ConfigError for a fault of a member that the run does not have. ``num_owners``: None: others may
        come."""
        there = {MemberKind.RANK: num_ranks} | ({} if num_owners is None else {MemberKind.OWNER: num_owners})
        for fault in self.faults:
            if fault.who.kind in there and fault.who.index >= there[fault.who.kind]:
                ours = count(there[fault.who.kind], fault.who.kind)
                raise ConfigError(f"a fault's member is {fault.member!r}; the run has {ours}")

    def ask(self, index: int) -> None:
        """Let the fault strike from now on; its ``nth`` counts from here."""
        (self.folder / f"fault-{index}.asked").touch()

    def struck(self, index: int) -> Struck | None:
        """What the fault did; None if it has not struck."""
        try:
            return Struck(**json.loads(self._note(index).read_text()))
        except FileNotFoundError:
            return None

    def arm(self, member: MemberId, life: int) -> None:
        """Wrap the functions at which a fault may strike this process, which is ``member`` in its ``life``."""
        for index, fault in enumerate(self.faults):
            if fault.who == member and fault.life in (None, life) and self.struck(index) is None:
                holder, name = find(POINTS[fault.point])
                armed = _Armed(self, index, life)
                setattr(holder, name, armed.wrap(getattr(holder, name)))

    def _note(self, index: int) -> Path:
        return self.folder / f"fault-{index}.struck"

    def may_strike(self, index: int) -> bool:
        """Whether the fault was asked for, where that is needed."""
        return not self.waits or (self.folder / f"fault-{index}.asked").exists()

    def note(self, index: int, life: int) -> bool:
        """Note that the fault strikes this process; False if it has struck before."""
        whole = self.folder / f"fault-{index}.{os.getpid()}"
        whole.write_text(json.dumps({"pid": os.getpid(), "life": life, "at": time.monotonic()}))
        try:
            os.link(whole, self._note(index))  # so that nobody reads half of it
        except FileExistsError:
            return False
        finally:
            whole.unlink()
        return True


def find(point: Point) -> tuple[Any, str]:
    """Where a point's function is found, and under which name. Raises AttributeError if it does not exist."""
    module, _, path = point.function.partition(":")
    *holders, name = path.split(".")
    holder = functools.reduce(getattr, holders, importlib.import_module(module))
    getattr(holder, name)
    return holder, name


class _Armed:
    """One fault in a process that it may strike."""

    def __init__(self, faults: Faults, index: int, life: int) -> None:
        self._faults, self._index, self._life = faults, index, life
        self._fault = faults.faults[index]
        self._point, self._act = POINTS[self._fault.point], Act(self._fault.act)
        self._lock = threading.Lock()
        self._left = self._fault.nth  # calls until it strikes

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with the fault at it."""
        if inspect.iscoroutinefunction(function):
            return self._wrap_async(function)

        @functools.wraps(function)
        def struck(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs) if self._point.when is When.AFTER else None
            if self._is_due(args):
                if self._act is Act.DROP:
                    assert self._point.lost is not None
                    return self._point.lost(*args, **kwargs)
                if self._act is Act.DUPLICATE:
                    result = function(*args, **kwargs)
                elif self._point.inside is not None:
                    self._die_inside(function, *args, **kwargs)
                elif self._act is Act.DELAY:
                    time.sleep(self._fault.seconds)
                else:
                    self._strike()
            return result if self._point.when is When.AFTER else function(*args, **kwargs)

        return struck

    def _wrap_async(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def struck(*args: Any, **kwargs: Any) -> Any:
            if self._is_due(args):
                if self._act is Act.DROP:
                    assert self._point.lost is not None
                    return self._point.lost(*args, **kwargs)
                if self._act is Act.DUPLICATE:
                    await function(*args, **kwargs)
                elif self._act is Act.DELAY:
                    await asyncio.sleep(self._fault.seconds)
                else:
                    self._strike()
            return await function(*args, **kwargs)

        return struck

    def _is_due(self, args: Sequence[Any]) -> bool:
        """Count a call; True for the one that the fault strikes."""
        if self._left <= 0 or not self._faults.may_strike(self._index):
            return False
        what = "" if self._point.counts is None else self._point.counts(*args)
        if what is None or (self._fault.method and what != self._fault.method):
            return False
        with self._lock:
            self._left -= 1
            return self._left == 0 and self._faults.note(self._index, self._life)

    def _die_inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        assert self._point.inside is not None
        self._point.inside(*args, **kwargs)
        function(*args, **kwargs)
        raise FaultError(f"{self._fault}: the process was to end inside the call, but the call ended")

    def _strike(self) -> None:
        if self._act is Act.RAISE:
            raise FaultError(f"{self._fault}, as a test asked for")
        if self._act is Act.STOP:  # sent to the process, it may strike once another thread runs, and this one goes on
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGKILL)
