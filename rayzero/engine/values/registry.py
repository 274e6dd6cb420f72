"""Detects Parameters that were replaced after prepare(), before a forward computes with them, and added ones.

``model.half()``, ``p.data = tensor``, ``module.weight = nn.Parameter(...)`` and the like replace a storage or an object
that the engine fills. Training would silently go on without that parameter. A plain tensor in a Parameter's place is
allowed: only ``torch.func.functional_call`` puts one there, for one call.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rayzero.engine.private_torch import storage_keys
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.errors import UnsupportedError
from rayzero.tensor_metadata import plain


class Registered:
    """The place where each unit's Parameters were registered at prepare().

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
        """Raise UnsupportedError, naming the first Parameter that is another object or has other memory than at
        prepare()."""
        with plain():
            now = [table.get(name) for table, name in self._entries]
            keys = storage_keys(self._params)
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
