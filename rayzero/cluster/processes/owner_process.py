"""An owner inside a process of a run: the shards of its prepared models, and the server in front of them. The optimizer
actor is a process with nothing else in it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rayzero.concurrency.processes import uncollected

with uncollected():  # a process of a run does nothing else meanwhile
    import torch

    from rayzero.cluster.janitor import Remains
    from rayzero.cluster.nodes.numa import bind
    from rayzero.cluster.nodes.reachability import address_to_serve, own_addresses, unreachable
    from rayzero.cluster.processes.coordinator import this_process
    from rayzero.cluster.processes.process_exporter import ExporterSettings, ProcessExporter, Renewed
    from rayzero.cluster.run import Load, Member, optimizer_name
    from rayzero.kernels.native import measure_bandwidth
    from rayzero.memory.pressure import PressureGauge, PressureLimits
    from rayzero.memory.process_memory import own_bytes
    from rayzero.modes import load_compiler_only_to_compile
    from rayzero.owner.owned_model import OwnerTerms
    from rayzero.protocol.ownership import Ownership
    from rayzero.security.credentials import Credentials, identity_of
    from rayzero.store.owner.hosted import HostedModels
    from rayzero.store.owner.server import OwnerServer, serve_models
    from rayzero.store.shm.signals import why_no_sharing
    from rayzero.telemetry.names import (
        HOST_BANDWIDTH_LIMIT,
        MEMORY_PRESSURE_RATIO,
        OPTIMIZER_CORES,
        OPTIMIZER_CPU_SECONDS,
        OPTIMIZER_THREADS,
        OPTIMIZER_UPDATE_SECONDS,
        PLAN_ERROR_RATIO,
    )
    from rayzero.telemetry.recorder import Measurements, MemoryRecorder, Reading, Recorder
    from rayzero.telemetry.scrape import Target

_PLAN_STEPS = 20  # after which every page has been used


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSettings:
    """The settings of one owner."""

    owner: int
    num_owners: int
    threads: int  # that compute updates
    bind_numa: bool = False  # an optimizer actor runs on one node's CPUs
    memory_budget: int | None  # bytes its plan may use; None: what its host has
    share: Path | None  # directory of memory that is shared with ranks of the same host; None: do not share
    norms_every: int | None  # steps between measurements of norms by layer group; None: never
    device: str = "cpu"  # where masters and states lie
    ownership: Ownership  # who owns what by now
    succeeds: bool = False  # it takes over the slabs of a dead owner of its number, or those prepared for its epoch
    replaces_members: bool = False  # the dead are started again
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
            lineage="" if self._settings.remains is None else self._settings.remains.lineage,
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

    def call_owner(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of ``OwnerServer``. Raises RayZeroError as that does."""
        return getattr(self._served.server, method)(*arguments)

    # ---- the host

    def unreachable(self, addresses: Sequence[str]) -> dict[str, str]:
        """Those owners' addresses that this host does not reach, and why."""
        return unreachable(addresses)

    def sees(self, path: str) -> bool:
        """Whether a file that the driver has written is on this host, too, where this process may look."""
        return os.path.exists(path)  # Path.exists() raises what a folder without permission does


class OptimizerActor(MemberProcess):
    """One owner, alone in its process.

    It starts without a place: ``become`` or ``take_place`` says which owner it is, ``serve`` opens the port, and
    ``watch`` lasts until ``stop``."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._recorder = MemoryRecorder()
        self._settings: OwnerSettings | None = None  # set by become()
        self._owner: ServedOwner | None = None  # set by become()
        self._measure_bandwidth = False
        self._exporter: ProcessExporter | None = None

    def hello(self) -> Member:
        """Who and where this is, once it has imported everything."""
        own = self._settings
        if own is None:
            return this_process("spare")
        has_shards = own.owner not in own.ownership.door_numbers
        return replace(this_process(optimizer_name(own.owner)), has_shards=has_shards)

    def become(self, settings: OwnerSettings, *, measure_bandwidth: bool) -> Member:
        """Become an owner, once and before any other call but ``hello`` and ``watch``; who and where this is.

        ``measure_bandwidth``: measure the host's memory bandwidth with the exporter's start."""
        if settings.bind_numa:
            bind(optimizer_name(settings.owner), settings.owner, settings.threads)
        load_compiler_only_to_compile()
        torch.set_num_threads(settings.threads)
        self._measure_bandwidth = measure_bandwidth
        self._settings, self._owner = settings, ServedOwner(settings, self._recorder)
        return self.hello()

    def take_place(
        self, settings: OwnerSettings, host: str | None, exporter: ExporterSettings | None, coordinator: Any
    ) -> tuple[Member, str, Target | None]:
        """Become the successor of an owner that has died, or one that joins: who this is, where it serves, and its
        exporter. ``host``: to serve on; None: this node's address."""
        member = self.become(settings, measure_bandwidth=False)
        address = self.serve(host or member.host)
        return member, address, None if exporter is None else self.open_exporter(exporter, coordinator)

    def renew(self, new: Renewed) -> None:
        """Show what is new from now on; connections stay open. Nothing if this is no owner yet: what it will begin with
        was made just now."""
        if new.tls is not None and self._owner is not None:
            self._owner.renew(new.tls)
        if new.metrics is not None and self._exporter is not None:
            self._exporter.renew(new.metrics)

    def open_exporter(self, settings: ExporterSettings, coordinator: Any) -> Target:
        """Open this process's exporter and begin its heartbeat. Raises ConfigError where it has no port."""
        owner, own = self._served, self._settings
        assert own is not None
        self._recorder.set(OPTIMIZER_THREADS, own.threads)
        self._recorder.set(OPTIMIZER_CORES, len(os.sched_getaffinity(0)))
        bandwidth = measure_bandwidth(own.threads) if self._measure_bandwidth else None
        if bandwidth is not None:
            self._recorder.set(HOST_BANDWIDTH_LIMIT, bandwidth)
        gauge = PressureGauge(torch.device("cpu"), PressureLimits(slab_dir=own.share))
        self._recorder.watch(partial(_process_readings, owner.models, own_bytes(), gauge))
        self._exporter = ProcessExporter(settings, self._recorder, coordinator=coordinator)
        return self._exporter.target

    def load(self) -> Load:
        updates = self._recorder.timing(OPTIMIZER_UPDATE_SECONDS)
        return Load(updates.count, updates.total)

    def watch(self) -> None:
        """Return when the owner stops serving. A caller that waits for this learns of the process's death at once."""
        self._stopped.wait()

    def stop(self) -> Measurements:
        """Close the port, free the shards and end ``watch``; returns the measurements. Idempotent."""
        if not self._stopped.is_set():
            self._served.stop()
            if self._exporter is not None:
                self._exporter.close()
            self._stopped.set()
        return Measurements.of(self._recorder)


def _process_readings(models: HostedModels, before: int, gauge: PressureGauge) -> Iterator[Reading]:
    """Processor time, memory pressure and, once all of the planned memory is certainly in use, measured over planned
    memory."""
    yield Reading(OPTIMIZER_CPU_SECONDS, time.process_time(), {})
    for resource, share in gauge.read().shares.items():
        yield Reading(MEMORY_PRESSURE_RATIO, share, {"resource": resource.value})
    if models.steady_bytes and models.decided_steps >= _PLAN_STEPS:
        grown = own_bytes() - before
        yield Reading(PLAN_ERROR_RATIO, grown / models.steady_bytes - 1, {"what": "host"})
