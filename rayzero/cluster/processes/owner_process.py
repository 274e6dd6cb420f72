"""An owner inside a process of a run: the shards of its prepared models, and the server in front of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rayzero.cluster.nodes.reachability import address_to_serve, own_addresses, unreachable
from rayzero.cluster.processes.remains import Remains
from rayzero.elastic.reform import Step
from rayzero.owner.terms import OwnerTerms
from rayzero.protocol.ownership import Ownership
from rayzero.security.credentials import Credentials, identity_of
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import OwnerServer, serve_models
from rayzero.store.shm.same_host import why_no_sharing
from rayzero.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSettings:
    """The settings of one owner."""

    owner: int
    num_owners: int
    threads: int  # that compute updates
    memory_budget: int | None  # bytes its plan may use; None: what its host has
    share: Path | None  # directory of memory that is shared with ranks of the same host; None: do not share
    norms_every: int | None  # steps between measurements of norms by layer group; None: never
    device: str = "cpu"  # where masters and states lie
    ownership: Ownership | None = None  # who owns what by now; None: it is the run's first epoch
    succeeds: bool = False  # it takes over the slabs of a dead owner of its number, or those prepared for its epoch
    replaces_members: bool = False  # whoever dies is started again
    token: str = field(repr=False)  # every call to the owner must carry it
    tls: Credentials | None = None  # what it shows to others; None: it uses no TLS
    network: str | None = None  # of the address that it listens at; None: any
    remains: Remains | None = None  # what becomes of its slabs if it is killed; None: others see to them


class ServedOwner:
    """An owner in this process. It starts idle: ``serve`` opens the port."""

    def __init__(self, settings: OwnerSettings, recorder: Recorder) -> None:
        self._settings = settings
        self._identity = identity_of(settings.tls)
        share = settings.share if settings.share is not None and why_no_sharing(settings.share) is None else None
        self.models = HostedModels(
            settings.owner,
            settings.num_owners,
            OwnerTerms(
                threads=settings.threads,
                memory_budget=settings.memory_budget,
                norms_every=settings.norms_every,
                device=torch.device(settings.device),
            ),
            ownership=settings.ownership,
            share=share,
            succeeds=settings.succeeds,
            recorder=recorder,
        )
        self._server: OwnerServer | None = None
        self._janitor = None if settings.remains is None else settings.remains.janitor(share)  # freed by: stop()

    def serve(self, host: str) -> str:
        """Start serving on a free port of ``host``; the address for ranks and other owners. Raises ConfigError if this
        host has no such address."""
        replaces = self._settings.replaces_members
        self._server = serve_models(
            self.models,
            token=self._settings.token,
            tls=self._identity,
            host=self._at(host),
            replaces_ranks=replaces,
            replaces_owners=replaces and self._settings.share is not None,
        )
        return self._server.address

    @property
    def server(self) -> OwnerServer:
        assert self._server is not None, "serve() comes first"
        return self._server

    def listen(self, host: str) -> str:
        """Serve on a free port of ``host``, too; the address there."""
        return self.server.listen(self._at(host))

    def _at(self, host: str) -> str:
        return address_to_serve(f"optimizer {self._settings.owner}", host, self._settings.network, own_addresses())

    def renew(self, tls: Credentials) -> None:
        """Show this from now on; connections stay open."""
        if self._identity is not None:
            self._identity.renew(tls)

    def stop(self) -> None:
        """Close the port, free the shards. Idempotent."""
        if self._server is not None:
            self._server.stop()
        self.models.close()
        if self._janitor is not None:
            self._janitor.close()


class MemberProcess:
    """A process that may have an owner in it: a rank worker, or an optimizer actor. What a run's driver asks of both
    alike, of the owner and of the host."""

    _owner: ServedOwner | None  # None: it is no owner, or none yet

    @property
    def _served(self) -> ServedOwner:
        assert self._owner is not None, "this process is no owner, or none yet"
        return self._owner

    # ---- the owner: see ServedOwner and OwnerServer

    def serve(self, host: str) -> str:
        return self._served.serve(host)

    def tensor_address(self, address: str) -> str:
        return self._served.server.tensor_address(address)

    def listen(self, host: str) -> str:
        return self._served.listen(host)

    def connect_peers(self, addresses: Sequence[str]) -> None:
        self._served.server.connect_peers(addresses)

    def lose(self, rank: int, life: int) -> None:
        self._served.server.lose(rank, life)

    def abandon(self) -> None:
        self._served.server.abandon()

    def carry_out(self, step: Step, arguments: Sequence[Any]) -> Any:
        """Take a step of a change of the owners; see elastic/reform.py. Raises RayZeroError if it cannot."""
        return getattr(self._served.server, step)(*arguments)

    # ---- the host

    def unreachable(self, addresses: Sequence[str]) -> dict[str, str]:
        """Those owners' addresses that this host does not reach, and why."""
        return unreachable(addresses)

    def sees(self, path: str) -> bool:
        """Whether a file that the driver has written is on this host, too, where this process may look."""
        return os.path.exists(path)  # Path.exists() raises what a folder without permission does
