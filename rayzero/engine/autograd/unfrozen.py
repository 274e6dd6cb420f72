"""Parameters that were frozen at prepare() and are given ``requires_grad=True`` afterwards.

They have no optimizer state, so a gradient of theirs would be lost. Libraries of adapters set the flag all the same: to
compare with a frozen adapter they make it the active one, compute without gradients, and switch back. So the flag is
noted, and only an operation that would record a gradient is refused. While a call of its unit is open, such a Parameter
has a subclass of its class there, which looks at the result of every operation; no other Parameter pays for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from rayzero.engine.autograd.touch import ShardedParameter
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.errors import UnsupportedError
from rayzero.tensor_metadata import of_class, plain

_FLAG: Any = Tensor.requires_grad
_GET_FLAG = _FLAG.__get__


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
