"""First touch: an operation on a parameter whose unit is not up unshards the unit.

[Note: first touch] Module hooks unshard ahead of forward. This file catches every other use of a parameter: except
while a call of its unit is open, a Parameter has a subclass whose ``__torch_function__`` sees every operation. It opens
the unit, which restores the plain class, and then calls the function with torch functions still enabled, because other
parameters may be touched inside it (``torch.autograd.grad`` runs a whole backward). Reading metadata opens nothing.

Reading ``.grad`` of a gradient that was pushed and not dropped since (``zero_grad()``) is an error: it would give None,
and torch's own ``clip_grad_norm_`` would silently clip nothing.

[Note: unfrozen] Parameters that were frozen at prepare() and are given ``requires_grad=True`` afterwards have no
optimizer state, so a gradient of theirs would be lost. Libraries of adapters set the flag all the same: to compare with
a frozen adapter they make it the active one, compute without gradients, and switch back. So the flag is noted, and only
an operation that would record a gradient is refused. While a call of its unit is open, such a Parameter has a subclass
of its class there, which looks at the result of every operation; no other Parameter pays for it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from rayzero.engine.units.param_unit import ParamUnit, get_data, open_class, set_data
from rayzero.errors import GradientAccessError, UnsupportedError
from rayzero.modes import outside_modes
from rayzero.tensor_metadata import METADATA, AbsentParameter, of_class, plain

_GRAD: Any = Tensor.grad
_GET_GRAD = _GRAD.__get__
_FLAG: Any = Tensor.requires_grad
_GET_FLAG = _FLAG.__get__
_ON_SELF = frozenset([_FLAG.__set__, Tensor.requires_grad_])
_BY_EDGES: frozenset[Any] = frozenset([torch.autograd.grad, torch.autograd.backward])
_APPLY = nn.Module._apply.__code__
_NEW = nn.Parameter.__new__.__code__
_IN_ANOTHER_SHAPE = frozenset(
    getattr(Tensor, f"{name}_")
    for name in ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "as_strided")
)
_ON_GRAD = frozenset([_GET_GRAD, _GRAD.__set__, _GRAD.__delete__])


_Held = TypeVar("_Held")
_Kind = TypeVar("_Kind", bound=Tensor)


class Toucher(Protocol):
    """Whom a guarded Parameter reports to: the engine."""

    def touched(self, units: Sequence[Any]) -> AbstractContextManager[None]:
        """A context in which ``units`` are up and unguarded."""
        ...

    def gone_gradient(self, param: nn.Parameter, unit: Any, *, read: bool) -> str | None:
        """``.grad`` was read as None, or set, which replaces a gradient that a step has applied. The parameter's name
        if its gradient has left the rank in this step, or was to be read, but a step has applied it and no zero_grad()
        followed; else None."""
        ...

    def zero_grad(self, params: Sequence[nn.Parameter], *, set_to_none: bool) -> None:
        """``zero_grad()`` of a module with these Parameters was called."""
        ...

    def take_loaded(self, param: nn.Parameter, unit: Any, value: Tensor) -> bool:
        """Take a value for the running load_state_dict(); False if none is running."""
        ...

    def set_flag(self, param: nn.Parameter, unit: Any, on: bool) -> None:
        """The parameter was given a ``requires_grad``."""
        ...


class _WeakClassAttribute(Generic[_Held]):
    """A class attribute that holds its value weakly. Autograd's nodes hold Parameters where the garbage collector
    cannot look, and a Parameter holds its class; through a strong reference the class would keep the whole engine
    alive. The model's hooks hold the engine, and the engine its units."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: object, owner: type) -> _Held:
        held: _Held = getattr(owner, self._name)()
        return held


class ShardedParameter(AbsentParameter):
    """The class a Parameter has except while a call of its unit is open; each unit has a subclass of its own."""

    toucher = _WeakClassAttribute[Toucher]()
    unit = _WeakClassAttribute[Any]()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ON_SELF:
            on = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            cls.toucher.set_flag(args[0], cls.unit, bool(on))
        if func == Tensor.detach and sys._getframe(1).f_code is _NEW:
            raise UnsupportedError(
                "an nn.Parameter of a prepared model's Parameter (torch.nn.utils.parametrize makes one) would share "
                "its memory, which comes and goes; make it before rayzero.prepare(), or of param.detach().clone()"
            )
        if func in _IN_ANOTHER_SHAPE and isinstance(args[0], cls):
            raise UnsupportedError(
                f"{func.__name__}() on a Parameter of shape {tuple(args[0].shape)} after rayzero.prepare() would "
                "change its shape or strides, which the owners know it by; change them before"
            )
        if func == set_data:
            return cls._set_data(*args)
        if func == Tensor.copy_ and isinstance(args[0], cls) and cls.toucher.take_loaded(args[0], cls.unit, args[1]):
            return args[0]
        if func == get_data:
            with cls.brought([args[0]]):
                return args[0].data
        if func in METADATA:
            result = super().__torch_function__(func, types, args, kwargs)
            if func in _ON_GRAD and (result is None or func != _GET_GRAD) and not _moves_modules(sys._getframe(1)):
                cls._after_grad(args[0], read=func == _GET_GRAD)
            return result
        if func in _BY_EDGES and not kwargs.get("materialize_grads"):
            args, kwargs = _as_edges((args, kwargs))
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def brought(cls, params: list[ShardedParameter]) -> AbstractContextManager[None]:
        """A context in which their units are up and unguarded."""
        return cls.toucher.touched(list({type(param).unit: None for param in params}))

    @classmethod
    def _after_grad(cls, param: nn.Parameter, *, read: bool) -> None:
        """``.grad`` was read as None, or set. Raises GradientAccessError if plain PyTorch would have a gradient
        here."""
        name = cls.toucher.gone_gradient(param, cls.unit, read=read)
        if name is not None:
            how = "read" if read else "set"
            raise GradientAccessError(
                f"the gradient of {name!r} has left this rank for the optimizer owners, so .grad cannot be {how} (by "
                f"{_caller(sys._getframe(1))}). To clip, call optimizer.clip_grad_norm_(max_norm), which returns the "
                "global norm, or optimizer.clip_grad_value_(clip_value); to drop gradients, optimizer.zero_grad()"
            )

    @classmethod
    @outside_modes
    def _set_data(cls, param: nn.Parameter, value: Tensor) -> None:
        """``param.data = value``: see ``ParamUnit.assign_data``."""
        with cls.toucher.touched([cls.unit]):
            param.data = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A Parameter of the class that it had before prepare, with the full values: no engine owns a copy."""
        with type(self).brought([self]):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a Parameter of the class that it had before prepare, with the full values."""
        with type(self).brought([self]):
            return self.__reduce_ex__(protocol)  # the open class's

    def as_subclass(self, cls: type[_Kind]) -> _Kind:
        """As torch's, which asks no ``__torch_function__``."""
        with type(self).brought([self]):
            return self.as_subclass(cls)  # the open class's

    def __repr__(self, **how: Any) -> str:  # type: ignore[override]
        with type(self).brought([self]):
            opened: Any = self  # its class is the open one in here
            return str(opened.__repr__(**how))


ShardedParameter.family = ShardedParameter


@functools.cache
def route_zero_grad() -> None:
    """Patch ``zero_grad()`` of modules to drop gradients that have left the rank as well as those in ``.grad``, which
    is all that torch sees. Torch has no hook for it."""
    by_torch: Any = nn.Module.zero_grad

    @functools.wraps(by_torch)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        of_toucher: dict[Toucher, list[nn.Parameter]] = {}
        for param in self.parameters():
            if isinstance(param, ShardedParameter):
                of_toucher.setdefault(type(param).toucher, []).append(param)
        for toucher, params in of_toucher.items():
            toucher.zero_grad(params, set_to_none=set_to_none)
        by_torch(self, set_to_none)

    nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]


def require_keepable(name: str, param: nn.Parameter) -> None:
    """Raise UnsupportedError, naming class and reason, for a Parameter whose class cannot be kept while its bytes come
    and go."""
    kind: Any = type(param)
    why = None
    if kind.__torch_dispatch__ is not nn.Parameter.__torch_dispatch__:
        why = "its operations go through __torch_dispatch__ of that class, which need not hold the values themselves"
    try:
        for other in () if why else (type("ShardedParameter", (ShardedParameter, kind), {}), open_class(kind), kind):
            param.__class__ = other
    except TypeError as exc:
        why = f"which cannot be subclassed ({exc})"
    if why is not None:
        raise UnsupportedError(
            f"parameter {name!r} is a {kind.__name__}, and {why}; make it a plain nn.Parameter before rayzero.prepare()"
        )


def guard_classes(params: Sequence[nn.Parameter]) -> list[type[ShardedParameter]]:
    """Classes for one unit's Parameters, each a subclass of what its Parameter is. ``guard_for`` says to whom they
    report."""
    made: dict[type, type[ShardedParameter]] = {}
    for kind in map(type, params):
        if kind not in made:
            named = ShardedParameter if kind is nn.Parameter else kind  # code may look at a class by its name
            names = {"made": kind, "__module__": named.__module__}
            made[kind] = type(named.__name__, (ShardedParameter, kind), names | {"__qualname__": named.__qualname__})
    return [made[type(param)] for param in params]


def guard_for(unit: ParamUnit, toucher: Toucher) -> None:
    """Have the classes of a unit's Parameters report to ``toucher``."""
    for guard in unit.guards:
        guard._unit, guard._toucher = ref(unit), ref(toucher)  # type: ignore[attr-defined]


@outside_modes
def _as_edges(tree: Any) -> Any:
    """Arguments with each guarded Parameter replaced by its gradient edge, so that autograd does not read its bytes."""
    if isinstance(tree, ShardedParameter):
        with plain():
            return get_gradient_edge(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(_as_edges(item) for item in tree)
    if isinstance(tree, dict):
        return {name: _as_edges(item) for name, item in tree.items()}
    return tree


def _moves_modules(frame: FrameType) -> bool:
    """Whether torch is moving ``.grad`` along with a Parameter (``model.to(...)``): a gradient that has left stays
    put."""
    return frame.f_code is _APPLY


def _caller(frame: FrameType | None) -> str:
    """The innermost function outside this file, as text for an error."""
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_name.startswith("<")):
        frame = frame.f_back
    if frame is None:
        return "an unknown caller"
    return f"{frame.f_code.co_name} at {frame.f_code.co_filename}:{frame.f_lineno}"


def requires_grad_of(params: Sequence[nn.Parameter]) -> Tensor:
    """Each Parameter's flag: 1D, bool."""
    with plain():
        return torch.tensor(list(map(_GET_FLAG, params)), dtype=torch.bool, device="cpu")


class Unfrozen:
    """The Parameters of frozen units whose flag has been set.

    Knows flags and names; not which units are up, or who uses them."""

    def __init__(self, units: Sequence[ParamUnit]) -> None:
        self._frozen = [(unit, slot) for unit in units if not unit.layout.trainable for slot in range(len(unit.params))]
        self._params = [unit.params[slot] for unit, slot in self._frozen]
        self.slots: dict[ParamUnit, set[int]] = {}  # whose flag is on, by unit
        self._classes: dict[type, type[_UnfrozenParameter]] = {}  # by what it is a subclass of

    def note(self, unit: ParamUnit, slot: int, on: bool) -> None:
        """The flag of a Parameter was set."""
        if unit.layout.trainable:
            return
        if on:
            self.slots.setdefault(unit, set()).add(slot)
        elif unit in self.slots:
            self.slots[unit].discard(slot)
            if not self.slots[unit]:
                del self.slots[unit]

    def look(self) -> None:
        """Note the flags that were set inside a forward, where Parameters are plain."""
        with plain():
            if any(map(_GET_FLAG, self._params)):
                for (unit, slot), param in zip(self._frozen, self._params, strict=True):
                    self.note(unit, slot, param.requires_grad)

    def watch(self, units: Sequence[ParamUnit]) -> None:
        """Calls of these units were opened: watch what is done with their unfrozen Parameters. Ends with
        ``ParamUnit.set_guard``."""
        for unit in units:
            for slot in self.slots.get(unit, ()):
                param = unit.params[slot]
                if not isinstance(param, _UnfrozenParameter):
                    param.__class__ = self._class_over(type(param))

    def _class_over(self, kind: type[nn.Parameter]) -> type[_UnfrozenParameter]:
        if kind not in self._classes:
            body = {"_all": ref(self), "_open": kind, "__module__": __name__}
            self._classes[kind] = type("UnfrozenParameter", (_UnfrozenParameter, kind), body)
        return self._classes[kind]

    def refusal(self, param: nn.Parameter) -> UnsupportedError:
        """Why a Parameter gets no gradient."""
        unit, slot = next(place for place, own in zip(self._frozen, self._params, strict=True) if own is param)
        return UnsupportedError(
            f"parameter {unit.layout.slots[slot].name!r} was given requires_grad=True after rayzero.prepare(), and is "
            "used with gradients, but it was frozen there and has no optimizer state; to train it later, leave "
            "requires_grad=True until prepare() has returned, and freeze it then; or compute with it under "
            "torch.no_grad()"
        )


class _UnfrozenParameter(nn.Parameter):
    """The class of an unfrozen Parameter while a call of its unit is open."""

    _all: ClassVar[Callable[[], Any]]  # weak: see _WeakClassAttribute in touch.py
    _open: ClassVar[type[nn.Parameter]]  # the class without this one

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        absent = list(of_class(ShardedParameter, (args, kwargs)))
        if absent:
            with type(absent[0]).brought(absent):
                return func(*args, **kwargs)
        with plain():
            result = func(*args, **kwargs)
            if any(tensor.grad_fn is not None for tensor in of_class(Tensor, result)):
                raise cls._all().refusal(next(of_class(_UnfrozenParameter, (args, kwargs))))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy has the class that it has without the flag."""
        watching = type(self)
        self.__class__ = watching._open  # type: ignore[assignment]
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = watching
