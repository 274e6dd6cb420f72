"""The memory that a run's programs take for their imports, measured by importing the same modules in this process."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from rayzero.concurrency.processes import uncollected
from rayzero.memory.process_memory import ProcessMemory, process_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """One process's memory after it imported, one after the other, what ..."""

    coordinator: ProcessMemory  # ... a coordinator imports,
    owner: ProcessMemory  # ... owners and ranks import,
    compiler: (
        ProcessMemory  # ... and torch.compile's compiler, which a plan needs and a rank that compiles nothing does not
    )


def coordinator_memory() -> ProcessMemory:
    """This process's memory after it has imported the coordinator's modules. Earlier imports count too, so call it
    before anything imports torch, which the coordinator does not."""
    with uncollected():
        import_module("rayzero.cluster.processes.coordinator")
        import_module("rayzero.telemetry.http")  # every exporter's
    return process_memory()


def imported_memory(coordinator: ProcessMemory | None = None) -> Imported:
    """This process's memory after it has imported the modules of owners and ranks, and again after torch.compile's
    compiler, which only a plan needs. ``coordinator``: an earlier result of ``coordinator_memory``; None: measure
    now."""
    coordinator = coordinator or coordinator_memory()
    with uncollected():
        import_module("rayzero.cluster.processes.owner_process")
        owner = process_memory()
        import_module("torch._dynamo")
    return Imported(coordinator=coordinator, owner=owner, compiler=process_memory())
