"""The optimizer actor: a process that holds shards and serves them; the Ray shell around a plain object."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from rayzero.concurrency.uncollected import uncollected

with uncollected():  # a process of a run does nothing else meanwhile
    import torch

    from rayzero.cluster.nodes.numa import bind
    from rayzero.cluster.processes.coordinator import this_process
    from rayzero.cluster.processes.owner_process import MemberProcess, OwnerSettings, ServedOwner
    from rayzero.cluster.processes.process_exporter import ExporterSettings, ProcessExporter, Renewed
    from rayzero.cluster.run import Load, Member, optimizer_name
    from rayzero.kernels.bandwidth import measure_bandwidth
    from rayzero.memory.pressure import PressureGauge, read_host_pressure
    from rayzero.memory.process_memory import own_bytes
    from rayzero.store.owner.hosted import HostedModels
    from rayzero.telemetry.discovery import Target
    from rayzero.telemetry.names import (
        HOST_BANDWIDTH_LIMIT,
        MEMORY_PRESSURE_RATIO,
        OPTIMIZER_CORES,
        OPTIMIZER_CPU_SECONDS,
        OPTIMIZER_THREADS,
        OPTIMIZER_UPDATE_SECONDS,
        PLAN_ERROR_RATIO,
    )
    from rayzero.telemetry.recorder import Measurements, MemoryRecorder, Reading

_PLAN_STEPS = 20  # after which every page has been used


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
        is_door = own.ownership is not None and own.owner in own.ownership.door_numbers
        return replace(this_process(optimizer_name(own.owner)), has_shards=not is_door)

    def become(self, settings: OwnerSettings, *, measure_bandwidth: bool, bind_numa: bool) -> Member:
        """Become an owner, once and before any other call but ``hello`` and ``watch``; who and where this is.

        ``measure_bandwidth``: measure the host's memory bandwidth with the exporter's start. ``bind_numa``: bind to one
        node's CPUs."""
        if bind_numa:
            bind(optimizer_name(settings.owner), settings.owner, settings.threads)
        torch.set_num_threads(settings.threads)
        self._measure_bandwidth = measure_bandwidth
        self._settings, self._owner = settings, ServedOwner(settings, self._recorder)
        return self.hello()

    def take_place(
        self,
        settings: OwnerSettings,
        bind_numa: bool,
        host: str | None,
        exporter: ExporterSettings | None,
        coordinator: Any,
    ) -> tuple[Member, str, Target | None]:
        """Become the successor of an owner that has died, or one that joins: who this is, where it serves, and its
        exporter. ``host``: to serve on; None: this node's address."""
        member = self.become(settings, measure_bandwidth=False, bind_numa=bind_numa)
        address = self.serve(host or member.host)
        return member, address, None if exporter is None else self.open_exporter(exporter, coordinator)

    def renew(self, new: Renewed) -> None:
        """Show what is new from now on; connections stay open. Nothing if this is no owner yet: what it will begin with
        was made just now."""
        if new.tls is not None and self._owner is not None:
            self._owner.renew(new.tls)
        if new.metrics is not None and self._exporter is not None:
            self._exporter.renew(new.metrics)

    def succeed(self, owner: int, address: str) -> None:
        """Another owner has died; its successor is at ``address``."""
        self._served.server.succeed(owner, address)

    def open_exporter(self, settings: ExporterSettings, coordinator: Any) -> Target:
        """Open this process's exporter and begin its heartbeat. Raises ConfigError where it has no port."""

        owner, own = self._served, self._settings
        assert own is not None

        def update_seconds() -> float:
            return self._recorder.timing(OPTIMIZER_UPDATE_SECONDS).total

        self._recorder.set(OPTIMIZER_THREADS, own.threads)
        self._recorder.set(OPTIMIZER_CORES, len(os.sched_getaffinity(0)))
        bandwidth = measure_bandwidth(own.threads) if self._measure_bandwidth else None
        if bandwidth is not None:
            self._recorder.set(HOST_BANDWIDTH_LIMIT, bandwidth)
        gauge = PressureGauge(partial(read_host_pressure, own.share))
        self._recorder.watch(partial(_process_readings, owner.models, own_bytes(), gauge))
        self._exporter = ProcessExporter(
            settings, self._recorder, coordinator=coordinator, update_seconds=update_seconds
        )
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
