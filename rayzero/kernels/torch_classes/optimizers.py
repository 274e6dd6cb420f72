"""Several optimizers over one model as one: an entry of each parameter group says which class updates it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rayzero.errors import ConfigError, UnsupportedError
from rayzero.kernels.torch_classes.optimizer_class import OptimizerMaker, options_of, plain_value, step_alone
from rayzero.protocol.hyper import resolve_optimizer
from rayzero.protocol.messages import CLASS, Hyper


class Optimizers(torch.optim.Optimizer):
    """Steps every group with an optimizer of its class.

    Knows which groups are of which optimizer, and shares groups and states with it; not what an optimizer computes."""

    def __init__(self, params: Iterable[Hyper], attributes: Mapping[str, Hyper] | None = None) -> None:
        """Make the optimizers, too, one of each class. ``attributes``: of each class's instance, by its import path
        (``OptimizerMaker.attributes``)."""
        super().__init__(list(params), {})
        self.attributes = dict(attributes or {})
        self.parts = [self._make(path) for path in dict.fromkeys(group[CLASS] for group in self.param_groups)]

    @classmethod
    def of(cls, given: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> Optimizers:
        """Those that a user made, as one. ``names``: of Parameters, by id, for messages.

        If they are of different classes, each group gets the entry that says which. Raises ConfigError if there are
        none, UnsupportedError if two have a parameter in common or one has hooks."""
        if not given:
            raise ConfigError("a list of optimizers was empty; pass a torch.optim.Optimizer, or a list of them")
        _refuse_shared(given, names)
        if hooked := next((part for part in given if any(getattr(part, name) for name in HOOKS)), None):
            raise UnsupportedError(
                f"{type(hooked).__name__}, one of several optimizers, has hooks, but there is one step for all: "
                "register them on the optimizer that rayzero.prepare() returns"
            )
        one = cls.__new__(cls)
        one.attributes, one.parts = {}, list(given)
        for part in given if one.kind is cls else ():
            for group in part.param_groups:
                group[CLASS] = path_of(type(part))
        known = set.intersection(*(set(part.defaults) for part in given))  # a scheduler asks for what all have
        defaults = {name: value for name, value in given[0].defaults.items() if name in known}
        torch.optim.Optimizer.__init__(one, [group for part in given for group in part.param_groups], defaults)
        return one

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        """The class that owners run: that of all parts, or this one."""
        kinds = {type(part) for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else type(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of each class, without hooks."""
        for path, part in {path_of(type(part)): part for part in self.parts}.items():
            part.state = self.state
            part.param_groups = self._groups(path)
            step_alone(part)

    def _groups(self, path: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group.get(CLASS, path) == path]

    def _make(self, path: str) -> torch.optim.Optimizer:
        groups = self._groups(path)
        hyper = [{name: plain_value(value, name) for name, value in options_of(group).items()} for group in groups]
        make = OptimizerMaker(resolve_optimizer(path), self.attributes.get(path, {}))
        made = make.build(list(map(own_options, hyper)), [group["params"] for group in groups])
        for group, own in zip(groups, made.param_groups, strict=True):
            group.update(options_of(own))  # with what the constructor has added
        self.state.update(made.state)
        return made


HOOKS = tuple(
    f"_optimizer_{kind}_{when}_hooks" for kind in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that a user made: the parts of several, or the optimizer itself."""
    return optimizer.parts if isinstance(optimizer, Optimizers) else [optimizer]


def own_options(options: Hyper) -> Hyper:
    """A group's options without the class's name, as the class itself has them."""
    return {name: value for name, value in options.items() if name != CLASS}


def maker_of_group(make: OptimizerMaker, options: Hyper) -> OptimizerMaker:
    """The maker of the class that updates a group with these options."""
    if make.cls is not Optimizers:
        return make
    path = options[CLASS]
    return OptimizerMaker(resolve_optimizer(path), make.attributes["attributes"].get(path, {}))


def maker_of_several(makers: Sequence[OptimizerMaker]) -> OptimizerMaker:
    """What makes instances that compute what several optimizers would. ``makers``: of each of them.

    Raises UnsupportedError if two of one class differ in their attributes: groups know their class, not their
    optimizer."""
    by_path: dict[str, OptimizerMaker] = {}
    for make in makers:
        if by_path.setdefault(path_of(make.cls), make) != make:
            raise UnsupportedError(
                f"two optimizers of the class {make.name} have different attributes, and only groups of one differ; "
                "make a subclass for one of them"
            )
    if len(by_path) == 1:
        return makers[0]
    return OptimizerMaker(Optimizers, {"attributes": {path: make.attributes for path, make in by_path.items()}})


def path_of(cls: type[torch.optim.Optimizer]) -> str:
    """The import path of a class, as ``resolve_optimizer`` takes it."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _refuse_shared(given: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    seen: dict[int, int] = {}
    for at, part in enumerate(given):
        for param in (param for group in part.param_groups for param in group["params"]):
            if seen.setdefault(id(param), at) != at:
                raise UnsupportedError(
                    f"{names.get(id(param), 'a parameter')!r} is in two of the optimizers, "
                    f"{type(given[seen[id(param)]]).__name__} (number {seen[id(param)]}) and {type(part).__name__} "
                    f"(number {at}); give each parameter to one of them"
                )
