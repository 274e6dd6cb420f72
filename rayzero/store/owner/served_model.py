"""One prepared model as its owner's server has it: what is called for it, who listens to it, who leads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rayzero.concurrency.event_loop import shared_loop
from rayzero.errors import ConfigError, StoreError
from rayzero.lead.lead import StepLead
from rayzero.protocol.owner import OwnerPeer
from rayzero.quantities import count
from rayzero.store.owner.handlers import ModelCalls
from rayzero.store.owner.hosted import Hosted
from rayzero.store.owner.notice_board import NoticeBoard
from rayzero.store.owner.owner_state import OwnerState
from rayzero.store.owner.peers.local import LocalPeer
from rayzero.store.owner.peers.shared import SharedPeer
from rayzero.store.owner.peers.wire import RemotePeer
from rayzero.store.wire.rpc import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTerms:
    """What a server has for all of its models: see ``OwnerServer``."""

    token: str = field(repr=False)
    tls: TlsFiles | None
    poll_s: float
    peer_timeout_s: float


class ServedModel:
    """One prepared model's service behind a server, and its lead.

    Knows the model's number and its peers; not addresses of its own, nor the other models."""

    def __init__(self, number: int, hosted: Hosted, terms: ServerTerms) -> None:
        """Call it off the event loop."""
        service, shared = hosted
        self._number, self._service, self._terms = number, service, terms
        self._peers: list[RemotePeer] = []
        board = NoticeBoard(shared_loop().loop)
        local = LocalPeer(service, board.abort)
        self.state = OwnerState(service=service, board=board, poll_s=terms.poll_s, local=local, shared=shared)
        self.calls = ModelCalls(self.state)
        service.on_publish(board.publish)
        if shared is not None:
            shared.serve(service, self.state.steps.begin_bytes)

    def connect_peers(self, addresses: Sequence[str]) -> None:
        """See ``OwnerServer.connect_peers``. Call it off the event loop."""
        service, terms = self._service, self._terms
        if len(addresses) != service.num_owners:
            raise ConfigError(f"{len(addresses)} addresses for {count(service.num_owners, 'owner')}")
        self._peers = [
            RemotePeer(
                owner,
                address,
                token=terms.token,
                tls=terms.tls,
                timeout_s=terms.peer_timeout_s,
                model=self._number,
            )
            for owner, address in enumerate(addresses)
            if owner != service.owner
        ]
        shared = self.state.shared
        peers: list[OwnerPeer] = [SharedPeer(shared, peer) if shared is not None else peer for peer in self._peers]
        peers.insert(service.owner, self.state.local)
        record = shared.record if shared is not None else None
        self.state.lead = StepLead(peers, record, service.recorder)

    def end(self) -> None:
        """Fail all that waits, before the server stops listening."""
        state = self.state
        state.stopping = True
        state.local.abort(StoreError(f"optimizer {self._service.owner} was stopped"))
        if state.leads and state.lead is not None:  # it ends the run for all; who leads nobody does not
            state.lead.close()

    def close(self) -> None:
        """Close the connections to peers and what is shared, after the server has stopped."""
        for peer in self._peers:
            peer.close()
        if self.state.shared is not None:
            self.state.shared.close()
        self.state.pool.shutdown(wait=True)
