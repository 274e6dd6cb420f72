"""What updates changed in an owner's shards, for other hosts: the changes of the last versions for followers, which
reach any version that all owners have reached without one being held for them; those of the newest one for copies.

[Note: when changes are noted] An update says which words it changed, in a bitmap. What a follower gets is made of that
after the step's last publication, so no rank waits for it; the checksum, too. The native kernel fills the bitmap in its
one pass: what was published is its old master, rounded, which it has in registers. (Not if a NaN was there when noting
began: others may have rounded it to another NaN.) With other kernels, and classes, the bytes from before are kept and
compared. Published fp32 changes nearly everywhere, so all of it is noted, as often as that fits. While nobody asks,
nothing is noted. lab/RESULTS.md has what it costs.

[Note: for copies] A host's copy needs each version once, and at once. What it gets is packed when it asks, from the
bitmap of the newest update, which stays until the shard's next one. (That may begin meanwhile only where no rank waits
for the version; then the checksum says so.) Only the kernel notes for copies, and nobody looks for NaNs: the checksum
finds what was rounded otherwise. While changes are more than half of the bytes, fewer and fewer updates are noted, down
to one of 64.

[Note: how far back] Changes take at most as many bytes as the published parameters, or a quarter of the memory that is
free when somebody begins to follow, if that is less; the oldest go first. Who needs more takes a shard whole. Bitmaps
come on top, an eighth of a byte a 16-bit word; where ``cpu_memory_budget`` leaves no room for them, nothing is noted.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayzero.codecs.changes import Change, Form, checksum, compare, encode
from rayzero.memory.planner import bitmap_bytes
from rayzero.memory.process_memory import host_limits
from rayzero.owner.owned_model import OwnedModel
from rayzero.owner.shard import OwnedShard, Updater
from rayzero.protocol.messages import COMPUTE
from rayzero.telemetry.names import CHANGE_BYTES, CHANGED_RATIO
from rayzero.telemetry.recorder import Recorder

QUIET_S = 60.0  # without a question of a follower, until nothing is noted for any
_QUIET = 8  # versions for which no copy asks, until nothing is noted for any
_MOST_SKIPPED = 63  # updates between two that are noted


@dataclass(eq=False)
class _Shard:
    """What is known of one shard."""

    base: int  # the version before the oldest change, or the one that the shard has had since noting began
    now: int  # the newest version that is known
    by_kernel: bool  # whether the update itself notes
    base_sum: int | None = None  # its checksum; None: of a frozen shard that nobody has asked for
    now_sum: int | None = None  # that of the newest version
    changes: deque[Change] = field(default_factory=deque)

    def since(self, have: int, had: int) -> list[Change] | None:
        """See ``ChangeLog.since``."""
        known = next((each.checksum for each in reversed(self.changes) if each.after <= have), self.base_sum)
        if self.now_sum is None or not self.base <= have <= self.now or had != known:
            return None
        newer = [each for each in self.changes if each.after > have]
        last = newer[-1].after if newer else have
        if last < self.now:
            newer.append(Change(before=last, after=self.now, form=Form.NOTHING, payload=b"", checksum=self.now_sum))
        return newer


class ChangeLog:
    """The changes of one owner's shards.

    Knows published bytes and versions; not who follows, nor how changes travel. Any thread may ask; the updater's
    thread notes."""

    def __init__(self, model: OwnedModel, updater: Updater, recorder: Recorder, *, room: int | None = None) -> None:
        """``room``: bytes of ``cpu_memory_budget`` that are left; None: it is not set."""
        self._shards, self._rule, self._updater, self._recorder = model.shards, model.rule, updater, recorder
        self._torn = bool(model.former)  # a former life may have died while it wrote the next version
        self._clock = time.monotonic
        noted = [owned for owned in model.shards.values() if owned.trainable and owned.params.itemsize == 2]
        self._room = math.inf if room is None else max(0, room - sum(bitmap_bytes(owned.shard) for owned in noted))
        self._lock = threading.Lock()
        self._asked_s: float | None = None  # when somebody asked last; None: nobody follows
        self._known: dict[int, _Shard] = {}  # empty: nothing is noted
        self._order: deque[int] = deque()  # shards of all changes, oldest first
        self._kept, self._budget = 0, 0.0  # bytes
        self._words = 0  # of all trained shards
        self._noted: dict[int, Tensor | None] = {}  # by shard, of this step; None: all of it
        self._newest: dict[int, tuple[Tensor, int]] = {}  # by shard: what its newest update noted, the content before
        self._for_copies = False
        self._copied = -1 - _QUIET  # the newest version that a copy has asked for
        self._sizes = [0, 0]  # bytes of changes for copies since the last step's end, and of their shards
        self._passed, self._skip = 0, 0  # updates since that was known last; how many are not noted before one is
        self._was: Tensor | None = None  # published bytes before the update in progress
        self._listeners: list[Callable[[], object]] = []

    @property
    def kept_bytes(self) -> int:
        """Bytes of changes and bitmaps now, for followers and copies."""
        return self._kept + sum(bitmap.nbytes for bitmap, _ in list(self._newest.values()))

    # ---- any thread

    def follow(self) -> None:
        """Somebody follows: note changes from the next update on, until nobody has asked for ``QUIET_S``."""
        with self._lock:
            begins, self._asked_s = self._asked_s is None, self._clock()
        if begins:
            self._updater.submit(self._begin)

    def since(self, shard: int, have: int, had: int) -> Sequence[Change] | None:
        """Every change of a shard after version ``have`` (whose checksum is ``had``: a user's write changes values and
        no version), oldest first; []: there is nothing newer yet. None: that is not known, or not any more; take the
        shard whole. Counts as ``follow``."""
        self.follow()
        known = self._known.get(shard)
        if known is not None and known.now_sum is None:
            known.base_sum = known.now_sum = checksum(self._shards[shard].read(COMPUTE))
        with self._lock:
            known = self._known.get(shard)
            if known is not None and known.now < have <= self._shards[shard].published:
                return []  # it is noted in a moment
            return None if known is None else known.since(have, had)

    def newest(self, shard: int, before: int, version: int) -> Change | None:
        """What made ``version`` of a shard, which is published, from the content of ``before``, for a copy of it. None:
        that is not known, or more than half of the bytes. Notes from a next update on."""
        self._copied = max(self._copied, version)
        params = self._shards[shard].params
        bitmap, base = self._newest.get(shard, (None, -1))
        if bitmap is None or base != before:
            return None
        form, payload, _ = encode(params, bitmap)
        with self._lock:
            self._sizes = [self._sizes[0] + len(payload), self._sizes[1] + params.nbytes]
        if 2 * len(payload) > params.nbytes:
            return None
        return Change(before=before, after=version, form=form, payload=payload, checksum=checksum(params))

    def listen(self, listener: Callable[[], object]) -> None:
        """Call ``listener``, in the updater's thread, whenever ``since`` may have another answer. A version's changes
        are known a little after it is published."""
        self._listeners.append(listener)

    # ---- the updater's thread

    def _begin(self) -> None:
        """Note from the present version on, if all shards have one."""
        shards = self._shards.values()
        if self._torn or any(owned.published < 0 for owned in shards):
            return  # after the next update
        trained = sum(owned.params.nbytes for owned in shards if owned.trainable)
        self._words = trained // 2
        self._budget = min(trained, host_limits().available // 4, self._room)
        began = {index: self._began(owned) for index, owned in self._shards.items()}
        with self._lock:
            self._known = began
        self._tell()

    def _began(self, owned: OwnedShard) -> _Shard:
        if not owned.trainable:
            return _Shard(base=owned.published, now=owned.published, by_kernel=False)
        found, by_kernel = checksum(owned.params), self._kernel_notes(owned) and not bool(owned.params.isnan().any())
        return _Shard(base=owned.published, now=owned.published, by_kernel=by_kernel, base_sum=found, now_sum=found)

    def _kernel_notes(self, owned: OwnedShard) -> bool:
        return self._rule.notes and owned.params.itemsize == 2 and self._room > 0

    def before(self, owned: OwnedShard) -> None:
        """A shard is about to be updated."""
        index = owned.shard.index
        known, former = self._known.get(index), self._newest.pop(index, None)
        if known.by_kernel if known is not None else self._for_copies and self._kernel_notes(owned):
            if former is None:
                owned.changed = torch.zeros(bitmap_bytes(owned.shard), dtype=torch.uint8, device="cpu")
            else:
                owned.changed = former[0]
                owned.changed.numpy()[:] = 0  # torch would wake its threads for it
            self._newest[index] = owned.changed, owned.content
        elif known is not None and owned.params.itemsize == 2 and self._room > 0:
            self._was = owned.params.clone()

    def after(self, owned: OwnedShard) -> None:
        """The update has been published."""
        known = self._known.get(owned.shard.index)
        if known is not None:
            self._noted[owned.shard.index] = owned.changed if self._was is None else compare(self._was, owned.params)
        owned.changed = self._was = None

    def published(self, version: int) -> None:
        """Every shard is published at ``version``."""
        self._torn, self._for_copies = False, self._copies_pay(version)
        if self._asked_s is None:
            return
        if self._clock() - self._asked_s > QUIET_S:
            self._end()
        elif not self._known:
            self._begin()
        else:
            noted, self._noted = self._noted, {}
            with self._lock:
                for index in self._known.keys() - noted.keys():
                    self._known[index].now = version
            self._tell()
            differ = 0
            for index, changed in noted.items():  # who asks for the first ones gets them while others are packed
                differ += self._note(self._known[index], index, version, changed)
                self._tell()
            self._recorder.set(CHANGED_RATIO, differ / max(1, self._words))

    def _copies_pay(self, version: int) -> bool:
        """Whether to note the next update for copies."""
        with self._lock:
            (came, of), self._sizes = self._sizes, [0, 0]
        self._passed += 1
        if of:  # copies have asked for an update that was noted
            self._skip, self._passed = 0 if 2 * came <= of else min(2 * self._skip + 1, _MOST_SKIPPED), 0
        return self._passed % (self._skip + 1) == self._skip and version - self._copied <= _QUIET

    def _note(self, known: _Shard, index: int, version: int, changed: Tensor | None) -> int:
        """Keep what an update has changed. Returns the number of words."""
        params = self._shards[index].params
        form, payload, words = encode(params, changed)
        if form is Form.NOTHING:
            with self._lock:
                known.now = version
            return 0
        self._recorder.add(CHANGE_BYTES, len(payload), form=form)
        found = checksum(params)
        last = known.changes[-1].after if known.changes else known.base
        with self._lock:
            known.changes.append(Change(before=last, after=version, form=form, payload=payload, checksum=found))
            known.now, known.now_sum = version, found
            self._order.append(index)
            self._kept += len(payload)
            while self._kept > self._budget:
                oldest = self._known[self._order.popleft()]
                gone = oldest.changes.popleft()
                oldest.base, oldest.base_sum = gone.after, gone.checksum
                self._kept -= len(gone.payload)
        return words

    def rewritten(self, owned: OwnedShard) -> None:
        """Something else than an update has written what is published: nobody can go on from what was there."""
        index = owned.shard.index
        self._newest.pop(index, None)
        if index not in self._known:
            return
        new = self._began(owned)
        with self._lock:
            old, self._known[index] = self._known[index], new
            self._kept -= sum(len(each.payload) for each in old.changes)
            self._order = deque(each for each in self._order if each != index)
        self._tell()

    def _end(self) -> None:
        with self._lock:
            self._asked_s, self._kept = None, 0
            self._known, self._order, self._noted = {}, deque(), {}
        if not self._for_copies:
            self._newest.clear()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
