"""The seam to whoever keeps saved weights in a way of its own: an engine whose parameters come and go."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

Hooks = tuple[Any, Any]  # pack, unpack


class Elsewhere(Protocol):
    """Keeps some of the tensors that autograd saves, and has saved-tensor hooks of its own on the stack at times."""

    def pack(self, saved: Tensor) -> object | None:
        """What autograd is to keep of ``saved``; None: it is none of its own."""
        ...

    def unpack(self, packed: Any) -> Tensor:
        """The inverse of ``pack``."""
        ...

    def below(self, hooks: Hooks) -> tuple[bool, Hooks | None]:
        """Whether these hooks are its own, and if so those to which they pass other tensors."""
        ...
