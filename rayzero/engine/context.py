"""Where a training loop runs: which rank of how many, on which device, and how it reaches the owners.

The trainer (or ``run_ranks``) makes one :class:`RankContext` per rank and runs the loop inside it; alone, a plain
script is rank 0 of 1 with an in-process store. A context variable carries it, so ranks may be threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rayzero.config import CheckpointErrors, ZeroConfig
from rayzero.errors import ConfigError
from rayzero.protocol.messages import CheckpointInfo
from rayzero.protocol.store import ParameterStore
from rayzero.telemetry.recorder import MemoryRecorder, Recorder

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine

ReportSink = Callable[[dict[str, Any], CheckpointInfo | None], None]


@dataclass(kw_only=True)
class RankContext:
    """One rank of a run, as its training loop sees it.

    Knows the rank's place and the ways out (store, reports, files); not models or optimizers."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    run: str = "alone"  # the run's name, the same on every rank
    run_dir: Path | None = None  # where the run's files go; None: the run has none
    resume: Path | None = None  # the checkpoint to continue from; None: start fresh
    on_checkpoint_error: CheckpointErrors = "raise"  # what save_checkpoint does where the storage does not take one
    unsaved: Path | None = None  # the checkpoint that it gave up last
    loop_state: dict[str, Any] | None = None  # after prepare(): what this rank gave to save_checkpoint then
    config: ZeroConfig | None = None  # what prepare() uses where it is given no config
    connect: Callable[[int], ParameterStore] | None = None  # a store for the nth model; None: in-process, world size 1
    prepared: int = 0  # models of this rank that the run's owners hold
    engine: Engine | None = None  # of the first prepared model: what the run's ranks have in common goes through it
    handing_over: Callable[[int], None] | None = None  # told when the first model comes: its bytes in this process
    torn: str | None = None  # why a prepare() ended after the owners had begun to take its model; None: none did
    sink: ReportSink | None = None  # who receives reports; None: they are kept in ``reports``
    recorder: Recorder = field(default_factory=MemoryRecorder)
    reports: list[dict[str, Any]] = field(default_factory=list)
    _on_close: list[Callable[[str], None]] = field(default_factory=list, repr=False)

    def report(self, metrics: Mapping[str, Any], *, checkpoint: CheckpointInfo | None = None) -> None:
        """Hand ``metrics`` (plain numbers, text) and perhaps a checkpoint to the run, in this rank's name.

        ``checkpoint``: what ``save_checkpoint`` returned; ConfigError for anything else."""
        if not isinstance(checkpoint, CheckpointInfo | None):
            raise ConfigError(
                f"checkpoint of report() is {checkpoint!r} ({type(checkpoint).__name__}); pass what save_checkpoint "
                "returned"
            )
        plain = dict(metrics)
        if self.sink is None:
            self.reports.append(plain)
        else:
            self.sink(plain, checkpoint)

    @property
    def steps_done(self) -> int:
        """Steps that the first prepared model has committed, in earlier parts of the run too."""
        return 0 if self.engine is None else self.engine.version

    def on_close(self, close: Callable[[str], None]) -> None:
        """Have ``close(reason)`` called when the loop has ended, well or not; last added, first called."""
        self._on_close.append(close)

    def close(self, reason: str = "closed") -> None:
        """End what prepare() opened: transfers and stores. Idempotent."""
        while self._on_close:
            self._on_close.pop()(reason)


_context: ContextVar[RankContext | None] = ContextVar("rayzero_rank_context", default=None)


def get_context() -> RankContext:
    """The context of the calling training loop; outside a trainer that is rank 0 of 1, made on first use."""
    found = _context.get()
    if found is None:
        found = RankContext(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        _context.set(found)
    return found


def report(metrics: Mapping[str, Any], *, checkpoint: CheckpointInfo | None = None) -> None:
    """``get_context().report(metrics, checkpoint=checkpoint)``."""
    get_context().report(metrics, checkpoint=checkpoint)


@contextmanager
def running_in(context: RankContext) -> Iterator[RankContext]:
    """Make ``context`` the one that ``get_context()`` returns here, and close it at the end."""
    token = _context.set(context)
    try:
        yield context
    except BaseException as exc:
        context.close(f"{type(exc).__name__}: {exc}")
        raise
    else:
        context.close("end of the training loop")
    finally:
        _context.reset(token)
