"""Every private PyTorch call RayZero makes, in one place, with a self-test that names the torch version.

Nothing else but ``tensor_metadata`` and ``modes`` may import from ``torch._C`` or call a method with a leading
underscore on a tensor or storage. If a torch release changes one of these, :func:`self_test` says so before a model is
touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode

from rayzero.errors import UnsupportedError
from rayzero.modes import outside_modes
from rayzero.tensor_metadata import plain

AT_REST = 2  # use count of a storage held by its tensor and by one Python wrapper, and by nobody else

_F = TypeVar("_F", bound=Callable[..., Any])

_C: Any = torch._C
_autograd: Any = torch._C._autograd
_engine: Any = torch.autograd.Variable._execution_engine

PackHook = Callable[[Tensor], Any]
UnpackHook = Callable[[Any], Tensor]

# ---- storages ---------------------------------------------------------------------------------------------------


def storage_key(storage: torch.UntypedStorage) -> int:
    """The identity of a storage: equal for all tensors that share bytes, stable over :func:`swap_bytes`."""
    return cast(int, storage._cdata)


def storage_keys(tensors: Sequence[Tensor]) -> list[int]:
    """:func:`storage_key` of each tensor's storage; one call for all, because models have thousands of parameters."""
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def has_memory(tensor: Tensor) -> bool:
    """Whether a dense tensor has a storage whose bytes can be taken; one on the meta device counts. False for a tensor
    subclass that wraps other tensors (torchao's, DTensor)."""
    try:
        with plain():
            tensor.untyped_storage().data_ptr()
    except RuntimeError:  # "invalid python storage"
        return False
    return True


def is_averaged(model: torch.nn.Module) -> bool:
    """Whether the forward of a DistributedDataParallel is running that has ``model`` in it."""
    running: Any = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return running is not None and any(module is model for module in running.modules())


def is_proxied() -> bool:
    """Whether ``make_fx`` records what this thread computes."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY) is not None


is_tracing: Callable[[], bool] = _C._is_tracing
"""Whether torch.jit.trace runs."""

use_count: Callable[[int], int] = _C._storage_Use_Count
"""How many C++ owners the storage with this key has: :data:`AT_REST` when only its parameter holds it."""

tensor_use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
"""How many C++ owners a tensor has: its Python object, views of it, graphs that have saved it, its AccumulateGrad."""


def swap_bytes(mine: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange what two storages point to: pointer, length, owner and device. No byte is copied (0.2 us)."""
    mine._swap_data_ptr_(other)  # type: ignore[attr-defined]


def swap_all(mine: Sequence[torch.UntypedStorage], others: Sequence[torch.UntypedStorage]) -> None:
    """:func:`swap_bytes` for each pair; one call for all, because models have thousands of parameters."""
    for ours, theirs in zip(mine, others, strict=True):
        ours._swap_data_ptr_(theirs)  # type: ignore[attr-defined]


def owning_slice(flat: Tensor, start: int, numel: int) -> torch.UntypedStorage:
    """A separate storage over ``flat[start : start + numel]``; it keeps ``flat``'s memory alive.

    (``torch._C._construct_storage_from_data_pointer`` is 5 us faster but does not own: a view that outlives the
    engine would then read freed memory. Slices are made once per buffer, so the 5 us do not matter.)"""
    part = dlpack.from_dlpack(dlpack.to_dlpack(flat[start : start + numel]))  # type: ignore[attr-defined]
    return part.untyped_storage()


def empty_storage(device: torch.device) -> torch.UntypedStorage:
    """A storage of zero bytes."""
    return torch.empty(0, device=device, dtype=torch.uint8).untyped_storage()


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    """(the values of a sparse tensor, what makes the same tensor of values); None for a tensor without strides that is
    none."""
    with torch.no_grad():
        if tensor.layout is torch.sparse_coo:
            indices, size, coalesced = tensor._indices(), tensor.shape, tensor.is_coalesced()
            make: Any = functools.partial(
                torch.sparse_coo_tensor, check_invariants=False, is_coalesced=coalesced, device=tensor.device
            )
            return tensor._values(), lambda values: make(indices, values, size)
        by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        if not by_rows and tensor.layout not in (torch.sparse_csc, torch.sparse_bsc):
            return None
        sparse = tensor.detach()
        starts = sparse.crow_indices() if by_rows else sparse.ccol_indices()
        places = sparse.col_indices() if by_rows else sparse.row_indices()
        size, make = (
            sparse.shape,
            functools.partial(
                torch.sparse_compressed_tensor, layout=sparse.layout, check_invariants=False, device=sparse.device
            ),
        )
        return sparse.values(), lambda values: make(starts, places, values, size)


def lazy_sign(tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
    """What makes ``tensor`` of a view of its bytes, if it is their conjugate or negative; torch only notes that."""
    conjugate, negative = tensor.is_conj(), tensor.is_neg()
    if not conjugate and not negative:
        return None
    negated: Callable[[Tensor], Tensor] = torch._neg_view
    return (lambda view: negated(view.conj())) if conjugate and negative else Tensor.conj if conjugate else negated


swap_tensors: Callable[[Tensor, Tensor], None] = _C._swap_tensor_impl
"""Exchange the contents of two tensor objects (device, dtype, storage, gradient); each stays the same Python object,
with its class, its attributes and its dictionaries of hooks. (``torch.utils.swap_tensors`` exchanges those too, and
``param.data = `` takes no other kind of device.)"""


# ---- autograd ---------------------------------------------------------------------------------------------------

graph_task_id: Callable[[], int] = _C._current_graph_task_id
"""The id of this thread's running backward, or -1."""

will_execute: Callable[[Any], bool] = _C._will_engine_execute_node
"""Whether the running backward will reach an AccumulateGrad node. Only inside one of its hooks."""

at_end_of_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""Run a callback when the running backward has ended (not after an exception)."""


def saved_tensor_hooks_below() -> tuple[PackHook, UnpackHook] | None:
    """The saved-tensor hooks on top of the stack; None if there are none."""
    return cast("tuple[PackHook, UnpackHook] | None", _autograd._top_saved_tensors_default_hooks(False))


def is_checkpoints(pack: PackHook) -> bool:
    """Whether a pack hook belongs to the forward of a non-reentrant activation checkpoint."""
    return getattr(pack, "__qualname__", "").startswith("_checkpoint_hook.")


def is_recomputations(pack: PackHook) -> bool:
    """Whether a pack hook belongs to the recomputation of a non-reentrant activation checkpoint."""
    return getattr(pack, "__qualname__", "").startswith("_recomputation_hook.")


def awaited_holder(pack: PackHook) -> Any:
    """What the checkpoint's forward was given for the tensor that its recomputation saves next; None if nobody has it
    any more. ``pack``: a hook of :func:`is_recomputations`."""
    function: Any = getattr(pack, "_torchdynamo_orig_callable", pack)
    names = function.__code__.co_freevars
    held = {name: cell.cell_contents for name, cell in zip(names, function.__closure__, strict=True)}
    frame = held["target_frame_ref"]()
    at = frame.recomp_counter[held["gid"]]
    return frame.weak_holders[at]() if at < len(frame.weak_holders) else None


def saved_tensor_hooks_allowed() -> bool:
    """False inside torch.func transforms that cannot have saved-tensor hooks."""
    return bool(_autograd._saved_tensors_hooks_is_enabled())


def increment_versions(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that ``tensors`` were changed in place."""
    with plain():
        torch.autograd.graph.increment_version(tensors)


push_saved_tensor_hooks: Callable[[PackHook, UnpackHook], None] = _autograd._push_saved_tensors_default_hooks
pop_saved_tensor_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks

# ---- loss scaling -----------------------------------------------------------------------------------------------


@functools.cache
def route_unscaling() -> None:
    """Patch ``torch.amp.GradScaler`` to call ``unscale_gradients(factor)`` of optimizers that have it, where torch
    reads ``.grad`` of each parameter: it multiplies the gradients and returns whether they are finite. Other optimizers
    are treated as before.

    Torch has no hook for gradients that have left the parameters, perhaps all of them. (DTensor's stay on the
    parameters and handle the operation themselves.)"""
    scaler_class: Any = torch.amp.GradScaler
    by_torch = scaler_class._unscale_grads_

    @functools.wraps(by_torch)
    def unscale_grads(scaler: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        unscale_gradients = getattr(optimizer, "unscale_gradients", None)
        if unscale_gradients is None:
            return by_torch(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        if not unscale_gradients(float(inv_scale)):
            found_inf.fill_(1.0)
        return {found_inf.device: found_inf}

    scaler_class._unscale_grads_ = unscale_grads


class RestoresGroups(Protocol):
    """An optimizer that restores a checkpoint's parameter groups once more after a scheduler has loaded its state."""

    def shares(self, groups: object) -> bool:
        """Whether this very list of groups is its own, or of an optimizer that it was made of."""
        ...

    def restore_groups(self) -> None:
        """Restore them, if the run resumed and has not stepped yet."""
        ...


_restorers: WeakValueDictionary[int, RestoresGroups] = WeakValueDictionary()  # by id of the list of groups


def route_scheduler_loads(optimizer: RestoresGroups, given: torch.optim.Optimizer) -> None:
    """Patch LRScheduler classes: ``load_state_dict()`` of a scheduler over ``given``, or over a wrapper that shares its
    list of groups, ends with ``optimizer.restore_groups()``. Covers the classes that exist now. Torch has no hook for
    it."""
    _restorers[id(given.param_groups)] = optimizer
    classes: list[Any] = [torch.optim.lr_scheduler.LRScheduler]
    for kind in classes:
        classes += [sub for sub in kind.__subclasses__() if sub not in classes]
        load = vars(kind).get("load_state_dict")
        if load is not None and not hasattr(load, "_restores_groups"):
            kind.load_state_dict = _then_restore_groups(load)


def _then_restore_groups(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_state_dict(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(scheduler, *args, **kwargs)
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
        optimizer = _restorers.get(id(groups))
        if optimizer is not None and optimizer.shares(groups):
            optimizer.restore_groups()
        return result

    load_state_dict._restores_groups = True  # type: ignore[attr-defined]
    return load_state_dict


def inverse_scale(scale: Tensor) -> float:
    """One over a loss scale, rounded as GradScaler does."""
    return float(scale.double().reciprocal().float())


# ---- self-test --------------------------------------------------------------------------------------------------


def _swap_works() -> bool:
    flat = torch.arange(16, dtype=torch.float32, device="cpu")
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float32, device="cpu"))
    storage = param.untyped_storage()
    at_rest = use_count(storage_key(storage)) == AT_REST
    swap_bytes(storage, owning_slice(flat, 4, 4))
    view = param.detach()
    seen = use_count(storage_key(storage)) == AT_REST + 1
    with torch.enable_grad():
        graph = param * param
    uses = tensor_use_count(param)
    del graph
    seen &= uses == 4 and tensor_use_count(param) == 1  # saved twice, and its AccumulateGrad
    return at_rest and seen and view.tolist() == [4.0, 5.0, 6.0, 7.0] and param._version == 0


def _tensor_swap_works() -> bool:
    param, other = (
        torch.nn.Parameter(torch.empty(2, device="meta", dtype=torch.float32)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu")),
    )
    kept = param
    swap_tensors(param, other)
    return kept is param and param.tolist() == [1.0, 1.0] and other.is_meta and param.requires_grad


def _backward_hooks_work() -> bool:
    param, unused = (
        torch.nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu")),
        torch.nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu")),
    )
    nodes: list[Any] = [torch.autograd.graph.get_gradient_edge(p).node for p in (param, unused)]
    events: list[Any] = []

    def after(*_: Any) -> None:
        events.append((graph_task_id() >= 0, [will_execute(node) for node in nodes], param.grad is not None))
        at_end_of_backward(lambda: events.append("end"))

    handle = nodes[0].register_hook(after)
    (param * 2).sum().backward()  # type: ignore[no-untyped-call]
    handle.remove()
    return events == [(True, [True, False], True), "end"] and graph_task_id() == -1


def _saved_tensor_hooks_work() -> bool:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    below = saved_tensor_hooks_below()
    push_saved_tensor_hooks(pack, lambda tensor: tensor)
    top = saved_tensor_hooks_below()
    weight = torch.ones(2, requires_grad=True, dtype=torch.float32, device="cpu")
    product = weight * torch.ones(2, requires_grad=True, dtype=torch.float32, device="cpu")
    pop_saved_tensor_hooks()
    ours = any(storage_key(t.untyped_storage()) == storage_key(weight.untyped_storage()) for t in packed)
    with torch.no_grad():
        weight.add_(1)
    moved = any(t._version == 1 for t in packed)
    return ours and moved and top is not None and top != below and top[0] is pack and product.requires_grad


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that nothing is asked of: what its operations do would load the compiler."""


def _modes_are_left() -> bool:
    modes: Callable[[], int] = _C._len_torch_dispatch_stack
    with _Mode():  # type: ignore[no-untyped-call]
        return (modes(), outside_modes(modes)(), modes()) == (1, 0, 1)


def _checkpoint_is_known() -> bool:
    """Whether torch still names its checkpoint hooks as :func:`is_checkpoints` and :func:`is_recomputations` expect.
    Reads the code, because running a checkpoint imports the compiler."""
    makers: list[Any] = [torch.utils.checkpoint._checkpoint_hook, torch.utils.checkpoint._recomputation_hook]
    parts = [part for maker in makers for part in maker.__init__.__code__.co_consts]
    made = {getattr(part, "co_qualname", ""): getattr(part, "co_freevars", ()) for part in parts}
    ours, recomputations = (f"{maker.__qualname__}.__init__.<locals>.pack_hook" for maker in makers)
    return ours in made and {"target_frame_ref", "gid"} <= set(made.get(recomputations, ()))


class _Scaled(torch.optim.SGD):
    """An optimizer that unscales its own gradients, to observe what a GradScaler does."""

    _step_supports_amp_scaling = True

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))])
        self.seen: list[float] = []

    def unscale_gradients(self, factor: float) -> bool:
        self.seen.append(factor)
        return len(self.seen) != 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        scale = getattr(self, "grad_scale", None)
        self.seen.append(0.0 if scale is None else inverse_scale(scale))

    step.hooked = True  # type: ignore[attr-defined]  # torch puts no hooks around it, those for all optimizers included


def _grad_scaler_asks() -> bool:
    """Whether step() gets no scale after unscale_ and the scale without it, and an inf halves the scale."""
    route_unscaling()
    optimizer = _Scaled()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for unscales in (True, False):
        scaler.scale(torch.ones((), dtype=torch.float32, device="cpu"))
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return optimizer.seen == [0.125, 0.0, 1.0, 0.25] and scaler.get_scale() == 4.0


@functools.cache
def self_test() -> None:
    """Check that this torch behaves as the engine relies on; raises UnsupportedError naming what does not."""
    checks: dict[str, Callable[[], bool]] = {
        "storage swap and use count": _swap_works,
        "swap of tensors": _tensor_swap_works,
        "backward hooks": _backward_hooks_work,
        "saved-tensor hooks": _saved_tensor_hooks_work,
        "dispatch modes": _modes_are_left,
        "non-reentrant checkpoint": _checkpoint_is_known,
        "loss scaling": _grad_scaler_asks,
    }
    for name, check in checks.items():
        try:
            with torch.inference_mode(False), torch.enable_grad():
                works = check()
        except (AttributeError, TypeError, RuntimeError) as exc:
            raise UnsupportedError(
                f"torch {torch.__version__}: {name} failed ({exc}); use torch 2.13, which RayZero is tested with"
            ) from exc
        if not works:
            raise UnsupportedError(
                f"torch {torch.__version__}: {name} behaves differently; use torch 2.13, which RayZero is tested with"
            )
