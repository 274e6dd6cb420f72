"""RayZero's own work on the thread that computes leaves the modes and the graphs of torch.compile that the user has.

[Note: modes] A ``TorchDispatchMode`` or ``TorchFunctionMode`` sees every operation of its thread, and may count it,
refuse it or give another result: torch's selective checkpointing counts operations and hands the n-th of a kind the
result that it kept of the forward's n-th. Hooks run in the same thread, in the middle of a forward or a backward. What
they do for themselves is no operation of the user's model, so they leave all modes and return to them. Code of the
user's that runs in between (hooks below ours, a function that was given) is called after that return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_C: Any = torch._C
_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = _C._len_torch_function_stack

NO_CAPTURE = (
    "a prepared model cannot be captured whole (torch.export, torch.jit, make_fx, fullgraph=True), because its "
    "parameters come and go in hooks outside of graphs: build the model anew, load rayzero.full_state_dict(model) into "
    "it, and capture that one"
)


class MachineMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that stands for the machine (its streams, its memory): RayZero's work stays inside of it."""


def outside_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: the function runs outside of the user's dispatch and function modes. [Note: modes]"""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if _dispatch_modes() or _function_modes():
            with _left():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


@contextmanager
def _left() -> Iterator[None]:
    """A context without the user's modes. Torch's own (fake tensors, tracing) stay: they lie below those."""
    functions = [_C._pop_torch_function_stack() for _ in range(_function_modes())]
    dispatched: list[Any] = []
    while (count := _dispatch_modes()) and not _is_torchs(_C._get_dispatch_stack_at(count - 1)):
        dispatched.append(_C._pop_torch_dispatch_stack(None))
    kept = [mode for mode in dispatched if isinstance(mode, MachineMode)]
    for mode in reversed(kept):
        _C._push_on_torch_dispatch_stack(mode)
    try:
        yield
    finally:
        for _ in kept:
            _C._pop_torch_dispatch_stack(None)
        for mode in reversed(dispatched):
            _C._push_on_torch_dispatch_stack(mode)
        for mode in reversed(functions):
            _C._push_on_torch_function_stack(mode)


def _is_torchs(mode: Any) -> bool:
    return getattr(mode, "_mode_key", None) is not None


# ---- torch.compile ----------------------------------------------------------------------------------------------


def outside_graphs(function: F) -> F:
    """Decorator: torch.compile breaks the graph at the function, and compiles neither it nor what it calls.

    torch's own decorator imports the compiler at the first call, which takes seconds. This one marks the function as
    that would, without it: a function that decides at its first call is traced by a compiler that was imported
    since."""
    frames = _C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, NO_CAPTURE
    return function


def load_compiler_only_to_compile() -> None:
    """Make this process import torch.compile's compiler only when it compiles, not when it creates an optimizer or
    checkpoints activations, which cost every rank 2 s of processor time. Idempotent.

    Functions that torch's decorator has wrapped are kept out of graphs as :func:`outside_graphs` does."""
    methods = [vars(torch.optim.Optimizer)[name] for name in _OPTIMIZER_METHODS]
    for wrapped in (*methods, checkpoint):
        function: Any = wrapped.__wrapped__
        function.__dynamo_disable = outside_graphs(function)  # where torch's decorator caches its result


_OPTIMIZER_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
