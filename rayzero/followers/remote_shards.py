"""A run's published shards on other hosts, as its owners give them over the network.

[Note: a version from afar] Owners overwrite in place and wait for no follower, and hold no version for one. A follower
that has nothing takes each shard whole, of the version c that it has by then; then what later versions have changed,
c to c + 1 and so on, up to a version that all shards have reached. So it comes to that version exactly, whatever is
published meanwhile. Where owners know the changes no more, because it was slow, it takes those shards whole again.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from rayzero.codecs.changes import Change, Form, apply, checksum
from rayzero.codecs.record import kept_bytes, read_record
from rayzero.errors import RayZeroError, StoreError, TransferError, UnsupportedError
from rayzero.followers.held_version import Content, FollowerStats, Shards, Tally
from rayzero.layout.model_layout import ModelLayout
from rayzero.records import parse_record
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import QUICK_S, Caller, Channel
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.rpc import CallTerms, LinkNumber
from rayzero.store.wire.tensor_streams import Transfer

_LOOK_S = 0.5  # between two looks who the owners are, while not all of them can be reached
_SLOWEST_BYTES_PER_S = 1e6  # a transfer slower than this is given up
_AT_ONCE = 8  # owners that give shards
_NOTHING = -1, 0.0  # was heard of a shard
_NO_SHARDS = 1 << 62  # the version of an owner without any

_Held = list[Content | None]  # by shard: its owner's instance, when it changed, writes, version, checksum
Way = tuple[Sequence[str], CallTerms]  # the owners' addresses, by index, and what each call shows


class OwnerFeed:
    """What one owner says that it has published, and the way to ask it for that. A thread listens.

    Knows the owner as long as its link does not break; not other owners, or what becomes of the bytes."""

    def __init__(self, owner: int, address: str, terms: CallTerms) -> None:
        self.address, self.peer = address, f"optimizer {owner} at {address}"
        caller = Caller.follower(secrets.token_hex(4))
        link = LinkNumber(caller.name, 0).next()
        self._channel = Channel(caller, self.peer, address, link, terms.metadata, terms.tls)  # freed by: close()
        self._lock = threading.Lock()
        self._heard: dict[int, tuple[int, float]] = {}  # by shard: its version, and since when: monotonic seconds
        self.followed: pb.Followed | None = None  # None: it has not said anything yet
        self.broken: RayZeroError | None = None  # why it says nothing more
        threading.Thread(target=self._listen, name="rayzero-follower", daemon=True).start()

    def _listen(self) -> None:
        try:
            for notice in self._channel.notices():
                with self._lock:
                    self._heard.update((each.shard, (each.version, time.monotonic())) for each in notice.published)
                if notice.HasField("followed"):
                    self.followed = notice.followed
            self.broken = TransferError(f"{self.peer} says nothing more")
        except RayZeroError as error:
            self.broken = error
        self.close()  # a transfer of its shards would wait for its deadline

    @property
    def version(self) -> int:
        """The newest version that all of its shards have reached; -1: some have no values yet. Any if it has none."""
        assert self.followed is not None
        with self._lock:
            return min((self._heard.get(shard, _NOTHING)[0] for shard in self.followed.shards), default=_NO_SHARDS)

    def fill(self, version: int, layout: ModelLayout, values: Sequence[Tensor], held: _Held, tally: Tally) -> None:
        """Bring this owner's shards to ``version``, or as near as it can; see ``Shards.fill``. If that fails,
        ``broken`` says why; what has come is kept."""
        assert self.followed is not None
        instance, shards = self.followed.instance, [layout.shards[shard] for shard in self.followed.shards]
        wanted = [_wanted(shard.index, held[shard.index], instance) for shard in shards]
        request = pb.GetShardsRequest(instance=instance, wanted=wanted, version=version)
        deadline_s = QUICK_S + sum(kept_bytes(layout.units[s.unit], s) for s in shards) / _SLOWEST_BYTES_PER_S
        try:
            with self._channel.transfer("GetShards", request, deadline_s) as transfer:
                for response in transfer.answers():
                    for part in pb.GetShardsResponse.FromString(response).parts:
                        had, held[part.shard] = held[part.shard], None
                        found = _receive(part, transfer, layout, values[part.shard], had)
                        held[part.shard] = instance, part.content, part.writes, part.version, found
                        tally.add(self._count(part))
        except StoreError as error:
            self.broken = self.broken or error

    def _count(self, part: pb.GetShardsResponse.Part) -> FollowerStats:
        """What has come of a shard; with its time, unless its owner has published others since."""
        if not part.size_bytes:
            return FollowerStats()
        with self._lock:
            version, heard_s = self._heard.get(part.shard, _NOTHING)
        arrivals, changes = int(version == part.version), part.HasField("checksum")
        return FollowerStats(
            whole_bytes=0 if changes else part.size_bytes,
            change_bytes=part.size_bytes if changes else 0,
            arrivals=arrivals,
            arrival_s=arrivals * (time.monotonic() - heard_s),
        )

    def close(self) -> None:
        """End the link. Idempotent."""
        self._channel.close()


def _wanted(shard: int, content: Content | None, instance: int) -> pb.GetShardsRequest.Wanted:
    if content is None:
        return pb.GetShardsRequest.Wanted(shard=shard)
    of, changed, writes, version, found = map(int, content)
    wanted = pb.GetShardsRequest.Wanted(shard=shard, version=version, checksum=found, writes=writes)
    if of == instance:
        wanted.content = changed
    return wanted


def _receive(
    part: pb.GetShardsResponse.Part, transfer: Transfer, layout: ModelLayout, values: Tensor, had: Content | None
) -> int:
    """Take what comes of a shard, so that ``values`` are what it is then; returns their checksum. ``had``: what they
    were. Raises TransferError if it cannot be the shard's."""
    shard = layout.shards[part.shard]
    unit = layout.units[shard.unit]
    if had is None and (part.positions or not part.size_bytes):
        raise TransferError(f"only what is new comes of shard {shard.index}, of which nothing is here")
    if not part.size_bytes:
        assert had is not None
        return int(had[-1])
    most = kept_bytes(unit, shard)
    apart = unit.is_coded or part.positions
    if part.size_bytes > most or (part.size_bytes != most and not apart):
        raise TransferError(f"{part.size_bytes:,} bytes come of shard {shard.index}, which has {most:,}")
    out = torch.empty(part.size_bytes, dtype=torch.uint8, device="cpu") if apart else values
    transfer.receive(Assembly(shard.index, part.size_bytes, byte_view(out)))
    if part.positions:
        assert had is not None
        payload, before = byte_view(out).data, int(had[-2])
        change = Change(before=before, after=part.version, form=Form.POSITIONS, payload=payload, checksum=part.checksum)
        apply(change, values)
        return part.checksum
    if unit.is_coded:
        read_record(out, unit, shard, values)
    found = checksum(values)
    if part.HasField("checksum") and part.checksum != found:
        raise TransferError(f"shard {shard.index} v{part.version} does not have the checksum that its owner says")
    return found


class RemoteShards(NamedTuple):
    """``Shards`` of owners on other hosts. The memory of one layout may be filled by one thread at a time.

    Knows who has which shard; not how an owner is reached."""

    feeds: Sequence[OwnerFeed]  # of all owners
    layout: ModelLayout
    lineage: str

    @property
    def version(self) -> int:
        """See ``Shards``."""
        return min(feed.version for feed in self.feeds)

    def has(self, shard: int, version: int, content: Content | None) -> bool:
        """See ``Shards``. Only its owner knows, whom ``fill`` asks."""
        return False

    def fill(self, version: int, values: Sequence[Tensor], contents: list[Content | None], tally: Tally) -> bool:
        """See ``Shards``. From all owners at once."""
        with ThreadPoolExecutor(_AT_ONCE, "rayzero-follower") as pool:
            list(pool.map(lambda feed: feed.fill(version, self.layout, values, contents, tally), self.feeds))
        return all(content is not None and content[-2] == version for content in contents)


class RemoteRun:
    """A ``FollowedRun`` whose owners are called over the network.

    Knows owners by their addresses, which change when one is replaced; not who says so."""

    _pid = 0  # of the process that made one first: gRPC works in no process that it forks from then on

    def __init__(self, run: str, find: Callable[[], Way | str]) -> None:
        """``find``: the way to the present owners, or why there is none now. It may take some milliseconds."""
        RemoteRun._pid = RemoteRun._pid or os.getpid()
        self.run, self._find = run, find
        self._feeds: list[OwnerFeed] = []  # freed by: close(), _look()
        self._shards: RemoteShards | None = None
        self._looked = float("-inf")  # monotonic seconds
        self._missing = ""  # see ``missing``

    @property
    def missing(self) -> str:
        """See ``FollowedRun``."""
        return next((str(feed.broken) for feed in self._feeds if feed.broken is not None), self._missing)

    def shards(self) -> RemoteShards | None:
        """See ``FollowedRun``. Raises UnsupportedError in a forked process."""
        if self._pid != os.getpid():
            raise UnsupportedError(
                f"run {self.run!r} cannot be followed over the network in this process, which process {self._pid} "
                "forked after it had followed a run: start this one by spawn"
            )
        broken = [feed.broken for feed in self._feeds if feed.broken is not None]
        if broken or not self._feeds:
            self._shards, self._missing = None, self.missing
            for error in broken:
                if isinstance(error, UnsupportedError):
                    raise error
            self._look()
        elif self._shards is None:
            self._shards = self._met()
        return self._shards

    def has(self, shards: Shards) -> bool:
        """See ``FollowedRun``. What an owner gives says itself which version it is."""
        return True

    def _look(self) -> None:
        """Open links to owners that have none which works."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        found = self._find()
        addresses = () if isinstance(found, str) else found[0]
        works = {feed.address: feed for feed in self._feeds if feed.broken is None and feed.address in addresses}
        _close(feed for feed in self._feeds if works.get(feed.address) is not feed)
        if isinstance(found, str):
            self._feeds, self._missing = [], found
        else:
            self._feeds = [works.get(at) or OwnerFeed(owner, at, found[1]) for owner, at in enumerate(addresses)]

    def _met(self) -> RemoteShards | None:
        """The shards, if every owner has said what it has, and they are of one epoch."""
        silent = [feed.peer for feed in self._feeds if feed.followed is None]
        if silent:
            self._missing = f"{silent[0]} has not said yet what it has"
            return None
        followed = [feed.followed for feed in self._feeds if feed.followed is not None]
        layout = parse_record(followed[0].layout, ModelLayout)
        shards = sorted(shard for each in followed for shard in each.shards)
        one_epoch = len({(each.lineage, each.epoch, each.layout) for each in followed}) == 1
        if not one_epoch or shards != list(range(len(layout.shards))):
            self._missing = f"the optimizers of run {self.run!r} are changing"
            _close(self._feeds)  # some are of the last epoch
            self._feeds = []
            return None
        self._missing = ""
        return RemoteShards(tuple(self._feeds), layout, followed[0].lineage)

    def close(self) -> None:
        """See ``FollowedRun``."""
        _close(self._feeds)
        self._feeds, self._shards = [], None


def _close(feeds: Iterable[OwnerFeed]) -> None:
    for feed in feeds:
        feed.close()
