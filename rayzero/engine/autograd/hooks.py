"""Turns module events into engine calls: open and close units, begin and end a pass, cast inputs.

Hooks are objects, not closures, so that a deep copy or a pickle of the model gets inert ones: no engine owns a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rayzero.engine.units.param_unit import ParamUnit
from rayzero.errors import UnsupportedError
from rayzero.modes import NO_CAPTURE, outside_graphs, outside_modes


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


class _NamelessError(UnsupportedError, AttributeError):
    """A hook was asked for its name, as only torch.jit.script does; anything that can do without goes on."""


class ModuleHook:
    """Base of our hooks: acts on its own module only, copies and pickles as :func:`inert`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __name__(self) -> str:
        raise _NamelessError(NO_CAPTURE)

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
