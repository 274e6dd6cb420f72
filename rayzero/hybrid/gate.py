"""The just-in-time gate: the first use of a parameter waits until its update has come back from the host.

[Note: the gate] While its bucket is away, a Parameter has a subclass whose ``__torch_function__`` sees every operation:
any read or write of the bytes, in a module's forward or outside it, first waits for the bucket. Reading metadata
(shape, ``.grad``) does not wait. ``attach`` adds forward pre-hooks that wait module by module: kernels that bypass
Python's torch functions need them, and so do compiled modules, whose graphs must see plain Parameters.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rayzero.modes import outside_modes
from rayzero.tensor_metadata import AbsentParameter


class AwayParameter(AbsentParameter):
    """The class a Parameter has while a bucket of it is away; each gate has a subclass of its own."""

    gate: ClassVar[Gate]

    @classmethod
    def brought(cls, params: list[nn.Parameter]) -> AbstractContextManager[None]:
        """Wait for their updates; on return they are plain Parameters."""
        for param in params:
            if isinstance(param, AwayParameter):  # an earlier wait may have opened it
                param.open()
        return nullcontext()

    def open(self) -> None:
        """Wait for its update; on return it is a plain Parameter."""
        type(self).gate.open(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.open()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.open()
        return self.__reduce_ex__(protocol)


AwayParameter.family = AwayParameter


class Gate:
    """Makes parameters wait for their buckets, and opens them bucket by bucket.

    Knows which parameters wait for which bucket, and the order of first use; not what a bucket is or does. Any thread
    may call ``open``."""

    def __init__(self, wait: Callable[[int], None]) -> None:
        """``wait(bucket)`` returns once its parameters are back, for every stream of their device: nobody sees who uses
        them afterwards. If it raises, they stay closed."""
        self._wait = wait
        self._class: type[AwayParameter] = type("AwayParameter", (AwayParameter,), {"gate": self})
        self._members: dict[int, Sequence[nn.Parameter]] = {}  # bucket that is away -> its parameters
        self._buckets: dict[int, list[int]] = {}  # id of a parameter that is away -> the buckets it waits for
        self._lock = threading.RLock()
        self.order: list[int] = []  # buckets in the order of first use since the last close()

    def close(self, members: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """Close parameters. ``members``: bucket -> its parameters. They are plain ones, because a gate must not replace
        the behaviour of another class, and none is closed."""
        with self._lock:
            self._members, self._buckets, self.order = dict(members), {}, []
            for bucket, params in members.items():
                for param in params:
                    self._buckets.setdefault(id(param), []).append(bucket)
                    param.__class__ = self._class

    @outside_modes
    def open(self, param: nn.Parameter) -> None:
        """Wait for every bucket of the parameter."""
        with self._lock:
            for bucket in list(self._buckets.get(id(param), ())):
                self._open_bucket(bucket)

    def open_all(self) -> None:
        """Wait for every closed parameter, without counting it as a use."""
        with self._lock:
            used = list(self.order)
            for bucket in list(self._members):
                self._open_bucket(bucket)
            self.order = used

    def _open_bucket(self, bucket: int) -> None:
        self._wait(bucket)
        self.order.append(bucket)
        for param in self._members.pop(bucket):
            left = self._buckets[id(param)]
            left.remove(bucket)
            if not left:
                del self._buckets[id(param)]
                param.__class__ = nn.Parameter


def attach(module: nn.Module, known: Iterable[nn.Parameter]) -> list[RemovableHandle]:
    """Add forward pre-hooks that wait for a module's own parameters among ``known``. The hook of a compiled module
    waits, outside the graph, for all parameters of its submodules. Remove the returned handles to undo it."""
    wanted = {id(param) for param in known}
    handles = []
    for owner, recurse in _owners(module):
        own = [param for param in owner.parameters(recurse=recurse) if id(param) in wanted]
        if own:
            handles.append(owner.register_forward_pre_hook(_opener(own)))
    return handles


def _owners(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    if isinstance(module, torch._dynamo.OptimizedModule):
        yield module, True
        return
    yield module, False
    for child in module.children():
        yield from _owners(child)


def _opener(params: list[nn.Parameter]) -> Callable[..., None]:
    def open_them(module: nn.Module, args: Any) -> None:
        AwayParameter.brought(params)

    return torch.compiler.disable(open_them)  # type: ignore[no-any-return,no-untyped-call]
