"""Parameters and buffers without memory, and ``model.apply(init)`` for a model too large for memory.

``empty_parameters()`` creates parameters without memory; they get it with their values.

[Note: init by unit] A unit's parameters exist only while its modules are visited. torch's own ``apply`` visits the
modules, so random numbers are drawn in the same order as on a whole model. A unit's meta parameters get memory when the
first module that holds one of them is visited, or when something touches one earlier. They lose it after the last visit
that may write to them: that of the unit's module and of every module that holds one. All bits of new memory are set,
which is a NaN in every float dtype; a value that is still NaN at the end was not initialised and is refused. So is a
touch of a unit that has been sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from rayzero.engine.private_torch import swap_tensors
from rayzero.engine.start.buffers import replace_buffers
from rayzero.engine.units.partition import UnitPlan
from rayzero.errors import UnsupportedError
from rayzero.layout.model_layout import UnitLayout
from rayzero.tensor_metadata import AbsentParameter, plain


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules that this thread builds inside have their parameters on the meta device: shapes without memory.

    Buffers stay real, so that tables computed in a constructor (rotary embeddings, masks) are right, and no random
    number is drawn for a parameter by a constructor's ``reset_parameters``. ``rayzero.prepare`` takes such a model with
    ``weights=`` or ``init=``, or where the run resumes from a checkpoint."""
    before = _building.made
    _building.made = WeakTensorKeyDictionary() if before is None else before
    try:
        yield
    finally:
        _building.made = before


class _Building(threading.local):
    """The Parameters that this thread has emptied so far; None outside ``empty_parameters()``."""

    made: WeakTensorKeyDictionary | None = None  # a Parameter that two modules share stays one


_building = _Building()


def _empty(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
    made = _building.made
    if made is None or param.is_meta or is_lazy(param):
        return None
    if param not in made:
        made[param] = _emptied(param)
    return made[param]  # type: ignore[no-any-return]


# Once and for good: torch's table of these hooks must not change while another thread builds a module.
_register: Any = register_module_parameter_registration_hook  # typed as if hooks could return nothing
_register(_empty)


def _emptied(param: nn.Parameter) -> nn.Parameter:
    empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    empty.__class__ = type(param)
    empty.__dict__.update(param.__dict__)
    return empty


def materialise(param: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """Turn a meta Parameter into ``tensor`` (of its shape; of any dtype) and keep its hooks. Returns the old contents,
    to swap back."""
    other = nn.Parameter(tensor, requires_grad=param.requires_grad)
    swap_tensors(param, other)
    param._backward_hooks = param._backward_hooks  # puts the user's own hooks on the new tensor
    param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    return other


Init = Callable[[nn.Module], object]


class UnitInit:
    """One run of ``init`` over a model. Knows which units' parameters have memory; not where their values go."""

    def __init__(
        self,
        model: nn.Module,
        plan: UnitPlan,
        init: Init,
        given: Collection[str],
    ) -> None:
        """given: names of parameters and buffers whose values have another source, so that ``init`` need not write
        them."""
        self._model = model
        self._init = init
        self._given = given
        self._units = plan.layout.units
        self._params = dict(model.named_parameters())
        self._unit_of = {id(self._params[slot.name]): unit for unit in self._units for slot in unit.slots}
        self._early = {unit.index for unit in self._units if any(self._params[s.name].is_meta for s in unit.slots)}
        order: list[nn.Module] = []
        model.apply(order.append)
        self._ending = _ending(model, plan, order, self._unit_of)  # visit -> the units that end with it
        self._visits = 0
        self._module = ""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._over: set[int] = set()
        self._empty: dict[int, nn.Parameter] = {}  # the meta tensors of parameters that have memory now
        self._classes = {name: type(param) for name, param in self._params.items()}
        self._absent = _absent_class(self._bring)

    def run(self, complete: Callable[[UnitLayout], None]) -> None:
        """Visit every module. ``complete`` is called with each unit whose parameters have their values, before their
        memory is freed. Parameters that were on meta return there, also after an error; buffers that were on meta are
        real afterwards, unless it raises."""
        before = _real_buffers(self._model)
        try:
            for param in self._params.values():
                if param.is_meta:
                    param.__class__ = self._absent
            self._model.apply(lambda module: self._visit(module, complete))
            for unit in self._units:
                if unit.index not in self._early:
                    complete(unit)
            self._require_buffers(before)
        except BaseException:
            replace_buffers(self._model, {id(real): empty for real, empty in before.values()})
            raise
        finally:
            for name, param in self._params.items():
                param.__class__ = self._classes[name]
                if id(param) in self._empty:
                    swap_tensors(param, self._empty.pop(id(param)))

    def _visit(self, module: nn.Module, complete: Callable[[UnitLayout], None]) -> None:
        self._module = self._names[id(module)]
        held = {name: param for name, param in module._parameters.items() if param is not None}
        self._bring([param for param in held.values() if isinstance(param, self._absent)])
        self._init(module)
        for name, param in held.items():
            if module._parameters.get(name) is not param:
                raise UnsupportedError(
                    f"init replaced the Parameter {name!r} of module {self._module!r} by another object, which the "
                    f"optimizer does not know; write into the Parameter instead"
                )
        for unit in self._ending.get(self._visits, ()):
            if unit in self._early:
                self._end(self._units[unit])
                complete(self._units[unit])
                self._free(self._units[unit])
        self._visits += 1

    def _bring(self, absent: Sequence[nn.Parameter]) -> None:
        """Give memory to the units of these parameters."""
        for unit in {unit.index: unit for unit in (self._unit_of[id(param)] for param in absent)}.values():
            if unit.index in self._over:
                names = [slot.name for slot in unit.slots if any(self._params[slot.name] is param for param in absent)]
                raise UnsupportedError(
                    f"init, visiting {repr(self._module) if self._module else 'the model itself'}, used "
                    f"{', '.join(map(repr, names))} of unit {unit.name!r}, whose values have already gone to the "
                    f"owners; write a parameter when its own module is visited, or pass units= that keep the two "
                    f"modules together"
                )
            for slot in unit.slots:
                param = self._params[slot.name]
                if isinstance(param, self._absent):
                    param.__class__ = self._classes[slot.name]
                    self._empty[id(param)] = materialise(param, _unwritten(param))

    def _end(self, unit: UnitLayout) -> None:
        """No later visit may write to the unit: require its values."""
        params = [self._params[slot.name] for slot in unit.slots]
        self._bring([param for param in params if isinstance(param, self._absent)])
        for slot, param in zip(unit.slots, params, strict=True):
            given = id(param) not in self._empty or slot.name in self._given
            if not given and _is_unwritten(param.detach(), opaque=unit.opaque):
                raise UnsupportedError(
                    f"init left parameter {slot.name!r} unwritten, or wrote NaN into it; it is on the meta device and "
                    "has no other value. Have init write it, or pass weights="
                )

    def _free(self, unit: UnitLayout) -> None:
        self._over.add(unit.index)
        for param in (self._params[slot.name] for slot in unit.slots):
            if id(param) in self._empty:
                swap_tensors(param, self._empty.pop(id(param)))
            param.__class__ = self._absent

    def _require_buffers(self, before: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        now = dict(self._model.named_buffers(remove_duplicate=False))
        for name, (real, _) in before.items():
            if name not in self._given and now.get(name) is real and _is_unwritten(real):
                raise UnsupportedError(
                    f"init left buffer {name!r} unwritten, and it was on the meta device; build the model under "
                    "rayzero.empty_parameters(), which leaves buffers real"
                )


def _ending(
    model: nn.Module, plan: UnitPlan, order: list[nn.Module], unit_of: Mapping[int, UnitLayout]
) -> dict[int, list[int]]:
    """Visit (index in ``order``) -> units that no later visit may write to. [Note: init by unit]"""
    own = {index: id(model.get_submodule(name)) for index, name in enumerate(plan.modules)}
    last: dict[int, int] = {}
    for visit, module in enumerate(order):
        held = {unit_of[id(param)].index for param in module._parameters.values() if param is not None}
        for unit in held | {unit for unit, its in own.items() if its == id(module)}:
            last[unit] = visit
    ending: dict[int, list[int]] = {}
    for unit, visit in sorted(last.items()):
        ending.setdefault(visit, []).append(unit)
    return ending


def _absent_class(bring: Callable[[Sequence[nn.Parameter]], None]) -> type[nn.Parameter]:
    """The class of a parameter without memory: the first operation on its values calls ``bring`` for its unit."""

    class UnwrittenParameter(AbsentParameter):
        @classmethod
        def brought(cls, params: list[nn.Parameter]) -> AbstractContextManager[None]:
            bring(params)
            return nullcontext()

    UnwrittenParameter.family = UnwrittenParameter
    return UnwrittenParameter


# ---- memory that nobody has written -----------------------------------------------------------------------------


def _unwritten(like: Tensor) -> Tensor:
    """CPU memory of the same dtype and strides, every bit set."""
    with torch.no_grad(), plain():
        tensor = torch.empty_like(like, device="cpu").detach()
        storage: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
        storage.fill_(255)
    return tensor


def _is_unwritten(tensor: Tensor, *, opaque: bool = False) -> bool:
    if tensor.is_floating_point() and not opaque:
        return bool(tensor.isnan().any())
    return tensor._version == 0 and tensor.numel() > 0


def _real_buffers(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Give memory to the buffers on meta: name -> the real tensor, and what was there."""
    empty = {id(buffer): buffer for buffer in model.buffers() if buffer.is_meta}
    made = {key: _unwritten(buffer) for key, buffer in empty.items()}
    named = {
        name: (made[id(buffer)], buffer)
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if id(buffer) in made
    }
    replace_buffers(model, made)
    return named
