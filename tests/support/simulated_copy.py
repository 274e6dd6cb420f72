"""The copies of a simulated lane: taken apart into their operations, which are made later.

A copy's device memory is its owner's, and gone once the owner has freed it. So what a copy reads (out) or writes (in)
on the device it holds weakly, and everything else strongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rayzero.lanes.lane import Direction
from tests.support.happens_before import HappensBefore

if TYPE_CHECKING:
    from tests.support.simulated_lane import SimulatedEvent


class FreedError(AssertionError):
    """Device memory was freed before a copy that uses it had run, and nothing held it."""


@dataclass(eq=False)
class Work:
    """A copy that is queued."""

    direction: Direction
    after: Sequence[SimulatedEvent]
    operations: list[Operation] = field(default_factory=list)
    holds: list[Tensor] = field(default_factory=list)  # until it has run
    label: str = ""
    nbytes: int = 0
    began: float = 0.0  # on its stream's clock
    ended: float = 0.0
    has_run: bool = False


class _Weak:
    """A tensor whose memory is its owner's: gone once the owner has freed it."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._like = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self, work: Work) -> Tensor:
        dtype, offset, shape, stride = self._like
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise FreedError(
                f"copy {work.label!r} ({work.direction}) uses {dtype} {tuple(shape)} on the device, which was freed "
                "before it ran: name it in holds, or keep it until after wait()"
            )
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)


@dataclass(eq=False)
class Operation:
    """One operation of a copy."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    made: list[Tensor]  # what it returns that is new memory: filled when it runs
    reads: list[Tensor | _Weak]
    writes: list[Tensor | _Weak]

    @property
    def name(self) -> str:
        return str(self.function).removeprefix("aten.")

    def check(self, orders: HappensBefore, work: Work) -> None:
        """Note its accesses; see ``HappensBefore.access``."""
        what = f"{self.name} of copy {work.label!r}"
        for found, writes in ((self.reads, False), (self.writes, True)):
            for each in found:
                tensor = each.tensor(work) if isinstance(each, _Weak) else each
                orders.access(work.direction, tensor, writes=writes, what=what)

    def run(self, work: Work) -> None:
        """Make it."""

        def strong(each: Any) -> Any:
            return each.tensor(work) if isinstance(each, _Weak) else each

        arguments, keywords = tree_map_only(_Weak, strong, (self.arguments, self.keywords))
        with torch.no_grad():
            result = self.function(*arguments, **keywords)
            for into, values in zip(self.made, tree_leaves(result), strict=False):
                into.copy_(values)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes a copy apart. What it reads (out) or writes (in) on the device it must not keep alive."""

    def __init__(self, work: Work, link: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work, self._link = work, link
        self._own = set[int]()  # addresses of memory that the copy itself has made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads, writes = accesses(func, args, kwargs)
        if not writes and makes_view(func):
            return func(*args, **kwargs)
        on_device = reads if self._work.direction == "out" else writes

        def kept(tensor: Tensor) -> Tensor | _Weak:
            address = tensor.untyped_storage().data_ptr()
            theirs = any(tensor is each for each in on_device) and address not in self._own
            return _Weak(tensor) if theirs else tensor.detach()

        result: Any = None
        made: list[Tensor] = []
        if not writes:  # it makes new memory: which has its size now, and its values once it runs
            result = func(*args, **kwargs)
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            self._own.update(each.untyped_storage().data_ptr() for each in made)
        elif func._schema.returns:
            result = writes[0] if len(func._schema.returns) == 1 else tuple(writes)
        arguments, keywords = tree_map_only(Tensor, kept, (args, kwargs))
        self._work.ended += sum(each.nbytes for each in (writes or made)) / self._link
        self._work.operations.append(
            Operation(func, arguments, keywords, made, [*map(kept, reads)], [*map(kept, writes)])
        )
        return result


def accesses(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    reads, writes = list[Tensor](), list[Tensor]()
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(each for each in tree_leaves(value) if isinstance(each, Tensor))
    if func.overloadpacket.__name__.endswith("_like"):  # it reads only the shape
        reads = []
    return reads, writes


def makes_view(func: Any) -> bool:
    """Whether what an operation returns is the memory of its argument, which it does not touch."""
    infos = [each.alias_info for each in func._schema.arguments if each.alias_info is not None]
    return bool(infos) and not any(info.is_write for info in infos)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
