"""``load_state_dict`` after prepare: torch looks up and copies the entries, and their values go to the owners.

torch's own code runs, with its hooks, checks and messages. Between a hook before the outermost module's first parameter
and one after its last, a copy into a whole Parameter that is not up (touch.py) is recorded instead of made. So the
caller's values reach the masters without being rounded to the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rayzero.engine.autograd.hooks import ModuleHook
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.errors import UnsupportedError

LoadedValues = dict[int, dict[int, Tensor]]  # unit -> slot -> the caller's tensor


class StateDictLoad:
    """The load_state_dict() that is running, if one is, and what it has given so far.

    Knows whose call it is and the caller's tensors; not what becomes of them."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None  # whose call it is
        self._values: LoadedValues = {}

    def begin(self, module: nn.Module) -> None:
        """A module's load_state_dict() has begun, perhaps within that of another."""
        if self._module is None or self._module is module:
            self._module, self._values = module, {}

    def take(self, param: nn.Parameter, unit: ParamUnit, value: Tensor) -> bool:
        """Take a Parameter's values; False: none is running."""
        if self._module is None:
            return False
        self._values.setdefault(unit.index, {})[unit.slot_of(param)] = value
        return True

    def end(self, module: nn.Module) -> LoadedValues | None:
        """A module's has ended: what it gave; None where it was within that of another."""
        if self._module is not module:
            return None
        values = self._values
        self.abandon()
        return values

    def abandon(self) -> None:
        """None is running, whatever has begun."""
        self._module, self._values = None, {}


class BeforeStateDictLoad(ModuleHook):
    """Says when a module's load_state_dict() begins."""

    def __init__(self, module: nn.Module, begin: Callable[[nn.Module], None]) -> None:
        super().__init__(module)
        self._begin = begin

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if module is not self.module:
            return
        if metadata.get("assign_to_params_buffers"):
            raise UnsupportedError(
                "load_state_dict(assign=True) after rayzero.prepare() would put other Parameters in place of those the "
                "optimizer owners fill; use assign=False, which copies"
            )
        self._begin(module)


class AfterStateDictLoad(ModuleHook):
    """Says when it has ended."""

    def __init__(self, module: nn.Module, end: Callable[[nn.Module], None]) -> None:
        super().__init__(module)
        self._end = end

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        if module is self.module:
            self._end(module)


def hook_state_dict_loads(
    module: nn.Module, begin: Callable[[nn.Module], None], end: Callable[[nn.Module], None]
) -> None:
    """Have ``begin`` and ``end`` called around each load_state_dict() of ``module``, also within that of another."""
    module.register_load_state_dict_pre_hook(BeforeStateDictLoad(module, begin))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(AfterStateDictLoad(module, end))  # type: ignore[no-untyped-call]
