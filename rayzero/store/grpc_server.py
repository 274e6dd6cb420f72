"""An owner's gRPC server: one ``ShardService`` behind an address."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from rayzero.errors import ConfigError, StoreError
from rayzero.optimizer.lead import StepLead
from rayzero.optimizer.peers import OwnerPeer
from rayzero.optimizer.service import ShardService
from rayzero.store.grpc_handlers import generic_handlers
from rayzero.store.grpc_peer import RemotePeer
from rayzero.store.local_peer import LocalPeer
from rayzero.store.loop import shared_loop
from rayzero.store.notices import NoticeBoard
from rayzero.store.owner_state import OwnerState
from rayzero.store.rpc import OWNER_SERVICE, SERVER_OPTIONS, STORE_SERVICE, TlsFiles
from rayzero.store.shared_owner import SharedOwner
from rayzero.store.shared_peer import SharedPeer

_QUICK_S = 30.0  # starting and stopping a server
_GRACE_S = 2.0  # for calls to end when the server stops

log = logging.getLogger(__name__)


class OwnerServer:
    """Serves one ``ShardService`` (and, on the owner of shard 0, the ``StepLead``) over gRPC.

    Knows its address, its peers and when it is stopping; not what a call does (grpc_handlers.py). All servers of a
    process share one event-loop thread. The service is not its own: whoever made it closes it, after ``stop()``.
    """

    def __init__(
        self,
        service: ShardService,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: TlsFiles | None = None,
        poll_s: float = 10.0,
        peer_timeout_s: float = 600.0,
        shared: SharedOwner | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    ) -> None:
        """Listen on ``host`` (``port`` 0: any free one); ``address`` says where.

        ``token``: what every caller must send, not empty. ``poll_s``: how long a call that waits for other ranks is
        held before its caller is told to ask again. ``peer_timeout_s``: deadline of the lead's calls that compute.
        ``shared``: the service's memory, to be shared with ranks of the same host.
        ``interceptors``: grpc.aio server interceptors, around every call. Raises StoreError when the port is taken.
        """
        if not token:
            raise ConfigError("token must not be empty: it is all that keeps others on this network out of the run")
        self._loop = shared_loop()
        self._peers: list[RemotePeer] = []
        self._token, self._tls, self._peer_timeout_s = token, tls, peer_timeout_s
        board = NoticeBoard(self._loop.loop)
        self._state = OwnerState(
            service=service,
            board=board,
            token=token,
            poll_s=poll_s,
            local=LocalPeer(service, board.abort),
            shared=shared,
        )
        self.address = self._loop.run(self._start(host, port, tls, list(interceptors)), _QUICK_S)
        service.on_publish(board.publish)
        if shared is not None:
            shared.serve(service, self._state.steps.begin_bytes)
        if tls is None and not _is_loopback(host):
            log.warning("optimizer %d listens on %s without TLS", service.owner, self.address)

    async def _start(self, host: str, port: int, tls: TlsFiles | None, interceptors: list[Any]) -> str:
        self._server = grpc.aio.server(
            handlers=generic_handlers(self._state), interceptors=interceptors, options=SERVER_OPTIONS
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in its stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        bound = self._bind(_joined(host, port), tls)
        await self._server.start()
        for name in (STORE_SERVICE, OWNER_SERVICE):
            await self._health.set(name, HealthCheckResponse.SERVING)
        return _joined(host, bound)

    def _bind(self, address: str, tls: TlsFiles | None) -> int:
        try:
            if tls is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, tls.server_credentials())
        except RuntimeError as exc:
            raise StoreError(f"optimizer {self._state.service.owner} cannot listen on {address}: {exc}") from exc

    def connect_peers(self, addresses: Sequence[str]) -> None:
        """Tell this owner where all owners listen (by index, itself included), before the first rank attaches.

        The owner of shard 0 leads with it; on the others it is unused."""
        service = self._state.service
        if len(addresses) != service.num_owners:
            raise ConfigError(f"{len(addresses)} addresses for {service.num_owners} owners")
        self._peers = [
            RemotePeer(owner, address, token=self._token, tls=self._tls, timeout_s=self._peer_timeout_s)
            for owner, address in enumerate(addresses)
            if owner != service.owner
        ]
        shared = self._state.shared
        peers: list[OwnerPeer] = [SharedPeer(shared, peer) if shared is not None else peer for peer in self._peers]
        peers.insert(service.owner, self._state.local)
        record = shared.record if shared is not None else None
        self._state.lead = StepLead(peers, record, service.recorder)

    def stop(self) -> None:
        """Stop listening, end every call and stream, close the connections to peers. Idempotent."""
        if self._state.stopping:
            return
        self._state.stopping = True
        self._state.local.abort(StoreError(f"optimizer {self._state.service.owner} was stopped"))
        if self._state.leads and self._state.lead is not None:  # it ends the run for all; who leads nobody does not
            self._state.lead.close()
        self._loop.run(self._stop(), _QUICK_S)
        for peer in self._peers:
            peer.close()
        if self._state.shared is not None:
            self._state.shared.close()
        self._state.pool.shutdown(wait=True)

    async def _stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        self._state.end_calls()
        await self._server.stop(_GRACE_S)  # what is left is answering; without grace callers would see a reset link

    def __enter__(self) -> OwnerServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
