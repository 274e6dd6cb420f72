"""Values of parameters that users read, write, load or exchange after prepare().

[Note: load_state_dict] torch's own code looks up and copies the entries, with its hooks, checks and messages. Between a
hook before the outermost module's first parameter and one after its last, a copy into a whole Parameter that is not up
(touch.py) is recorded instead of made. So the caller's values reach the masters without being rounded to the compute
dtype.

[Note: exchanged] ``model.half()``, ``module.weight = nn.Parameter(...)`` and the like replace a storage or an object
that the engine fills. Training would silently go on without that parameter. A plain tensor in a Parameter's place is
allowed: only ``torch.func.functional_call`` puts one there, for one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.autograd.hooks import ModuleHook
from rayzero.engine.private_torch import is_averaged, storage_keys
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.engine.units.unit_cache import UnitCache
from rayzero.errors import UnsupportedError
from rayzero.modes import outside_modes
from rayzero.protocol.messages import COMPUTE, MASTER, same_bits
from rayzero.protocol.store import ParameterStore
from rayzero.tensor_metadata import plain


class UnitValues:
    """The owners' values of units, with what this rank has written. Knows masters, optimizer states and the caller's
    values; not modules, gradients or steps."""

    def __init__(self, store: ParameterStore, cache: UnitCache) -> None:
        self._store, self._cache = store, cache

    @outside_modes
    def masters(self, unit: ParamUnit) -> Tensor:
        """A unit's exact values with what this rank has written: 1D, unit.numel elements, host memory; fp32, or the
        unit's dtype if it is frozen and that dtype holds the values exactly. Waits for no other rank."""
        written = self._cache.writes.values(unit)
        if not unit.layout.has_master:
            return self._cache.fetch_flat(unit, COMPUTE) if written is None else written.clone()
        flat = self._cache.fetch_flat(unit, MASTER)
        if written is None:
            return flat
        return torch.where(same_bits(written, self._cache.fetch_flat(unit, COMPUTE)), flat, written.float())

    @outside_modes
    def write(self, unit: ParamUnit, kind: str, values: Tensor) -> None:
        """Replace what the owners have of ``kind`` (an optimizer state) by ``values`` (1D, unit.numel elements, fp32).
        Every rank calls it with equal values."""
        if self._cache.writes.sending(unit, kind, values):
            self._store.write(unit.index, self._cache.version, kind, values).result()

    @outside_modes
    def load(self, unit: ParamUnit, values: Mapping[int, Tensor]) -> None:
        """Replace parameters by the caller's tensors (slot -> tensor of the parameter's shape, any floating dtype).
        Every rank calls it with equal values, once earlier writes have gone to the owners."""
        flat = self.masters(unit)
        with torch.no_grad():
            for i, value in values.items():
                slot = unit.layout.slots[i]
                flat[slot.start : slot.stop].view(slot.shape).copy_(value)
        self._cache.overwrite(unit, MASTER if unit.layout.has_master else COMPUTE, flat)
        unit.count_writes(list(values))
        unit.settle_writes()


class Registered:
    """The place where each unit's Parameters were registered at prepare(). [Note: exchanged]

    Knows modules' tables and storages' identities; not what is up or who uses it."""

    def __init__(self, model: nn.Module, units: Sequence[ParamUnit]) -> None:
        self._model = model
        places = {id(param): (unit, i) for unit in units for i, param in enumerate(unit.params)}
        found = [
            (module._parameters, name, param)
            for module in model.modules()
            for name, param in module._parameters.items()
            if param is not None
        ]
        self._entries = [(table, name) for table, name, _ in found]
        self._params = [param for _, _, param in found]
        self._places = [places[id(param)] for param in self._params]
        self._keys = [unit.keys[slot] for unit, slot in self._places]

    def check(self) -> None:
        """Raise UnsupportedError if the owners would not get the gradients, naming the first Parameter that is another
        object or has other memory than at prepare(), if one is."""
        if is_averaged(self._model):
            raise UnsupportedError(
                "a DistributedDataParallel around a prepared model would keep its gradients from the owners, who "
                "average them over the ranks; call the model that rayzero.prepare() returned"
            )
        with plain():
            now = [table.get(name) for table, name in self._entries]
            keys = storage_keys(self._params)
            if keys != self._keys:
                self._keys = [unit.keys[slot] for unit, slot in self._places]  # .data was assigned since
            same = [
                ours is theirs or (isinstance(theirs, Tensor) and not isinstance(theirs, nn.Parameter))
                for ours, theirs in zip(self._params, now, strict=True)
            ]
        if keys == self._keys and all(same):
            return
        exchanged = [not kept or key != its for kept, key, its in zip(same, keys, self._keys, strict=True)].index(True)
        unit, slot = self._places[exchanged]
        raise UnsupportedError(
            f"parameter {unit.layout.slots[slot].name!r} was replaced after rayzero.prepare() (by "
            f"model.to/half/double, param.data = ..., or a new nn.Parameter), but the owners hold its values in the "
            f"dtype it had then; make such changes before prepare(), and give functional_call plain tensors"
        )

    def refuse_added(self) -> None:
        """Raise UnsupportedError, naming the first Parameter of the model that was not there at prepare(). A forward
        may compute with it, but the owners have no values of it."""
        known = set(map(id, self._params))
        for name, param in self._model.named_parameters():
            if id(param) not in known:
                raise UnsupportedError(
                    f"parameter {name!r} was added to the model after rayzero.prepare(), so the owners neither train "
                    "nor save it; add it (an adapter, a head) before prepare(), or keep it outside of the model"
                )


LoadedValues = dict[int, dict[int, Tensor]]  # unit -> slot -> the caller's tensor


class StateDictLoad:
    """The load_state_dict() that is running, if one is, and what it has given so far. [Note: load_state_dict]

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

    def __init__(self, module: nn.Module, loading: StateDictLoad) -> None:
        super().__init__(module)
        self._loading = loading

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if module is not self.module:
            return
        if metadata.get("assign_to_params_buffers"):
            raise UnsupportedError(
                "load_state_dict(assign=True) after rayzero.prepare() would put other Parameters in place of those the "
                "optimizer owners fill; use assign=False, which copies"
            )
        self._loading.begin(module)
