"""What the programs of a run take by their imports alone: measured in this process as it imports the same."""

from __future__ import annotations

from importlib import import_module

from rayzero.memory.process_memory import ProcessMemory, process_memory
from rayzero.plan.programs import Imported


def coordinator_memory() -> ProcessMemory:
    """This process's memory once it has imported what the coordinator does. What it had imported before counts too, so
    call it before anything imports torch, which the coordinator does not."""
    import_module("rayzero.cluster.processes.coordinator")
    return process_memory()


def imported_memory(coordinator: ProcessMemory | None = None) -> Imported:
    """This process's memory as it imports what owners and ranks do, then what a plan needs beyond that: torch.compile's
    compiler. ``coordinator``: what ``coordinator_memory`` found earlier; None: measured now."""
    coordinator = coordinator or coordinator_memory()
    import_module("rayzero.cluster.processes.owner_process")
    owner = process_memory()
    import_module("torch._dynamo")
    return Imported(coordinator=coordinator, owner=owner, compiler=process_memory())
