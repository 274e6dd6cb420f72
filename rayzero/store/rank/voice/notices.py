"""A rank hears from its host's voice what owners on other hosts publish, instead of from the owners' own streams.

An owner on another host tells the voice what it publishes, and the voice tells the other ranks of its host: one message
crosses the network for all of them. Each rank keeps its own stream of notices, because the stream shows a break at once
and says when the run ends. While the voice tells the rank what an owner publishes, the owner mutes that stream.

[Note: between two who tell] A rank that asks an owner to mute its stream, or to go on, is told everything that is
published once more. What is published after that comes from the voice, which has said before that its link to the owner
is open, or else over the stream. A link of the voice that breaks in between begins again with everything that is
published, which the voice passes on, and a voice that cannot tell a rank something ends its line. So nothing is lost,
and what comes twice or late changes nothing (publish_board.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.owner_link import OwnerLink
from rayzero.store.host.publish_board import PublishBoard
from rayzero.store.rank.voice.line import LONGEST_S
from rayzero.store.wire import translate

BY_ITSELF_S = 300.0  # a rank that has waited for an owner for long hears it itself: most steps are shorter than that


class HostNotices:
    """An ``Ear`` (line.py) for publications of owners on other hosts.

    Knows which streams this rank has muted; not how the voice is reached."""

    def __init__(
        self, links: Mapping[int, OwnerLink], board: PublishBoard, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``links``: by owner, those to other hosts."""
        self._links, self._board, self._clock = links, board, clock
        self._waited: dict[int, float] = {}  # owner -> when the rank was last seen to wait for it for long
        self._lock = threading.Lock()
        self._muted: frozenset[int] = frozenset()
        self._numbers = dict.fromkeys(links, 0)  # of the last request to each owner

    def notice(self, owner: int, message: bytes) -> None:
        """See ``Ear.notice``."""
        self._board.publish(translate.published_from_pb(pb.NoticesResponse.FromString(message)))

    def follow(self, owners: frozenset[int]) -> None:
        """See ``Ear.follow``. A rank that has waited for an owner for long has it tell the rank itself, whatever the
        voice says; also at the next steps, which may be as slow: it asks the owner twice, not at every step."""
        now = self._clock()
        self._waited.update(dict.fromkeys(self._board.waited_for(LONGEST_S), now))
        itself = {owner for owner, seen in self._waited.items() if now - seen < BY_ITSELF_S}
        wanted = (owners & self._links.keys()) - itself
        with self._lock:
            changed, self._muted = wanted ^ self._muted, wanted
        for owner in sorted(changed):
            self._ask(owner)

    def reopened(self, owner: int) -> None:
        """A new stream of the owner has begun, which is not muted, unless an earlier request of this rank is repeated
        there."""
        if self._numbers.get(owner):
            self._ask(owner)

    def _ask(self, owner: int) -> None:
        """Ask an owner for what is wanted now. If it does not answer, its link is over, and every wait hears that."""
        link = self._links[owner]
        with self._lock:
            self._numbers[owner] += 1
            number, muted = self._numbers[owner], owner in self._muted
        link.ask("Mute", pb.MuteRequest(rank=link.caller.number, number=number, muted=muted))
