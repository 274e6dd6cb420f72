"""A rank's handshake with the owners of an epoch, and with the successor of one that dies.

[Note: what a successor must have] A rank asks every owner the same when it attaches, and goes on once all have answered
and agree. An owner's successor is asked the same, before any other call. A successor must have what its
predecessor had: the same files of shared memory, and values that are loaded. If it has not, the run cannot go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

from rayzero.concurrency.futures import chain
from rayzero.concurrency.processes import this_process
from rayzero.errors import HandshakeError, RayZeroError, StateLostError
from rayzero.protocol.messages import PROTOCOL_VERSION, ModelSpec, SharedPaths
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import QUICK_S
from rayzero.store.host.owner_link import AnyChannel, OwnerLink, answers_of
from rayzero.store.wire import translate
from rayzero.store.wire.translate import from_failure

LEASE = 0.5
"""Of ``stall_timeout``: how long a rank's link may be down before owners that cannot see its process take it for gone.
So the others, who wait for that rank, hear the reason before their own wait counts as stalled, and by default (300 s)
it is far longer than the 20 s after which either end notices a link that swallows everything."""


class Handshake:
    """What one rank asks the owners of an epoch, and their successors, and what they have answered.

    Knows requests and answers; not what is done with the memory that owners offer, or what travels afterwards."""

    def __init__(self, rank: int, links: Mapping[int, OwnerLink], num_owners: int, stall_timeout: float) -> None:
        """``links``: by owner, to those that this rank has to do with. ``stall_timeout``: seconds that a wait for a
        peer may last without progress. An owner allocates, or restores a checkpoint, before it answers: it has at least
        as long as any other call."""
        self._rank, self._links, self._num_owners = rank, links, num_owners
        self._lease_s, self._deadline_s = stall_timeout * LEASE, max(QUICK_S, stall_timeout)
        self._spec = b""  # the model's, as JSON; it is sent only where an owner needs it
        self._asked: pb.AttachRequest | None = None  # what every owner, and every successor, is asked
        self._sharing: dict[int, pb.ShareRequest] = {}  # by owner, the same of those that offer memory
        self._shared: dict[int, pb.SharedFiles] = {}  # by owner, what those had offered that know of this rank's memory
        self._mirror: pb.SharedFiles | None = None  # this host's copy of the others' parameters
        self._successors: dict[int, pb.AttachResponse] = {}  # by owner, what its last successor has answered
        self.answers: Mapping[int, pb.AttachResponse] = {}  # by owner, what this rank goes on with

    @property
    def has_begun(self) -> bool:
        """Whether an owner may know this rank."""
        return self._asked is not None

    # ---- owners

    def owners_on(self, host: str) -> list[int]:
        """The owners that share the memory of this host; blocks. Raises StallError if a link is down all that time."""
        if not host:
            return []
        request, links = pb.GetHostRequest(rank=self._rank), list(self._links.values())
        for link in links:
            link.open()
        asked = {link: link.ask("GetHost", request, self._deadline_s) for link in links}
        answers = answers_of(asked, self._deadline_s)
        return [link.owner for link, answer in zip(links, answers, strict=True) if answer.host == host]

    def attach(
        self,
        spec: ModelSpec,
        *,
        host: str,
        summed: Sequence[int],
        history: tuple[int, pb.LeadHistory] | None = None,
    ) -> None:
        """Attach to every owner, and keep their ``answers``; blocks.

        host: whose memory the rank can map; empty: none. summed: the ranks whose gradients come as one sum.
        history: the lead's index, and what this rank has asked another lead and been answered.

        Raises HandshakeError unless kernel and version agree, StallError if a link is down all that time."""
        self._spec = translate.spec_to_bytes(spec)
        self._asked = pb.AttachRequest(
            protocol_version=PROTOCOL_VERSION,
            rank=self._rank,
            spec_digest=translate.spec_digest(self._spec),
            layout_digest=spec.layout.digest,
            num_owners=self._num_owners,
            host=host,
            process=translate.process_to_pb(this_process()),
            lease_s=self._lease_s,
            summed=summed,
        )
        asked = {}
        for link in self._links.values():
            link.open()
            mine = _to_owner(self._asked, link.owner)
            if history is not None and link.owner == history[0]:
                mine.history.CopyFrom(history[1])
            asked[link] = self._ask(link, mine)
        answers = dict(zip(self._links, answers_of(asked, self._deadline_s), strict=True))
        self._require_same("kernel", [answer.kernel for answer in answers.values()])
        self._require_same("version", [answer.version for answer in answers.values()])
        self.answers = answers

    def _ask(self, link: OwnerLink, request: pb.AttachRequest) -> Future[pb.AttachResponse]:
        """Attach to one owner, and again with the whole spec if it needs that; does not block."""
        attached = Future[pb.AttachResponse]()

        def answered(asked: Future[pb.AttachResponse]) -> None:
            if asked.exception() is None and asked.result().needs_spec:
                chain(link.ask("Attach", self._whole(request), self._deadline_s), attached)
            else:
                chain(asked, attached)

        link.ask("Attach", request, self._deadline_s).add_done_callback(answered)
        return attached

    def _whole(self, request: pb.AttachRequest) -> pb.AttachRequest:
        whole = pb.AttachRequest(spec=self._spec)
        whole.MergeFrom(request)
        return whole

    def _require_same(self, what: str, values: Sequence[str | int]) -> None:
        first, *_ = self._links.values()
        for link, value in zip(self._links.values(), values, strict=True):
            if value != values[0]:
                raise HandshakeError(
                    f"{first.name} has {what} {values[0]!r}, {link.name} has {value!r}: all owners of a run must agree"
                )

    @property
    def offers(self) -> dict[int, SharedPaths]:
        """By owner of this host, the memory that it offers."""
        found = {owner: answer.shared for owner, answer in self.answers.items() if answer.shared.control}
        return {owner: translate.paths_from_pb(files) for owner, files in found.items()}

    def share(
        self, memory: SharedPaths, back_at: int | None, away: Sequence[int], threads: int = 1
    ) -> SharedPaths | RayZeroError | None:
        """Let every owner that offers memory map this rank's, too; blocks. The first of them, the door of this host,
        copies what the owners ``away`` publish: returns where that is, why there is no copy, or None without such
        owners. ``back_at``: the step with which a rank goes on that has come back. ``threads``: of the door that may
        add gradients for this rank, if they leave its host in a sum."""
        offers, files = self.offers, translate.paths_to_pb(memory)
        controls = {owner: offered.control for owner, offered in offers.items()}
        request = pb.ShareRequest(rank=self._rank, files=files, controls=controls, back_at=back_at)
        self._sharing = dict.fromkeys(offers, request)
        self._shared = {owner: self.answers[owner].shared for owner in offers}
        if away and offers:
            assert self._asked is not None
            of_door = pb.ShareRequest(away=away, summed=self._asked.summed, threads=threads)
            of_door.MergeFrom(request)
            self._sharing[min(offers)] = of_door
        links = [self._links[owner] for owner in offers]
        asked = {link: link.ask("Share", self._sharing[link.owner], self._deadline_s) for link in links}
        answers = dict(zip(offers, answers_of(asked, self._deadline_s), strict=True))
        if not away or not offers:
            return None
        answer = answers[min(offers)]
        if answer.HasField("unmirrored"):
            return from_failure(answer.unmirrored)
        self._mirror = answer.mirror
        return translate.paths_from_pb(answer.mirror)

    @property
    def door(self) -> OwnerLink:
        """The link to the door of this host."""
        return self._links[min(self._sharing)]

    def admit_loss(self, owners: Iterable[int], before: int) -> None:
        """Tell owners that this rank has nothing any more of what it pushed of steps before ``before``; blocks."""
        assert self._asked is not None
        self._asked.lost_before = before
        links = [self._links[owner] for owner in owners]
        asked = {link: self._ask(link, _to_owner(self._asked, link.owner)) for link in links}
        answers_of(asked, self._deadline_s)

    # ---- successors

    def greet(self, link: OwnerLink, channel: AnyChannel, history: pb.LeadHistory | None) -> None:
        """Attach to the successor of an owner, over a channel to it; blocks. ``history``: see ``attach``; None: the
        owner does not lead. Raises as ``Channel.answer`` does."""
        assert self._asked is not None
        request = _to_owner(self._asked, link.owner)
        request.history.SetInParent()
        if history is not None:
            request.history.CopyFrom(history)
        answer = channel.answer(channel.start("Attach", request, self._deadline_s))
        if answer.needs_spec:
            answer = channel.answer(channel.start("Attach", self._whole(request), self._deadline_s))
        self._successors[link.owner] = answer

    def require_values(self, link: OwnerLink) -> None:
        """Raise StateLostError if the successor that was greeted last has not all that its predecessor had."""
        now, before = self._successors[link.owner], self._shared.get(link.owner)
        if now.needs_load or (before is not None and now.shared != before):
            raise self.lost_values(link)

    def share_again(self, link: OwnerLink, channel: AnyChannel) -> None:
        """Let a successor that was greeted map this rank's memory, if its predecessor had; blocks. Raises
        StateLostError if it does not go on with the copy that its predecessor kept."""
        if link.owner not in self._shared:
            return
        request = self._sharing[link.owner]
        answer = channel.answer(channel.start("Share", request, self._deadline_s))
        if self._mirror is not None and request.away and answer.mirror != self._mirror:
            why = f" ({from_failure(answer.unmirrored)})" if answer.HasField("unmirrored") else ""
            raise StateLostError(
                f"rank {self._rank}: {link.name} has died, and its successor does not go on with the copy of other "
                f"hosts' parameters that it kept{why}: start the run again"
            )

    def check_successors(self) -> None:
        """Raise StateLostError if an owner has died since it answered, and its successor has other memory.
        ``require_values`` sees that once this rank has attached."""
        for owner, now in list(self._successors.items()):
            before = self.answers[owner]
            if (before.shared.control and now.shared != before.shared) or (now.needs_load and not before.needs_load):
                raise self.lost_values(self._links[owner])

    def lost_values(self, link: OwnerLink) -> StateLostError:
        """The error of an owner whose successor cannot go on."""
        return StateLostError(
            f"rank {self._rank}: {link.name} has died before it had published every first value, and its successor "
            "lacks some: start the run again"
        )


def _to_owner(request: pb.AttachRequest, owner: int) -> pb.AttachRequest:
    mine = pb.AttachRequest()
    mine.CopyFrom(request)
    mine.owner = owner
    return mine
