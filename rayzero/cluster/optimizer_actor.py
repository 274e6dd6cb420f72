"""The optimizer actor: a process that holds shards and serves them; the Ray shell around two plain objects."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch

from rayzero.cluster.coordinator import Member
from rayzero.cluster.measured import Measured
from rayzero.cluster.supervision import optimizer_name
from rayzero.optimizer.service import ShardService
from rayzero.store.grpc_server import OwnerServer
from rayzero.store.malloc import keep_message_buffers
from rayzero.store.same_host import why_no_sharing
from rayzero.store.shared_owner import SharedOwner
from rayzero.telemetry.recorder import MemoryRecorder

__all__ = ["OptimizerActor", "OwnerSettings", "this_process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSettings:
    """What one owner is started with."""

    owner: int
    num_owners: int
    threads: int  # that compute updates
    memory_budget: int  # bytes its plan may use
    share: Path | None  # directory of memory that is shared with ranks of the same host; None: do not share
    token: str = field(repr=False)  # every call to the owner carries it


class OptimizerActor:
    """One owner: a :class:`ShardService` and the server in front of it.

    Born idle: ``serve`` opens the port, ``watch`` lasts until ``stop``."""

    def __init__(self, settings: OwnerSettings) -> None:
        self._settings = settings
        self._recorder = MemoryRecorder()
        self._stopped = threading.Event()
        torch.set_num_threads(settings.threads)
        keep_message_buffers()
        share = settings.share if settings.share is not None and why_no_sharing(settings.share) is None else None
        self._shared = SharedOwner(settings.owner, settings.num_owners, share) if share is not None else None
        self._service = ShardService(
            settings.owner,
            settings.num_owners,
            threads=settings.threads,
            memory_budget=settings.memory_budget,
            make_memory=self._shared.make_memory if self._shared is not None else None,
            recorder=self._recorder,
        )
        self._server: OwnerServer | None = None

    def hello(self) -> Member:
        """Who and where this is."""
        return this_process(optimizer_name(self._settings.owner))

    def serve(self, host: str) -> str:
        """Start serving on a free port of ``host``; the address for ranks and other owners."""
        self._server = OwnerServer(self._service, token=self._settings.token, host=host, shared=self._shared)
        return self._server.address

    def connect_peers(self, addresses: Sequence[str]) -> None:
        """Know where all owners listen, itself included: before the first rank attaches."""
        assert self._server is not None, "serve() comes first"
        self._server.connect_peers(addresses)

    def watch(self) -> None:
        """Last as long as the owner serves: who waits for this call learns of the process's death at once."""
        self._stopped.wait()

    def stop(self) -> Measured:
        """Close the port, free the shards, end ``watch``; what was measured. Idempotent."""
        if not self._stopped.is_set():
            if self._server is not None:
                self._server.stop()
            self._service.close()
            self._stopped.set()
        return Measured.of(self._recorder)


def this_process(who: str) -> Member:
    """This process, as a member of the run."""
    context = ray.get_runtime_context()
    return Member(who=who, pid=os.getpid(), node=context.get_node_id(), host=ray.util.get_node_ip_address())
