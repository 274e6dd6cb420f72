"""The place where a training loop runs: which rank of how many, on which device, and how it reaches the owners.

The trainer (or ``run_ranks``) makes one :class:`RankContext` per rank and runs the loop inside it. A plain script is
rank 0 of 1, with an in-process store. A context variable holds the context, so ranks may be threads.

A checkpoint may be written while the loop trains on (``OpenCheckpoint``). ``rayzero.mean_over_ranks`` is a loss or a
metric of all ranks, for logging and evaluation.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor

from rayzero.concurrency.futures import fail, failed, settle
from rayzero.config import CheckpointErrors, ZeroConfig
from rayzero.convert.remote_checkpoints import Uploads
from rayzero.engine.engine import Engine
from rayzero.engine.loop.comeback import Comeback
from rayzero.engine.loop.keeper import LoopKeeper
from rayzero.engine.loop.tracked import LoopReport, RecentReports, Tracked, plain_metrics
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.errors import CheckpointError, ConfigError, UnsupportedError
from rayzero.protocol.messages import MEAN_BYTES, CheckpointInfo, MeanInput
from rayzero.protocol.store import ParameterStore
from rayzero.telemetry.recorder import MemoryRecorder, Recorder

log = logging.getLogger(__name__)

ReportSink = Callable[[LoopReport], None]
End = Callable[["Future[CheckpointInfo]"], CheckpointInfo | None]


class OpenCheckpoint:
    """What ``begin_checkpoint`` returns: ``result()`` is what ``save_checkpoint`` would have returned or raised.

    Knows when the checkpoint ends, and that something follows; a thread of its own does that. Thread-safe."""

    @classmethod
    def skipped(cls, directory: Path) -> OpenCheckpoint:
        """One that this rank does not take part in: its result is None."""
        return cls(directory, failed(CheckpointError(f"{directory} is not saved")), lambda _: None)

    def __init__(self, directory: Path, saved: Future[CheckpointInfo], end: End) -> None:
        """``saved``: done when the checkpoint is complete, or was given up. ``end``: called with it then, once;
        returns or raises the result."""
        self.directory = directory
        self._outcome: Future[CheckpointInfo | None] = Future()
        self._heard = False  # somebody has had the result
        threading.Thread(target=self._run, args=(saved, end), name="checkpoint-end", daemon=True).start()

    def _run(self, saved: Future[CheckpointInfo], end: End) -> None:
        wait([saved])
        try:
            settle(self._outcome, end(saved))
        except BaseException as error:  # raised where the result is asked for
            fail(self._outcome, error)

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._outcome.done()

    def result(self) -> CheckpointInfo | None:
        """Wait until the checkpoint is complete; what ``save_checkpoint`` returns. None also if a process died while it
        was written: it is abandoned then, with a warning, and nothing of it is left."""
        self._heard = True
        return self._outcome.result()

    def finish(self) -> None:
        """Wait until it is over. Raises an error that nobody has had."""
        if not self._heard:
            self.result()
        wait([self._outcome])

    def settle(self) -> None:
        """Wait until it is over. An error that nobody has had is logged."""
        error = self._outcome.exception()
        if error is not None and not self._heard:
            log.error("CHECKPOINT NOT SAVED: %s: %s", self.directory, error)


@dataclass(kw_only=True)
class RankContext:
    """One rank of a run, as its training loop sees it.

    Knows the rank's place and where stores, reports and files are; not models or optimizers."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    life: int = 0  # how often the rank has died and was started again
    run: str = "alone"  # the run's name, the same on every rank
    lineage: str = ""  # of the run's states in shared memory, the same on every rank; a later run may continue them
    repeats: int | None = None  # after the death of the whole run: the open step, if every rank does the end of the
    # iteration before it again
    run_dir: Path | None = None  # folder of the run's files; None: the run has none
    resume: Path | None = None  # the checkpoint to continue from; None: start fresh
    on_checkpoint_error: CheckpointErrors = "raise"  # what save_checkpoint does if the storage fails
    uploads: Uploads | None = None  # of complete checkpoints, by rank 0. freed by: close()
    saving: OpenCheckpoint | None = None  # the last one that was begun beside the training
    unsaved: Path | None = None  # the last checkpoint that save_checkpoint gave up
    loop_state: dict[str, Any] | None = None  # after prepare(): the state that this rank gave to save_checkpoint
    config: ZeroConfig | None = None  # the config of prepare() calls without one
    connect: Callable[[int], ParameterStore] | None = None  # a store for the nth model; None: in-process, world size 1
    prepared: int = 0  # models of this rank that the run's owners hold
    decided: int = 0  # after prepare(): steps before are decided, though the loop of a rank that came back may do one
    engine: Engine | None = None  # see begin()
    tracked: Tracked | None = None  # what the loop over that model tracks
    handing_over: Callable[[int], None] | None = None  # called with the first model's bytes here, as it is prepared
    torn: str | None = None  # why a prepare() failed after the owners had begun to take its model; None: none did
    sink: ReportSink | None = None  # who receives reports; None: they are kept in ``reports``
    recorder: Recorder = field(default_factory=MemoryRecorder)
    reports: list[dict[str, Any]] = field(default_factory=list)
    recent: RecentReports = field(default_factory=RecentReports, repr=False)  # those for the sink
    _on_close: list[Callable[[str], None]] = field(default_factory=list, repr=False)

    def report(
        self, metrics: Mapping[str, Any], *, checkpoint: CheckpointInfo | None = None, exact: bool = False
    ) -> None:
        """Report this rank's ``metrics`` (plain numbers, text), and perhaps a checkpoint, to the run.

        Raises ConfigError naming a metric that is neither number, text nor None, a whole number that no float can hold,
        and text with a lone surrogate.
        ``checkpoint``: what ``save_checkpoint`` returned; ConfigError for anything else. ``exact``: the metrics are
        right even while ``repeating``."""
        if not isinstance(checkpoint, CheckpointInfo | None):
            raise ConfigError(
                f"checkpoint of report() is {checkpoint!r} ({type(checkpoint).__name__}); pass what save_checkpoint "
                "returned"
            )
        if self.sink is None:
            self.reports.append(plain_metrics(metrics))  # refused in a plain script as in a run
        else:
            path = None if checkpoint is None else os.path.abspath(checkpoint.path)  # the driver is in another folder
            if self.engine is not None and self.engine.loop is not None and self.engine.loop.returning:
                return  # it is among those that the former life made
            if exact or not self.repeating:
                self.sink(self.recent.add(self.step, metrics, path))
            else:
                self._report_less(metrics, path)

    def _report_less(self, metrics: Mapping[str, Any], checkpoint: str | None) -> None:
        """What was computed before the commit was computed with newer weights: a missing row is better than a wrong
        one."""
        log.warning("rank %d repeats the end of step %d: %s are not reported", self.rank, self.step, ", ".join(metrics))
        if checkpoint is None or self.sink is None:
            self.recent.skip(self.step)
        else:
            self.sink(self.recent.add(self.step, {}, checkpoint))

    @property
    def repeating(self) -> bool:
        """Whether this rank has died between ``optimizer.step()`` and the next forward, and does that iteration again,
        over the weights that it led to: losses of its forward are not those of the step."""
        return self.engine is not None and self.engine.loop is not None and self.engine.loop.repeating

    @property
    def step(self) -> int:
        """The step that the loop does next: 0 on a fresh start, the checkpoint's step count after a resume, one more
        with every ``optimizer.step()``. Of the model that ``begin`` was called with."""
        return 0 if self.engine is None else self.engine.version

    def track(self, **objects: Any) -> None:
        """See ``rayzero.track``."""
        if self.tracked is None:
            raise UnsupportedError(
                "rayzero.track() was called before rayzero.prepare(), which finds their states; call it afterwards"
            )
        self.tracked.add(objects)
        if self.engine is not None and self.engine.loop is not None:
            self.engine.loop.tracking()

    def begin(
        self,
        optimizer: ZeroOptimizer,
        saved: Mapping[str, Any] | None,
        source: str,
        comeback: Comeback | None = None,
        began: Path | None = None,
    ) -> None:
        """A model was prepared. The loop's steps, means and tracked objects are those of the run's first model; in a
        plain script, where each model has its own owners, of the model that was prepared last.

        ``saved``, ``source``: see ``Tracked``. ``comeback``: of a rank that has died and come back. ``began``: the
        checkpoint that the run began with."""
        if self.engine is None or self.connect is None:
            comes_back = comeback is not None and comeback.state is not None
            self.engine = optimizer.engine
            self.tracked = Tracked(optimizer.engine, saved, source, comes_back=comes_back)
            if self.connect is not None:  # without a run, nothing outlives this process
                self.engine.loop = LoopKeeper(optimizer, self.tracked, self.recent, comeback, began)
                self._report_again(comeback)

    def _report_again(self, comeback: Comeback | None) -> None:
        if comeback is None or self.sink is None:
            return
        state = comeback.state if comeback.at_commit is None else comeback.at_commit
        if state is not None:
            for report in self.recent.restore(state["reports"]):
                self.sink(report)

    def upload(self, checkpoint: Path, url: str) -> None:
        """Copy a complete checkpoint to remote storage, beside the training; ``close`` waits until it is there."""
        if self.uploads is None:
            self.uploads = Uploads()
            uploads = self.uploads
            self.on_close(lambda _: uploads.wait())
        self.uploads.add(checkpoint, url)

    def open_checkpoint(self, checkpoint: OpenCheckpoint) -> None:
        """A checkpoint has begun beside the training; ``close`` waits for its end."""
        if self.saving is None:
            self.on_close(lambda _: self._end_saving())
        self.saving = checkpoint

    def _end_saving(self) -> None:
        """Wait for the checkpoint that is being written, and for the upload that may follow."""
        if self.saving is not None:
            self.saving.settle()
        if self.uploads is not None:
            self.uploads.wait()

    def on_close(self, close: Callable[[str], None]) -> None:
        """Call ``close(reason)`` when the loop ends, normally or by an exception; last added, first called."""
        self._on_close.append(close)

    def close(self, reason: str = "closed") -> None:
        """Close what prepare() opened: transfers and stores. Idempotent."""
        while self._on_close:
            self._on_close.pop()(reason)


_context: ContextVar[RankContext | None] = ContextVar("rayzero_rank_context", default=None)


def get_context() -> RankContext:
    """The context of the calling training loop. Outside a trainer: rank 0 of 1, created on first use."""
    found = _context.get()
    if found is None:
        found = RankContext(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        _context.set(found)
    return found


def report(metrics: Mapping[str, Any], *, checkpoint: CheckpointInfo | None = None) -> None:
    """``get_context().report(metrics, checkpoint=checkpoint)``."""
    get_context().report(metrics, checkpoint=checkpoint)


def track(**objects: Any) -> None:
    """Keep the states of a loop's objects with its steps: ``rayzero.track(scheduler=scheduler, loader=loader)``.

    Takes anything with ``state_dict()`` and ``load_state_dict()`` (schedulers, ``GradScaler``, torchdata's
    ``StatefulDataLoader``, objects of your own), whose states are numbers, text, tensors, and lists, tuples and dicts
    of these. ``save_checkpoint`` saves them. In a run that resumes, this call loads them, each by its name, so make the
    objects as for a fresh start, call this once, and begin the loop at ``rayzero.get_context().step``. An object whose
    name the checkpoint does not have starts afresh, with a warning. May be called several times; the same object under
    the same name changes nothing.

    On several ranks, a loop that has called this is also kept with every step, so that a rank that dies can repeat its
    last one. A loop with nothing to track calls it with nothing. The states are copied at every step: give large
    tensors, such as averaged weights, to ``save_checkpoint`` instead. Objects that can be iterated are taken for
    sources of data, whose state belongs to the moment of ``optimizer.step()``; that of the others may still change
    until the next forward.

    Raises UnsupportedError before ``prepare()``; ConfigError, before anything is loaded, for a name that another object
    has, for the prepared model or its optimizer, and for objects without the two methods; and what the object's own
    ``load_state_dict`` raises."""
    get_context().track(**objects)


@contextmanager
def inside(context: RankContext) -> Iterator[None]:
    """Make ``get_context()`` return ``context`` inside the block."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


@contextmanager
def running_in(context: RankContext) -> Iterator[RankContext]:
    """The same, and close ``context`` at the end."""
    with inside(context):
        try:
            yield context
        except BaseException as exc:
            context.close(f"{type(exc).__name__}: {exc}")
            raise
        context.close("end of the training loop")


N = TypeVar("N", float, Tensor)

_MOST_SAID = 80  # letters of a value in a message


@overload
def mean_over_ranks(value: Tensor, *, weight: float = 1.0) -> Tensor: ...
@overload
def mean_over_ranks(value: float, *, weight: float = 1.0) -> float: ...
@overload
def mean_over_ranks(value: Mapping[str, N], *, weight: float = 1.0) -> dict[str, N]: ...
def mean_over_ranks(value: Any, *, weight: float = 1.0) -> Any:
    """The mean of ``value`` over all ranks, with the same bits on each and in the form of ``value``.

    ::

        loss = rayzero.mean_over_ranks(loss)                                   # a 0-dim tensor
        metrics = rayzero.mean_over_ranks({"loss": total / count, "accuracy": right / count}, weight=count)

    value: a number, a small floating-point tensor of any shape on any device, or a mapping from names to numbers or
        0-dim tensors; at most 4,000 bytes, of which a number takes 8 and a name 4 and its length. Numbers come back as
        floats, tensors in their dtype and on their device, without a gradient.
    weight: how much this rank's value counts, >= 0; for example its number of samples, if ranks have different numbers.
        The value of a rank with weight 0 is ignored.

    Sums are fp64, in rank order; if a sum of finite values overflows, the mean is computed exactly instead. Every rank
    calls it the same number of times in the same order, from the thread that trains, and waits for the other ranks. It
    may be called at any point of a step, and waits for no step. In a run of several ranks call rayzero.prepare() first;
    with one rank, the mean is ``value``.

    Raises ConfigError for any other value, for too many bytes, and if all weights are 0; UnsupportedError before
    prepare(); StepMismatchError, on all ranks, if names or shapes differ between ranks or if ranks make this and other
    waiting calls in different orders; RankLeftError if a rank has left, StallError if one makes no progress."""
    given = _input(value, _weight(weight))
    context = get_context()
    if context.world_size == 1:
        if not given.weight:
            raise given.no_weight()
        return _like(value, given.values)
    if context.engine is None:
        raise UnsupportedError(
            f"mean_over_ranks() was called before rayzero.prepare(), which connects the run's {context.world_size} "
            "ranks; call it afterwards"
        )
    return _like(value, context.engine.mean(given))


def _input(value: object, weight: float) -> MeanInput:
    """What this rank gives. Raises ConfigError."""
    if isinstance(value, Mapping):
        _check_names(value)
        names = tuple(sorted(value))
        given = MeanInput(names=names, values=(0.0,) * len(names), weight=weight)
        _check_size(given)
        return replace(given, values=tuple(_number(value[name], f"of {name!r}") for name in names))
    if not isinstance(value, Tensor):
        return MeanInput(values=(_number(value, ""),), weight=weight)
    _check_tensor(value, "")
    given = MeanInput(shape=tuple(value.shape), values=(0.0,) * value.numel(), weight=weight)
    _check_size(given)
    return replace(given, values=tuple(value.detach().cpu().double().flatten().tolist()))


def _check_names(value: Mapping[Any, object]) -> None:
    if not value:
        raise ConfigError("mean_over_ranks() got an empty mapping; give it at least one number")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"mean_over_ranks() takes mappings whose names are text, got {_said(name)}")
        try:
            name.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            raise ConfigError(f"mean_over_ranks() takes names that are valid Unicode, got {name!r}") from None


def _check_size(given: MeanInput) -> None:
    if given.size_bytes > MEAN_BYTES:
        raise ConfigError(
            f"mean_over_ranks() takes at most {MEAN_BYTES:,} bytes: 8 for each number, 4 and its length for each name; "
            f"{given} needs {given.size_bytes:,}. Give it fewer numbers, for example their mean on this rank"
        )


def _check_tensor(value: Tensor, where: str) -> None:
    if value.is_nested or value.layout != torch.strided or value.is_meta:
        kind = "a nested tensor" if value.is_nested else str(value.layout)
        got = f"{kind} on {value.device} {where}".rstrip()
        raise ConfigError(f"mean_over_ranks() takes dense tensors with values, got {got}")
    if not value.is_floating_point():
        raise ConfigError(f"mean_over_ranks() takes floating-point tensors, got {value.dtype} {where}".rstrip())


def _number(value: object, where: str) -> float:
    if isinstance(value, Tensor) and value.dim() == 0:
        _check_tensor(value, where)
        return float(value)
    if not isinstance(value, Real):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise ConfigError(
            "mean_over_ranks() takes a number, a floating-point tensor, or a mapping from names to numbers and 0-dim "
            f"tensors, got {type(value).__name__}{shape} {where}".rstrip()
        )
    try:
        return float(value)
    except OverflowError:
        which = f"a number {where}".rstrip()
        raise ConfigError(f"mean_over_ranks() got {which} that is too large for a float") from None


def _weight(weight: object) -> float:
    known = isinstance(weight, Real) or (isinstance(weight, Tensor) and weight.dim() == 0)
    try:
        number = float(cast(float, weight)) if known else math.nan
    except (OverflowError, RuntimeError):  # 10**400; a tensor that is complex or has no values
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"weight of mean_over_ranks() must be a finite number >= 0, got {_said(weight)}")
    return number


def _said(value: object) -> str:
    """A short description of ``value``, on one line."""
    try:
        said = " ".join(repr(value).split())
    except ValueError:  # an integer of more digits than Python writes
        return f"{type(value).__name__} of too many digits"
    return said if len(said) <= _MOST_SAID else f"{said[:_MOST_SAID]}…"


def _like(value: Any, mean: Sequence[float]) -> Any:
    """``mean`` in the form of ``value``."""
    if isinstance(value, Mapping):
        by_name = dict(zip(sorted(value), mean, strict=True))
        return {name: _like(given, [by_name[name]]) for name, given in value.items()}
    if isinstance(value, Tensor):
        exact = torch.tensor(mean, dtype=torch.float64, device="cpu").view(value.shape)
        return exact.to(device=value.device, dtype=value.dtype)
    return mean[0]
