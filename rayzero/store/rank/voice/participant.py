"""One rank's part in its host's voice: it speaks for its host, or hears the rank that does (speaker.py, line.py)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rayzero.config.zero import HostVoice, speaks_for_host
from rayzero.protocol.messages import ModelSpec
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.owner_link import OwnerLink
from rayzero.store.host.publish_board import PublishBoard
from rayzero.store.rank.voice.line import VoiceLine, voice_address
from rayzero.store.rank.voice.notices import HostNotices
from rayzero.store.rank.voice.speaker import Voice
from rayzero.store.shm.same_host import host_identity

log = logging.getLogger(__name__)


class VoiceParticipant:
    """What one rank has to do with its host's voice, in one epoch. Without a voice, that is nothing.

    Knows who speaks, and which owners are elsewhere; not what is asked or published."""

    def __init__(
        self,
        setting: HostVoice,
        rank: int,
        ranks: Sequence[int],
        directory: Path | None,
        *,
        key: str,
        model: int,
        epoch: int,
        life: int,
        stall_timeout: float,
    ) -> None:
        """``setting``: see ``ZeroConfig.host_voice``. ``ranks``: of the host. ``directory``: that they share; None: no
        voice. ``key``: a secret that all ranks of one start of a run have, and no others. ``model``: the prepared
        model's number. ``life``: how often the rank has died and come back. ``stall_timeout``: seconds."""
        self._setting, self._rank, self._ranks, self._directory = setting, rank, ranks, directory
        self._key, self._model, self._epoch, self._life = key, model, epoch, life
        self._stall_timeout = stall_timeout
        self._away: Mapping[int, OwnerLink] = {}
        self.speaker: Voice | None = None  # after open, if this rank speaks. freed by: close()
        self.notices: HostNotices | None = None  # after open, else
        self.line: VoiceLine | None = None  # after open. freed by: close(), join()

    def who_speaks(self, spec: ModelSpec) -> int | None:
        """The rank of this host that asks the lead for all of them; None: each asks itself."""
        speaks = self._directory is not None and speaks_for_host(self._setting, len(self._ranks), spec.world_size)
        return min(self._ranks) if speaks else None

    def open(
        self, spec: ModelSpec, lead: OwnerLink, away: Mapping[int, OwnerLink], board: PublishBoard
    ) -> VoiceLine | None:
        """Speak for the host if this rank is the one, and be connected to who does; hear of the owners ``away``, which
        are on other hosts. Returns the line through which the lead is asked; None: this rank asks itself, because
        nobody speaks or the lead is on this host."""
        voice = self.who_speaks(spec)
        if voice is None or not away:
            return None
        assert self._directory is not None
        address = voice_address(
            self._key, spec.run, spec.lineage, self._model, self._epoch, host_identity(self._directory), voice
        )
        self._away = away
        if voice == self._rank:
            try:
                self.speaker = Voice(address, self._rank, self._ranks, lead, self._stall_timeout, away)
            except OSError as error:
                log.warning("rank %d cannot speak for its host, whose ranks ask themselves: %s", self._rank, error)
        else:
            self.notices = HostNotices(away, board)
        self.line = VoiceLine(address, self._rank, self._life, self.notices)
        return self.line if lead.owner in away else None

    def pass_on(self, link: OwnerLink, notice: pb.NoticesResponse) -> None:
        """Tell the other ranks of the host what an owner elsewhere publishes, if this one speaks."""
        if self.speaker is not None and link.owner in self._away:
            self.speaker.pass_on(link.owner, notice.published)

    def heard(self, link: OwnerLink, notice: pb.NoticesResponse) -> None:
        """An owner's own notice has come; a first one says that its stream is not muted."""
        if self.notices is not None and notice.HasField("process"):
            self.notices.reopened(link.owner)

    def drop(self) -> None:
        """The lead has died; see ``Voice.drop``."""
        if self.speaker is not None:
            self.speaker.drop()

    def leave(self) -> None:
        """Ask through nobody any more. What the voice has not said yet, this rank says itself. Idempotent."""
        if self.line is not None:
            self.line.close()

    def close(self) -> None:
        """Speak for nobody any more, either; after the links are closed. Idempotent."""
        self.leave()
        if self.speaker is not None:
            self.speaker.close()

    def join(self) -> None:
        """Wait for the line's thread, after ``close``."""
        if self.line is not None:
            self.line.join()
