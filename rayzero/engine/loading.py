"""``load_state_dict`` after prepare: torch finds the entries and copies them; what it copies goes to the owners.

torch's own code runs, with its hooks, checks and messages. Between a hook before the outermost module's first parameter
and one after its last, a copy into a whole Parameter that is not there (touch.py) is noted instead of made: the values
stay those of the caller's state dict, and reach the masters without being rounded to the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from rayzero.engine.hooks import ModuleHook
from rayzero.errors import UnsupportedError


@dataclass(eq=False, slots=True)
class LoadedValues:
    """What a load_state_dict() has given so far."""

    module: nn.Module  # whose call it is
    values: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # unit -> slot -> the caller's tensor


class BeforeLoading(ModuleHook):
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


class AfterLoading(ModuleHook):
    """Says when it has ended."""

    def __init__(self, module: nn.Module, end: Callable[[nn.Module], None]) -> None:
        super().__init__(module)
        self._end = end

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        if module is self.module:
            self._end(module)


def hook_loading(module: nn.Module, begin: Callable[[nn.Module], None], end: Callable[[nn.Module], None]) -> None:
    """Have ``begin`` and ``end`` called around each load_state_dict() of ``module``, also within that of another."""
    module.register_load_state_dict_pre_hook(BeforeLoading(module, begin))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(AfterLoading(module, end))  # type: ignore[no-untyped-call]
