"""What autograd keeps in place of a saved tensor.

[Note: versions] torch checks in-place changes of saved tensors by a version counter, but not when hooks pack them. A
detached alias shares the counter with its tensor, also after its own memory is swapped for an empty one: that is the
``probe`` each handle keeps, and unpack raises what torch would have raised.

[Note: cycles] pack may be handed the node's own output with its ``grad_fn``; what a handle keeps is always detached,
or the graph would keep itself alive."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rayzero.activations.tensors.pieces import View

if TYPE_CHECKING:
    from rayzero.activations.schedule.group import Group
    from rayzero.activations.tensors.entry import Entry


class Held:
    """A tensor that stays: too small, a parameter, or not for offloading at all."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def read(self) -> Tensor:
        """The tensor; RuntimeError if it was changed in place since."""
        check_version(self.tensor, self.version, self.tensor)
        return self.tensor


class Saved:
    """A tensor that may leave. Until its group is committed, and if it stays, it holds the tensor itself.

    Its end (the graph node is freed) is only noted: ``__del__`` may run in any thread, at any moment."""

    __slots__ = (
        "__weakref__",
        "_ends",
        "dtype",
        "entry",
        "epoch",
        "group",
        "probe",
        "small",
        "tensor",
        "version",
        "view",
    )

    def __init__(self, tensor: Tensor, group: Group, *, small: bool, ends: deque[Saved.End]) -> None:
        """``small``: leaves only along with a storage that leaves anyway."""
        self.tensor: Tensor | None = tensor.detach()  # freed by: leave()
        self.version: int = tensor._version
        self.probe = probe_of(tensor)
        self.view = view_of(tensor)
        self.dtype = tensor.dtype
        self.group = group
        self.small = small
        self.entry: Entry | None = None
        self.epoch = 0  # of the entry's return that this handle last read
        self._ends = ends

    End = tuple["Group", "Entry | None", int]

    def leave(self, entry: Entry) -> None:
        """``entry`` has the bytes from now on."""
        self.entry = entry
        self.tensor = None

    def check(self) -> None:
        """RuntimeError, as torch raises it, if the tensor was changed in place since it was saved."""
        check_version(self.probe, self.version, self)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.view.size)}"

    def __del__(self) -> None:
        self._ends.append((self.group, self.entry, self.epoch))


def view_of(tensor: Tensor) -> View:
    """The tensor as a view of its storage."""
    itemsize = tensor.dtype.itemsize
    start = int(tensor.storage_offset()) * itemsize
    return View(start, tuple(tensor.shape), tuple(tensor.stride()), itemsize)


def view_bytes(tensor: Tensor) -> int:
    """Bytes of the view, or of its storage if that is smaller (expanded tensors)."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def probe_of(tensor: Tensor) -> Tensor:
    """An empty tensor whose version counter is ``tensor``'s. See [Note: versions]."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


def check_version(probe: Tensor, expected: int, shown: object) -> None:
    """RuntimeError in torch's words if ``probe``'s counter has moved on."""
    if probe._version != expected:
        what = f"{shown.dtype} {list(shown.shape)}" if isinstance(shown, Tensor) else str(shown)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{what}] is at version {probe._version}; expected version {expected} instead. Hint: the tensor was saved "
            "under activation offload; find the operation that changed it after it was used."
        )
