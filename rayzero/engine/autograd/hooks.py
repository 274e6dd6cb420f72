"""Turns module events into engine calls: open and close units, begin and end a pass, cast inputs.

Hooks are objects, not closures, so that a deep copy or a pickle of the model gets inert ones: no engine owns a copy.

And times a rank's forward and backward by unit: always as sums, and as spans while a trace is wanted.

[Note: backward by unit] Torch does not report when autograd begins with a unit. A unit's time runs from the completion
of the unit before it (for the first one: from the end of the forward, or from the first weight that autograd unpacked)
to its own completion. In a chain of layers that is its backward; where branches meet, it includes some of theirs.

[Note: time by layer] Sums leave out what a layer waited for, and the time of unit modules inside it, so layers do not
count a second twice. A module with several units counts under the first of them. These are the host's seconds: on CUDA
they are what issuing the kernels took, and whatever the host waited for in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rayzero.engine.private_torch import graph_task_id
from rayzero.engine.step_clock import StepClock
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.modes import outside_graphs, outside_modes
from rayzero.telemetry.spans import Spans
from rayzero.telemetry.stats import Tally


class PassEvents(Protocol):
    """The events that hooks report to the engine."""

    def open_units(self, units: Sequence[ParamUnit]) -> bool:
        """A module's forward starts: bring its units up. Returns whether saved-tensor hooks were pushed."""
        ...

    def close_units(self, units: Sequence[ParamUnit], pushed_hooks: bool) -> None:
        """That forward has ended, normally or by an exception."""
        ...

    def begin_forward(self) -> None:
        """The model's own forward starts."""
        ...

    def end_forward(self) -> None:
        """The model's own forward has ended, normally or by an exception."""
        ...


def inert(*_: Any, **__: Any) -> None:
    """A hook that does nothing; copies of our hooks become this."""


def _inert_hook() -> Callable[..., None]:
    return inert


class ModuleHook:
    """Base of our hooks: acts on its own module only, copies and pickles as :func:`inert`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return (_inert_hook, ())


class CallingHook(ModuleHook):
    """Calls a function without arguments."""

    def __init__(self, module: nn.Module, act: Callable[[], object]) -> None:
        super().__init__(module)
        self._act = act

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if module is self.module:
            self._act()


class UnitCalls:
    """The running calls of one module, each with what it must undo.

    Each call has its frame before anything can fail, because torch always runs the closing hook."""

    def __init__(self, engine: PassEvents, units: Sequence[ParamUnit], is_root: bool) -> None:
        self._engine = engine
        self._units = units
        self._is_root = is_root
        self._frames: list[bool | None] = []  # None: not opened yet; else whether saved-tensor hooks were pushed

    @outside_graphs
    def before(self) -> None:
        self._frames.append(None)
        if self._is_root and len(self._frames) == 1:
            self._engine.begin_forward()
        self._frames[-1] = self._engine.open_units(self._units)

    @outside_graphs
    def after(self) -> None:
        if not self._frames:
            return
        pushed_hooks = self._frames.pop()
        if pushed_hooks is not None:
            self._engine.close_units(self._units, pushed_hooks)
        if self._is_root and not self._frames:
            self._engine.end_forward()

    def drain(self) -> None:
        """End calls whose closing hook torch never ran (KeyboardInterrupt)."""
        while self._frames:
            self.after()


def hook_units(module: nn.Module, calls: UnitCalls) -> None:
    """Make a module's forward open its units before the user's pre-hooks, and close them after the hooks it has so
    far."""
    module.register_forward_pre_hook(CallingHook(module, calls.before), prepend=True)
    module.register_forward_hook(CallingHook(module, calls.after), always_call=True)


class CastInputs(ModuleHook):
    """Casts a module's floating inputs (also inside lists, tuples and dicts) to one dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is not self.module:
            return None
        return self._cast(args), self._cast(kwargs)

    def _cast(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return tree.to(self._dtype) if tree.is_floating_point() else tree
        if type(tree) in (list, tuple):
            return type(tree)(self._cast(item) for item in tree)
        if type(tree) is dict:
            return {key: self._cast(item) for key, item in tree.items()}
        return tree


class CopyEntries(ModuleHook):
    """Copies the parameters in a state_dict: entries that share memory would pin their unit."""

    @outside_modes
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if module is not self.module:
            return
        for name, _ in module.named_parameters(recurse=False):
            entry = state.get(prefix + name)
            if isinstance(entry, Tensor) and not isinstance(entry, nn.Parameter):
                state[prefix + name] = entry.clone()


class PassTimes:
    """Times a rank's passes, on the computing thread.

    Knows when modules' forwards began and units' gradients were complete; not what they compute."""

    def __init__(self, num_units: int, waits: StepClock, spans: Spans) -> None:
        """``waits``: has the open step's number, and the seconds that the rank has waited."""
        self._waits = waits
        self._spans = spans
        self._opened: list[list[float]] = []  # running calls, outermost first: [began, waited before, time of others]
        self._since = perf_counter()  # backward has been working on the next unit
        self._waited = waits.waiting  # until then
        self._in_backward = False
        self._graph_in = -1  # the last step in which a module's forward ran with grad
        self.forward = [Tally() for _ in range(num_units)]
        self.backward = [Tally() for _ in range(num_units)]
        self.forwards = self.backwards = 0

    def restart(self) -> None:
        """Add up from now on."""
        for tally in (*self.forward, *self.backward):
            tally.restart()
        self.forwards = self.backwards = 0

    def opened(self, *, forward: bool) -> None:
        """Units are up, and something begins to compute. ``forward``: a module's; else an operation on parameters."""
        if forward and torch.is_grad_enabled():
            self._graph_in = self._waits.step
        self._opened.append([perf_counter(), self._waits.waiting, 0.0])

    @property
    def may_have_graph(self) -> bool:
        """Whether autograd may have saved something in a module's forward of the open step."""
        return self._graph_in == self._waits.step

    def closed(self, units: Sequence[ParamUnit], in_forward: bool) -> None:
        """The module has ended. ``in_forward``: the model's own forward is running."""
        began, waited, others = self._opened.pop()
        if not units:
            return
        now = perf_counter()
        active = now - began - (self._waits.waiting - waited)
        if self._opened:
            self._opened[-1][2] += active
        recomputed = graph_task_id() >= 0
        if in_forward and not recomputed:
            self.forward[units[0].index].add(active - others)
        if self._spans.wanted:
            lane = "backward" if recomputed else "forward" if in_forward else "touch"
            self._spans.add(lane, ", ".join(unit.name for unit in units), began, now, self._waits.step)

    def end_forward(self) -> None:
        self.forwards += graph_task_id() < 0  # a recomputation is part of its backward
        self._mark(perf_counter())

    def begin_backward(self) -> None:
        """Autograd unpacks a weight or delivers a gradient, for the first time in this pass or again."""
        if not self._in_backward:
            self._in_backward = True
            self._mark(perf_counter())

    def completed(self, unit: ParamUnit) -> None:
        """The unit has all gradients that this pass brings."""
        self._in_backward = True
        now = perf_counter()
        self.backward[unit.index].add(now - self._since - (self._waits.waiting - self._waited))
        if self._spans.wanted:
            self._spans.add("backward", unit.name, self._since, now, self._waits.step)
        self._mark(now)

    def end_backward(self) -> None:
        self._in_backward = False
        self.backwards += 1

    def _mark(self, now: float) -> None:
        self._since, self._waited = now, self._waits.waiting
