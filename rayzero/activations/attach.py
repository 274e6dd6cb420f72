"""Makes groups of a model's modules by hooks, and has modules recomputed where the cost plan asks for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from rayzero.activations.group import Group, OffloadPolicy
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.modes import outside_modes


class OpenGroup(Protocol):
    """An open group."""

    group: Group | None  # None: offload does not apply

    def commit(self) -> None:
        """The group's forward is over."""
        ...


class Grouping(Protocol):
    """What the hooks report forwards to: an ``ActivationOffload``."""

    policy: OffloadPolicy

    def begin_chunk(self, stage: int) -> None:
        """A forward of part ``stage`` starts."""
        ...

    def end_chunk(self) -> None:
        """That forward has ended."""
        ...

    def open_group(self, name: str, label: str, signature: tuple[Sequence[int], ...] = ()) -> OpenGroup:
        """Tensors that are saved from now on belong to this group."""
        ...

    def planned_recompute(self, group: Group) -> bool:
        """Whether the plan has the group computed again in backward."""
        ...


def match_modules(
    models: Sequence[nn.Module], patterns: Sequence[str] | Mapping[str, str], setting: str = "offload_modules"
) -> list[tuple[str, str, nn.Module]]:
    """(group name, full module name, module) of every match. Each module comes once: the first pattern wins.

    In a list of patterns, each pattern is its group's name too. Raises ConfigError that names ``setting`` if a pattern
    matches nothing, and UnsupportedError if a match is inside a compiled module, because torch.compile() would trace
    its hooks."""
    named = dict(patterns) if isinstance(patterns, Mapping) else {pattern: pattern for pattern in patterns}
    found: dict[int, tuple[str, str, nn.Module]] = {}
    for name, pattern in named.items():
        matches = [(full, module) for model in models for full, module in model.named_modules()]
        matches = [(full, module) for full, module in matches if fnmatchcase(full, pattern)]
        if not matches:
            names = ", ".join(type(model).__name__ for model in models)
            raise ConfigError(f"{setting}: {pattern!r} matches no submodule of {names}")
        for full, module in matches:
            found.setdefault(id(module), (name, full, module))
    compiled = [module for model in models for module in model.modules() if _is_compiled(module)]
    inside = {id(inner) for outer in compiled for inner in outer.modules() if inner is not outer}
    for name, full, module in found.values():
        if id(module) in inside:
            raise UnsupportedError(
                f"{setting}: {named[name]!r} matches {full!r}, which is inside a module that torch.compile() made; "
                "give a pattern that matches only that module as a whole, or compile with module.compile()"
            )
    return list(found.values())


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` returned this module. Does not load the compiler."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


class _Hook:
    """A module hook. Copied or pickled with its model, it becomes a hook that does nothing: the copy has no offload."""

    def __init__(self, act: Callable[..., None] | None) -> None:
        self._act = act

    @outside_modes
    def __call__(self, *args: Any) -> None:
        if self._act is not None:
            self._act(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return (_Hook, (None,))


class Attachment:
    """The hooks of one ``ActivationOffload`` on its models.

    Knows modules; not what happens to tensors. A chunk opens before the groups of the same module and closes after
    them."""

    def __init__(
        self, offload: Grouping, models: Sequence[nn.Module], patterns: Sequence[str] | Mapping[str, str]
    ) -> None:
        self._offload = offload
        self._handles: list[RemovableHandle] = []
        self._open: list[tuple[nn.Module, OpenGroup]] = []
        matched = match_modules(models, patterns)
        for stage, model in enumerate(models):
            self._handles.append(model.register_forward_pre_hook(_Hook(partial(self._open_chunk, stage))))
        for name, full, module in matched:
            self._attach(name, full, module)
        for model in models:
            self._handles.append(model.register_forward_hook(_Hook(self._close_chunk), always_call=True))

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _open_chunk(self, stage: int, module: nn.Module, args: Any) -> None:
        self._offload.begin_chunk(stage)

    def _close_chunk(self, module: nn.Module, args: Any, output: Any) -> None:
        self._offload.end_chunk()

    def _attach(self, name: str, full: str, module: nn.Module) -> None:
        opener = _Hook(partial(self._open_group, name, full))
        self._handles.append(module.register_forward_pre_hook(opener, with_kwargs=True))
        self._handles.append(module.register_forward_hook(_Hook(self._close_group), always_call=True))

    def _open_group(self, name: str, full: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        scope = self._offload.open_group(name, full, tuple(tuple(tensor.shape) for tensor in tensors))
        self._open.append((module, scope))
        if scope.group is not None and self._offload.policy.device_budget_bytes is not None:
            scope.group.input_bytes = sum(t.numel() * t.element_size() for t in tensors)
            if self._offload.planned_recompute(scope.group):
                scope.group.recomputed = True
                module.__dict__["forward"] = partial(checkpoint, module.forward, use_reentrant=False)

    def _close_group(self, module: nn.Module, args: Any, output: Any) -> None:
        if not any(owner is module for owner, _ in self._open):
            return
        while self._open:
            owner, scope = self._open.pop()
            if scope.group is not None and scope.group.recomputed:
                _restore_forward(owner)
            scope.commit()
            if owner is module:
                return


def _restore_forward(module: nn.Module) -> None:
    """Undo what recomputes a module, and put back a ``forward`` that the user had set on the instance."""
    wrapped = module.__dict__.pop("forward")
    original = wrapped.args[0]
    if getattr(original, "__func__", None) is not type(module).forward:
        module.__dict__["forward"] = original
