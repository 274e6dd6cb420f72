"""The scope of one group: tensors saved while it is open are the group's.

A scope knows when it opens, closes and commits; what becomes of its tensors is the offload's affair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rayzero.activations.schedule.group import Group

if TYPE_CHECKING:
    from rayzero.activations.offload import ActivationOffload


class PackHook:
    """What autograd calls for a tensor saved inside ``group``; known to be ours by its type."""

    __slots__ = ("group", "offload")

    def __init__(self, offload: ActivationOffload, group: Group) -> None:
        self.offload, self.group = offload, group

    def __call__(self, tensor: Tensor) -> object:
        return self.offload._pack(self.group, tensor)


class GroupScope:
    """An open group, or nothing at all where offload does not apply (``group`` is None)."""

    def __init__(self, offload: ActivationOffload, group: Group | None, hooks: saved_tensors_hooks | None) -> None:
        self._offload, self.group, self._hooks = offload, group, hooks

    def commit(self, *, release: list[Tensor] | None = None, delay: bool = False) -> None:
        """Decide on the group's tensors and start them on their way; a second commit changes nothing.

        ``release`` hands over tensors that the caller is done with: the list is emptied, so that its references do
        not hold their memory. Only what nobody else holds is freed; the rest is counted as ``refused_bytes``.
        ``delay``: inside ``delayed()`` the commit is put off to ``flush_delayed()``."""
        self.close()
        if self.group is not None:
            self._offload._commit_or_delay(self.group, release, delay)
        elif release is not None:
            release.clear()

    def close(self) -> None:
        """End the scope without deciding; what was saved stays until ``commit``. Idempotent."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        if self.group is not None:
            self._offload._close_group(self.group)
