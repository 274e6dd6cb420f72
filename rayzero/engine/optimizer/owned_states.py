"""``optimizer.state`` of an optimizer whose states are at the owners: empty, and refused where that would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from rayzero.errors import UnsupportedError


class OwnedStates(dict[Any, Any]):
    """Empty, as in torch before the first step; from then on every use is refused, and a change is at any time.

    A loop that resets, prunes or reads states here would otherwise do so to none."""

    def __init__(self, has_stepped: Callable[[], bool]) -> None:
        """``has_stepped``: whether a plain optimizer would have states by now."""
        super().__init__()
        self._has_stepped = has_stepped

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError."""
        raise UnsupportedError(
            "optimizer.state is empty, because the optimizer owners keep the states: read them with "
            "optimizer.state_dict(), and change them with optimizer.load_state_dict(), in which a parameter without "
            "an entry in 'state' starts anew"
        )

    __getitem__ = __setitem__ = __delitem__ = __ior__ = refuse
    clear = pop = popitem = setdefault = update = refuse


def _until_stepped(name: str) -> Any:
    def read(self: OwnedStates, *given: Any) -> Any:
        if self._has_stepped():
            self.refuse()
        return getattr(dict, name)(self, *given)

    return read


for _name in ("__contains__", "__iter__", "__len__", "get", "items", "keys", "values"):
    setattr(OwnedStates, _name, _until_stepped(_name))
