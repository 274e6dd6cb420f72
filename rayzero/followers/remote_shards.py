"""A run's published shards on other hosts, as its owners give them over the network.

[Note: a version from afar] Owners overwrite in place and wait for no follower. So a follower asks each owner for its
shards as they are by then; they are of one version if no step was decided meanwhile, which is as long as the ranks'
forward and backward. What has come and did not change until the next try does not come again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rayzero.codecs.record import kept_bytes, read_record
from rayzero.errors import RayZeroError, StoreError, TransferError, UnsupportedError
from rayzero.followers.held_version import Content, Shards, Tally
from rayzero.layout.model_layout import ModelLayout
from rayzero.records import parse_record
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.caller import Caller
from rayzero.store.host.links.channel import QUICK_S, Channel
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.rpc import CallTerms, LinkNumber
from rayzero.store.wire.tensor_stream import Receiving, StreamEndedError, TensorStream

_LOOK_S = 0.5  # between two looks who the owners are, while not all of them can be reached
_SLOWEST_BYTES_PER_S = 1e6  # a transfer slower than this is given up
_AT_ONCE = 8  # owners that give shards
_NOTHING = -1, 0.0  # was heard of a shard
_NO_SHARDS = 1 << 62  # the version of an owner without any

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
            for notice in self._channel.messages(self._channel.notices):
                with self._lock:
                    self._heard.update((each.shard, (each.version, time.monotonic())) for each in notice.published)
                if notice.HasField("followed"):
                    self.followed = notice.followed
            self.broken = TransferError(f"{self.peer} says nothing more")
        except RayZeroError as error:
            self.broken = error

    @property
    def version(self) -> int:
        """The newest version that all of its shards have reached; -1: some have no values yet. Any if it has none."""
        assert self.followed is not None
        with self._lock:
            return min((self._heard.get(shard, _NOTHING)[0] for shard in self.followed.shards), default=_NO_SHARDS)

    def _since(self, part: pb.GetShardsResponse.Part) -> float | None:
        """Seconds since the owner has said that this version is published; None: it has not, or others since."""
        with self._lock:
            version, heard = self._heard.get(part.shard, _NOTHING)
        return time.monotonic() - heard if version == part.version else None

    def fill(
        self,
        layout: ModelLayout,
        values: Sequence[Tensor],
        contents: list[Content | None],
        versions: list[int],
        tally: Tally,
    ) -> None:
        """Bring this owner's shards to what it has published by then; see ``Shards.fill``. ``versions``: by shard,
        which that is. If it fails, ``broken`` says why; what has come is kept."""
        try:
            self._fill(layout, values, contents, versions, tally)
        except StoreError as error:
            self.broken = error

    def _fill(
        self,
        layout: ModelLayout,
        values: Sequence[Tensor],
        contents: list[Content | None],
        versions: list[int],
        tally: Tally,
    ) -> None:
        assert self.followed is not None
        of, wanted, size_bytes = str(self.followed.instance), [], 0
        for shard in self.followed.shards:
            size_bytes += kept_bytes(layout.units[layout.shards[shard].unit], layout.shards[shard])
            whose, content, writes = contents[shard] or ("", 0, 0)
            known = {"content": content, "writes": writes} if whose == of else {}
            wanted.append(pb.GetShardsRequest.Wanted(shard=shard, **known))
        request = pb.GetShardsRequest(instance=self.followed.instance, wanted=wanted)
        channel, deadline_s = self._channel, QUICK_S + size_bytes / _SLOWEST_BYTES_PER_S
        with channel.beside() as beside:
            call = channel.stream("GetShards", request, deadline_s, beside)
            try:
                for answer in channel.messages(call):
                    for part in answer.parts:
                        if part.size_bytes:
                            contents[part.shard] = None
                            _receive(part, beside.stream, layout, values[part.shard])
                            contents[part.shard] = of, part.content, part.writes
                            tally.came(part.size_bytes, self._since(part))
                        versions[part.shard] = part.version
            except StreamEndedError as ended:
                why = channel.why_ended(call, ended)
                raise why from why.__cause__

    def close(self) -> None:
        """End the link. Idempotent."""
        self._channel.close()


def _receive(part: pb.GetShardsResponse.Part, stream: TensorStream, layout: ModelLayout, values: Tensor) -> None:
    """Take a shard's bytes into ``values``. Raises TransferError if they cannot be the shard's."""
    shard = layout.shards[part.shard]
    unit = layout.units[shard.unit]
    most = kept_bytes(unit, shard)
    if part.size_bytes > most or (part.size_bytes != most and not unit.is_coded):
        raise TransferError(f"{part.size_bytes:,} bytes come of shard {shard.index}, which has {most:,}")
    out = torch.empty(part.size_bytes, dtype=torch.uint8, device="cpu") if unit.is_coded else values
    stream.pass_all(Receiving(stream, Assembly(shard.index, part.size_bytes, byte_view(out))))
    if unit.is_coded:
        read_record(out, unit, shard, values)


class RemoteShards:
    """``Shards`` of owners on other hosts.

    Knows who has which shard; not how an owner is reached."""

    def __init__(self, feeds: Sequence[OwnerFeed], layout: ModelLayout, lineage: str) -> None:
        """``feeds``: of all owners. The memory of one layout may be filled by one thread at a time."""
        self.layout, self.lineage = layout, lineage
        self._feeds = feeds

    @property
    def version(self) -> int:
        """See ``Shards``."""
        return min(feed.version for feed in self._feeds)

    def has(self, shard: int, version: int, content: Content | None) -> bool:
        """See ``Shards``. Only its owner knows, whom ``fill`` asks."""
        return False

    def fill(self, version: int, values: Sequence[Tensor], contents: list[Content | None], tally: Tally) -> bool:
        """See ``Shards``. From all owners at once."""
        versions = [-1] * len(values)
        with ThreadPoolExecutor(_AT_ONCE, "rayzero-follower") as pool:
            list(pool.map(lambda feed: feed.fill(self.layout, values, contents, versions, tally), self._feeds))
        return all(each == version for each in versions)


class RemoteRun:
    """A ``FollowedRun`` whose owners are called over the network.

    Knows owners by their addresses, which change when one is replaced; not who says so."""

    def __init__(self, run: str, find: Callable[[], Way | None]) -> None:
        """``find``: the way to the present owners; None: there are none now. It may take some milliseconds."""
        self.run, self._find = run, find
        self._feeds: list[OwnerFeed] = []  # freed by: close(), _look()
        self._shards: RemoteShards | None = None
        self._looked = float("-inf")  # monotonic seconds
        self._missing = f"no optimizer of run {run!r} is known"

    @property
    def missing(self) -> str:
        """See ``FollowedRun``."""
        return self._missing

    def shards(self) -> RemoteShards | None:
        """See ``FollowedRun``."""
        broken = [feed.broken for feed in self._feeds if feed.broken is not None]
        if broken or not self._feeds:
            self._shards = None
            self._missing = str(broken[0]) if broken else self._missing
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
        addresses, terms = self._find() or ((), None)
        works = {feed.address: feed for feed in self._feeds if feed.broken is None and feed.address in addresses}
        _close(feed for feed in self._feeds if works.get(feed.address) is not feed)
        self._feeds = []
        if terms is not None:
            self._feeds = [works.get(at) or OwnerFeed(owner, at, terms) for owner, at in enumerate(addresses)]

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
        return RemoteShards(tuple(self._feeds), layout, followed[0].lineage)

    def close(self) -> None:
        """See ``FollowedRun``."""
        _close(self._feeds)
        self._feeds, self._shards = [], None


def _close(feeds: Iterable[OwnerFeed]) -> None:
    for feed in feeds:
        feed.close()
