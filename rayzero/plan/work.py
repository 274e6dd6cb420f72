"""Measures what one micro-batch costs, in operations and live bytes, by running the model without data or memory.

The model runs under torch's FakeTensorMode, which traces every operation with its shapes and dtypes and computes none.
Live bytes are counted by storage, as an allocator would (the method of torch's own MemTracker).

[Note: offload in a plan] The same code as in a run decides which activations leave, which stay and which are
prefetched; only its copies take no time. A plan cannot know times. It assumes that a group has left when the next
group's forward ends, and that under ``activation_device_budget`` everything beyond the budget leaves, even if a run
would recompute some of it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from rayzero.activations.group import OffloadPolicy
from rayzero.activations.host_pool import HostPool
from rayzero.activations.offload import ActivationOffload
from rayzero.errors import UnsupportedError
from rayzero.lanes import Direction, Event, ThreadLane
from rayzero.layout.model_layout import ModelLayout, UnitLayout
from rayzero.memory.pool import buffer_bytes
from rayzero.modes import MachineMode


def _attention_forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Operations that torch's counter knows on other devices, but counts as zero on CPUs."""

Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module], Tensor]  # one micro-batch on this model: its scalar loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Which modules' activations are offloaded, and how much of them."""

    modules: tuple[str, ...]  # patterns
    policy: OffloadPolicy

    def share(self, fraction: float) -> Offload:
        """The same modules, but offload this fraction of the bytes."""
        return replace(self, policy=replace(self.policy, device_budget_bytes=None, fraction=fraction))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One micro-batch of one rank. Bytes are on its device and do not include parameters."""

    forward_flops: int
    backward_flops: int
    buffer_bytes: int  # the model's buffers
    saved_bytes: int  # live when the forward ends: what backward needs
    forward_peak_bytes: int
    backward_peak_bytes: int  # includes gradients, each until its unit's are complete
    offloaded_bytes: int = 0  # activations that are copied out in the forward and back in the backward
    offloaded_host_bytes: int = 0  # host memory where those wait
    cpu_attention_flops: int = 0  # both passes; whole squares as torch counts elsewhere, though CPUs skip what causal
    # masks hide: part of the model's operations, and of no bound


def measure_work(
    build: Build, loss: Loss, layout: ModelLayout, *, gathers: bool = False, offload: Offload | None = None
) -> Work:
    """Run ``loss(build())`` forward and backward without data.

    layout: of that model in training: dtypes, and which gradients leave together. gathers: a unit's gradients are
        gathered into one vector on the device before they leave it (GPU ranks). offload: activations to offload. Raises
        UnsupportedError if the model needs data while it runs (a branch on values); such a model cannot be planned."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with _Nothing(), torch.device(device):
            if offload is not None and (budget := offload.policy.device_budget_bytes) is not None:
                could = _run(build(), loss, layout, gathers, offload.share(1.0)).offloaded_bytes
                offload = offload.share(max(0.0, 1.0 - budget / could) if could else 0.0)
            return _run(build(), loss, layout, gathers, offload)
    except (torch._subclasses.fake_tensor.DataDependentOutputException, RuntimeError) as exc:
        said = " ".join(str(exc).split())[:200]
        raise UnsupportedError(
            f"the model cannot be planned: it fails without data ({type(exc).__name__}: {said}); it can still be run"
        ) from exc


class _Nothing(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors without memory or data. Caches the results of operations, except those that return a view: the cache
    would keep its storage alive."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.cache_enabled = func is not torch.ops.aten.set_.source_Storage_storage_offset
        return super().dispatch(func, types, args, kwargs)


def _run(model: nn.Module, loss: Loss, layout: ModelLayout, gathers: bool, offload: Offload | None) -> Work:
    _convert(model, layout)
    live = _LiveBytes([*model.parameters(), *model.buffers()])
    with leaving_gradients(model, layout, gathers=gathers), live:
        if offload is None:
            work = _micro_batch(model, loss, live)
        else:
            with _offloading(model, offload, live) as moved:
                first, then = (_with_offload(_micro_batch(model, loss, live), *moved()) for _ in range(2))
            # in the first, all groups leave because nothing is known yet
            larger = ("forward_peak_bytes", "backward_peak_bytes", "offloaded_host_bytes")
            work = replace(then, **{name: max(getattr(first, name), getattr(then, name)) for name in larger})
    return work


@contextmanager
def _offloading(model: nn.Module, offload: Offload, live: _LiveBytes) -> Iterator[Callable[[], tuple[int, int, int]]]:
    """A context in which the model's activations are offloaded. Its function tells the bytes that were copied out since
    the last call, those of the largest group, and the most that have waited in host memory. [Note: offload in a plan]

    Raises ConfigError for a pattern that matches nothing."""

    def allocate(nbytes: int, pinned: bool) -> Tensor:
        return live.elsewhere(lambda: torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    def moved() -> tuple[int, int, int]:
        left, lane.left = lane.left, Counter()
        return left.total(), max(left.values(), default=0), pool.status().peak_bytes

    lane = _AtOnce(next(model.parameters()).device)
    pool = HostPool(cap_bytes=offload.policy.host_cap_bytes, allocate=allocate)
    with ActivationOffload(model, offload.policy, offload_modules=offload.modules, lane=lane, pool=pool):
        yield moved


class _AtOnce(ThreadLane):
    """A lane that copies at once, in the caller, and counts what leaves by the module that saved it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, overlap=False)
        self.left: Counter[str] = Counter()

    def issue(
        self,
        direction: Direction,
        copy: Callable[[], object],
        *,
        after: Sequence[Event] | None = None,
        holds: Sequence[Tensor] = (),
        label: str = "",
        nbytes: int = 0,
    ) -> Event:
        if direction == "out":
            self.left[label] += nbytes
        return super().issue(direction, copy, after=after, holds=holds, label=label, nbytes=nbytes)


def _with_offload(work: Work, total: int, group: int, host: int) -> Work:
    """The work with offload. The plan's copies took no time; in a run a group leaves while the next one is computed."""
    return replace(
        work,
        forward_peak_bytes=work.forward_peak_bytes + group,
        backward_peak_bytes=work.backward_peak_bytes + group,
        offloaded_bytes=total,
        offloaded_host_bytes=host,
    )


def _micro_batch(model: nn.Module, loss: Loss, live: _LiveBytes) -> Work:
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as forward:
        result = loss(model)
    saved, forward_peak = live.now, live.take_peak()
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as backward:
        torch.autograd.backward(result)
    counts = (counter.get_flop_counts()["Global"] for counter in (forward, backward))
    on_cpu = [sum(of.get(operation, 0) for operation in _CPU_ATTENTION) for of in counts]
    return Work(
        forward_flops=forward.get_total_flops() - on_cpu[0],
        backward_flops=backward.get_total_flops() - on_cpu[1],
        cpu_attention_flops=sum(on_cpu),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        saved_bytes=saved,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=live.take_peak(),
    )


def _convert(model: nn.Module, layout: ModelLayout) -> None:
    """Convert every parameter to the dtype it is trained in; tied ones stay tied."""
    dtypes = {slot.name: unit.dtype for unit in layout.units for slot in unit.slots}
    made: dict[int, nn.Parameter] = {}
    names = {id(param): name for name, param in model.named_parameters()}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in made:
                data = torch.empty(param.shape, dtype=dtypes[names[id(param)]], device=param.device)
                made[id(param)] = nn.Parameter(data, requires_grad=param.requires_grad)
            module._parameters[key] = made[id(param)]


class _LiveBytes(MachineMode):
    """Counts the bytes of storages that operations create, for as long as something holds them."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """``known``: tensors that are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)
        self.now = 0
        self._peak = 0
        self._elsewhere = False

    def elsewhere(self, make: Callable[[], Tensor]) -> Tensor:
        """The result of ``make()``, which is not counted."""
        self._elsewhere = True
        made = make()
        self._elsewhere = False
        self._seen.add(made.untyped_storage())
        return made

    def take_peak(self) -> int:
        """The most bytes since the last call."""
        peak, self._peak = self._peak, self.now
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in () if self._elsewhere else tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = buffer_bytes(storage.nbytes()) if storage.nbytes() else 0
        self._add(size)
        weakref.finalize(storage, self._add, -size)

    def _add(self, size: int) -> None:
        self.now += size
        self._peak = max(self._peak, self.now)


@contextmanager
def leaving_gradients(model: nn.Module, layout: ModelLayout, *, gathers: bool) -> Iterator[None]:
    """Inside, gradients are taken off the parameters as the engine does it, all of a unit's together."""
    params = dict(model.named_parameters())
    with ExitStack() as hooks:
        for unit in layout.units:
            ours = [params[slot.name] for slot in unit.slots if params[slot.name].requires_grad]
            take = _taker(unit, ours, gathers)
            for param in ours:
                hook = param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
                hooks.callback(hook.remove)
        yield


def _taker(unit: UnitLayout, params: Sequence[Tensor], gathers: bool) -> Callable[[Tensor], None]:
    complete = set[int]()

    def take(param: Tensor) -> None:
        complete.add(id(param))
        if len(complete) == len(params):
            complete.clear()
            if gathers:
                torch.empty(unit.numel, dtype=unit.dtype, device=param.device)
            for one in params:
                one.grad = None

    return take
