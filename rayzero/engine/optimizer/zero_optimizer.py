"""The optimizer that a training loop holds: a real ``torch.optim.Optimizer`` whose updates the owners compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from rayzero.engine.engine import Engine
from rayzero.engine.optimizer.param_groups import ResumedGroups, attribute_values, hyper_of, late_attribute
from rayzero.engine.optimizer.states import (
    check_group,
    check_states,
    read_states,
    refuse_new_states,
    switched,
    write_states,
)
from rayzero.engine.private_torch import inverse_scale, route_scheduler_loads, route_unscaling
from rayzero.engine.rank_step import RankStep
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.kernels.optimizer_class import (
    HOOKS,
    GroupEntries,
    OptimizerMaker,
    Optimizers,
    State,
    parts_of,
    path_of,
)
from rayzero.kernels.optimizer_states import StateForms
from rayzero.modes import outside_graphs
from rayzero.protocol.messages import CLASS, Decision, Hyper, classes_of

_SCHEDULED = {"lr", "momentum", "betas"}  # options that torch's schedulers write


class OwnedStates(dict[Any, Any]):
    """Empty, as in torch before the first step; from then on every use is refused, and a change is at any time.

    A loop that resets, prunes or reads states here would otherwise do so to none."""

    def __init__(self, step: RankStep) -> None:
        """``step``: the open one; behind the first, a plain optimizer has states."""
        super().__init__()
        self._step = step

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            "optimizer.state is empty, because the optimizer owners keep the states: read them with "
            "optimizer.state_dict(), and change them with optimizer.load_state_dict(), in which a parameter without "
            "an entry in 'state' starts anew"
        )

    __getitem__ = __setitem__ = __delitem__ = __ior__ = refuse
    clear = pop = popitem = setdefault = update = __reduce_ex__ = refuse


def _until_stepped(name: str) -> Any:
    def read(self: OwnedStates, *given: Any) -> Any:
        if self._step.step > 0:
            self.refuse()
        return getattr(dict, name)(self, *given)

    return read


for _name in ("__contains__", "__iter__", "__len__", "get", "items", "keys", "values"):
    setattr(OwnedStates, _name, _until_stepped(_name))


class ZeroOptimizer(torch.optim.Optimizer):
    """Takes the place of the user's optimizer and shares its parameter groups, for loops and LR schedulers.

    Knows parameter groups; not parameters' values, gradients or moments, which the owners have."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        make: OptimizerMaker,
        *,
        writes_groups: bool = False,
        resumed: ResumedGroups | None = None,
    ) -> None:
        """``optimizer``: a torch optimizer that has not stepped yet; this one shares its groups and its hooks, and it
        can no longer step, nor can its parts, if it is several. ``make``: what makes the owners' instances.
        ``writes_groups``: ``step()`` of the class writes entries of its groups. ``resumed``: the groups of the
        checkpoint that the run resumes from."""
        self.engine = engine
        self.make, self._writes_groups = make, writes_groups
        self._entries: GroupEntries | None = None
        self._resumed: ResumedGroups | None = None
        self._owned = OwnedStates(engine.step_state)
        self._read: dict[Any, State] | None = None  # the owners' states, while state_dict() reads them
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self._plain, self._parts = optimizer, parts_of(optimizer)
        self._part_of = [at for at, part in enumerate(self._parts) for _ in part.param_groups]  # of each group
        route_unscaling()
        self._members = list(map(_members, self.param_groups))
        self._prepared = self.hyper()
        self._kept_as = list(self._prepared)  # the options with which owners made room for each group's states
        self._told = list(self._prepared)  # each group's options at the last step
        for plain in self._given():
            for hooks in HOOKS:  # the same dicts, so that those registered on either one run, and can be removed
                setattr(plain if plain is not optimizer else self, hooks, getattr(optimizer, hooks))
            plain.step = _refusing(plain, "step", "update the parameters")  # type: ignore[method-assign]
            plain.load_state_dict = _refusing(plain, "load_state_dict", "keep the states")  # type: ignore[method-assign]
            plain.zero_grad = partial(self._zero_grad_of, plain)  # type: ignore[method-assign]
            plain.state = self._owned  # type: ignore[assignment]
        if isinstance(optimizer, Optimizers):
            for at, part in enumerate(self._parts):
                part.state_dict = partial(self._state_dict_of, at)  # type: ignore[method-assign]
                part.load_state_dict = partial(self._load_into, at)  # type: ignore[method-assign]
                part.add_param_group = partial(self._add_to, at)  # type: ignore[method-assign]
        self._share_groups()
        self._attributes = [attribute_values(part) for part in self._parts]
        self._resumed = resumed
        if resumed is not None:
            resumed.restore(self.param_groups)
            resumed.tell_kept(self.param_groups)
            for plain in self._given():
                route_scheduler_loads(self, plain)

    def _given(self) -> list[torch.optim.Optimizer]:
        """The optimizer that prepare() was given, and its parts, if it is several."""
        return [self._plain, *(part for part in self._parts if part is not self._plain)]

    def _share_groups(self) -> None:
        """Share the groups, because schedulers made on a plain optimizer read them there, later ones included."""
        for at, part in enumerate(self._parts if isinstance(self._plain, Optimizers) else ()):
            of = zip(self.param_groups, self._part_of, strict=True)
            part.param_groups[:] = [group for group, whose in of if whose == at]
        self._plain.param_groups = self.param_groups

    def shares(self, groups: object) -> bool:
        """Whether this very list of groups is ours, or that of an optimizer that prepare() was given."""
        return any(groups is plain.param_groups for plain in self._given())

    def restore_groups(self) -> None:
        """Restore what creating a scheduler overwrote in a resumed run's parameter groups, until the first step ([Note:
        schedulers on resume]): rates, momenta, and entries that are no options of the optimizer. Other options stay as
        ``prepare()`` or the loop left them."""
        if self._resumed is not None:
            entries = {key for group in self.param_groups for key in group}
            others = entries.difference(*(part.defaults for part in self._parts))
            self._resumed.restore(self.param_groups, only=others | _SCHEDULED)

    @property
    def classes(self) -> str:
        """As ``ModelSpec.classes``."""
        return classes_of(self.param_groups, path_of(self.make.cls))

    def hyper(self) -> tuple[Hyper, ...]:
        """Each parameter group's options now, as owners get them."""
        return hyper_of(self, self.make.cls)

    @property
    def state(self) -> Any:
        """As torch's, but empty. See ``OwnedStates``."""
        return self._owned if self._read is None else self._read

    @state.setter
    def state(self, value: Any) -> None:
        if hasattr(self, "_members"):  # else it is torch's constructor
            self._owned.refuse()

    def __setattr__(self, name: str, value: Any) -> None:
        if "_attributes" in vars(self) and name not in vars(self) and not hasattr(type(self), name):
            for part, kept in zip(self._parts, self._attributes, strict=True):
                if hasattr(type(part), name) or any(path.partition(".")[0] == name for path in kept):
                    raise UnsupportedError(_late(name, type(part).__name__))
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        classes = " and ".join(dict.fromkeys(type(part).__name__ for part in self._parts))
        return f"ZeroOptimizer of {classes} at step {self.engine.step_state.step}"

    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the owners apply the step; returns once the finish is sent (``overlap="forward"``; see ``ZeroConfig``).

        closure: called once, before the step; its result is returned. (Optimizers that call it several times are not
            element-wise and are refused at prepare.) Raises the error of a push, or of the last step, that failed.
            Under ``nonfinite="raise"`` it waits for the norm; if that is not finite, it raises NonFiniteGradientError
            and commits nothing."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_other_groups()
        if self._resumed is not None:
            self._resumed.require_all(self.param_groups)
            self._resumed = None
        scale = getattr(self, "grad_scale", None)  # set by a GradScaler that steps without having unscaled
        if scale is not None:
            self.engine.unscale(inverse_scale(scale))
        for part, kept in zip(self._parts, self._attributes, strict=True):
            if changed := late_attribute(kept, part):
                raise UnsupportedError(_late(changed, type(part).__name__))
        hyper = self.hyper()
        for at, (told, now) in enumerate(zip(self._told, hyper, strict=True)):
            if switched(told, now):
                refuse_new_states(self.make, at, self._kept_as[at], now)
        self._told = list(hyper)
        self.engine.step(hyper)
        if self._writes_groups and not float(getattr(self, "found_inf", 0.0)):  # set by a GradScaler
            self._write_groups()
        for plain in self._given():
            plain._opt_called = True  # type: ignore[attr-defined]  # a scheduler made over it looks there
        return loss

    def _write_groups(self) -> None:
        """Write into the groups what the class's own ``step()`` would."""
        if self._entries is None or self._entries.num_groups != len(self.param_groups):
            self._entries = GroupEntries(self.make, self.hyper())
        self._entries.step(self.param_groups)

    @outside_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this step. After clip_grad_norm_ either every rank does so or none.

        set_to_none: False: as in torch, a parameter that had a gradient has a zero one until it gets another, so its
            moments and weights still decay."""
        self.engine.discard(set_to_none=set_to_none)

    def _zero_grad_of(self, plain: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """``zero_grad()`` of an optimizer that was given. See ``Engine.zero_grad``."""
        params = [param for group in plain.param_groups for param in group["params"]]
        self.engine.zero_grad(params, set_to_none=set_to_none)

    @outside_graphs
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the step's global gradient norm to ``max_norm``; call it after the last backward of the step.

        Returns the norm, before this clip, of the gradients averaged over ranks: a 0-dim fp32 CPU tensor. Waits for all
        ranks. Acts on the result of earlier calls of this, ``clip_grad_value_`` and ``scaler.unscale_``. Under
        ``nonfinite="raise"`` an inf or NaN norm raises NonFiniteGradientError; under ``"skip"`` it is returned, and the
        step changes nothing."""
        norm = self.engine.clip_norm(_checked("max_norm", max_norm))
        return torch.tensor(norm, dtype=torch.float32, device=self.engine.device)

    @outside_graphs
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of the step's averaged gradients to [-``clip_value``, ``clip_value``], as
        ``torch.nn.utils.clip_grad_value_`` does; call it after the last backward of the step.

        Does not wait. It takes effect in order with calls of ``clip_grad_norm_``; one of those after it costs another
        pass over the gradients. An inf is not clamped: the step is skipped."""
        self.engine.clip_value(_checked("clip_value", clip_value))

    # ---- torch.amp.GradScaler

    # A step that a scaler skips is a step like any other: one decision and one version, the same on all ranks.
    _step_supports_amp_scaling = True

    def unscale_gradients(self, factor: float) -> bool:
        """Multiply the step's gradients by ``factor``, 1 / loss scale; ``scaler.unscale_(optimizer)`` calls it.

        Waits for all ranks; returns whether their gradients are finite."""
        return self.engine.unscale(factor)

    def last_decision(self) -> Future[Decision]:
        """The decision of the last step(): norm, scale, apply or skip. Done when every rank has finished that step."""
        return self.engine.step_state.decision()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, for parameters of the model that require grad and are in no group yet. Every rank adds the same
        group. Among several optimizers of different classes, the group's entry "optimizer" says which is to have it, or
        that one's ``add_param_group`` is called. Raises UnsupportedError for other parameters, and for options that
        need states which no group at prepare had."""
        if not hasattr(self, "_members"):  # during prepare()
            super().add_param_group(param_group)
            return
        at = self._part_for(param_group)
        super().add_param_group(self._parts[at].defaults | param_group)
        try:
            group = self.param_groups[-1]
            added = self.hyper()[-1]
            like = check_group(self.make, self._prepared, added, group, self.engine)
            self.engine.train(group["params"], len(self.param_groups) - 1, like)
        except BaseException:
            self.param_groups.pop()
            raise
        self._kept_as.append(self._prepared[like])
        self._told.append(added)
        self._part_of.append(at)
        self._members.append(_members(self.param_groups[-1]))
        self._share_groups()
        if self._resumed is not None:
            self._resumed.restore(self.param_groups[-1:])

    def _refuse_other_groups(self) -> None:
        """Raise UnsupportedError unless the groups train the parameters that the owners train in them."""
        if len(self.param_groups) != len(self._members):
            raise UnsupportedError(
                f"the optimizer has {len(self.param_groups)} parameter groups, but rayzero.prepare() and "
                f"add_param_group() were given {len(self._members)}; add groups with add_param_group()"
            )
        for index, (group, members) in enumerate(zip(self.param_groups, self._members, strict=True)):
            if _members(group) != members:
                what = f"another {CLASS!r}" if _ids(group) == members[0] else "other parameters"
                raise UnsupportedError(
                    f"group {index} of the optimizer has {what} than rayzero.prepare() and "
                    "add_param_group() were given, but the owners train those; to train fewer, set their "
                    "requires_grad to False, and divide parameters among groups before prepare()"
                )

    @outside_graphs
    def state_dict(self) -> dict[str, Any]:
        """The state in torch's format, which a plain optimizer of the same class can load too: complete fp32 CPU
        tensors in the parameters' shapes.

        Any rank may call it alone: it reads from the owners, unit by unit, and waits for the last step's update."""
        self._read = dict(read_states(self.engine, self.forms()))
        try:
            return super().state_dict()
        finally:
            self._read = None

    @outside_graphs
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` of this class, or of a plain torch optimizer of the same class, returned. Every
        rank calls it with equal values.

        Before anything is changed, raises ConfigError if a parameter's state has other names or shapes,
        UnsupportedError if the parameter was frozen at prepare, and torch's own errors."""
        states: dict[int, State] = {}

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            given = self._with_classes(given)
            states.update(self._by_param(given))
            check_states(self.engine, self.forms(), states)
            return {**given, "state": {}}

        def give(_: torch.optim.Optimizer) -> None:
            write_states(self.engine, self.forms(), states)

        hooks = [
            self.register_load_state_dict_pre_hook(take),  # after the user's hooks, which may change what is loaded
            self.register_load_state_dict_post_hook(give, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()
        self._share_groups()  # torch has made new ones
        self._resumed = None

    # ---- several optimizers

    def _part_for(self, group: Mapping[str, Any]) -> int:
        """Which of the optimizers a new group is for."""
        paths = [path_of(type(part)) for part in self._parts]
        if len(set(paths)) > 1 and group.get(CLASS) not in paths:
            raise ConfigError(
                f"a group added to several optimizers has {group.get(CLASS)!r} as {CLASS!r}; give it one of "
                f"{', '.join(dict.fromkeys(paths))}, or call add_param_group() of the optimizer that is to have it"
            )
        return paths.index(group[CLASS]) if group.get(CLASS) in paths else 0

    def _add_to(self, at: int, param_group: dict[str, Any]) -> None:
        self.add_param_group(param_group | {CLASS: path_of(type(self._parts[at]))})

    def _with_classes(self, given: dict[str, Any]) -> dict[str, Any]:
        """A state dict whose groups say what class they are of, as ours do."""
        groups = []
        for index, (theirs, ours) in enumerate(zip(given["param_groups"], self.param_groups, strict=False)):
            if theirs.get(CLASS, ours.get(CLASS)) != ours.get(CLASS):
                raise ConfigError(
                    f"group {index} of the optimizer state is of {theirs[CLASS]}, but the optimizer's is of "
                    f"{ours.get(CLASS, path_of(self.make.cls))}; load a state of the same classes in the same order"
                )
            groups.append(theirs | ({CLASS: ours[CLASS]} if CLASS in ours else {}))
        return {**given, "param_groups": [*groups, *given["param_groups"][len(groups) :]]}

    def _state_dict_of(self, at: int) -> dict[str, Any]:
        """``state_dict()`` of one of the optimizers, which a plain one of its class can load."""
        part = self._parts[at]
        members = frozenset().union(*map(_ids, part.param_groups))
        states = dict(read_states(self.engine, self.forms()))
        part.state = {param: state for param, state in states.items() if id(param) in members}  # type: ignore[assignment]
        try:
            return dict(type(part).state_dict(part))
        finally:
            part.state = self._owned  # type: ignore[assignment]

    def _load_into(self, at: int, state_dict: dict[str, Any]) -> None:
        """``load_state_dict()`` of one of the optimizers: what the others have, all of them load again."""
        whole, mine = self.state_dict(), [index for index, of in enumerate(self._part_of) if of == at]
        ours, theirs = [whole["param_groups"][index] for index in mine], state_dict["param_groups"]
        if [len(group["params"]) for group in ours] != [len(group["params"]) for group in theirs]:
            raise ValueError("loaded state dict has other parameter groups than the optimizer")  # as torch does
        for index, group, loaded in zip(mine, ours, theirs, strict=True):
            for key, given in zip(group["params"], loaded["params"], strict=True):
                whole["state"].pop(key, None)
                if given in state_dict["state"]:
                    whole["state"][key] = state_dict["state"][given]
            whole["param_groups"][index] = {**loaded, "params": group["params"]}
        self.load_state_dict(whole)

    def forms(self) -> list[StateForms]:
        """What its class keeps for each group. A state stays when the option that made it is switched off."""
        return [StateForms(self.make, options) for options in self._kept_as]

    def _by_param(self, given: Mapping[str, Any]) -> dict[int, State]:
        """The states in a state dict, by id of our Parameter. Torch refuses groups of other sizes later."""
        theirs = [key for group in given["param_groups"] for key in group["params"]]
        ours = [id(param) for group in self.param_groups for param in group["params"]]
        of_key = dict(zip(theirs, ours, strict=False))
        return {
            of_key[key]: {name: value for name, value in state.items() if value is not None}
            for key, state in given["state"].items()
            if key in of_key
        }


def _refusing(plain: torch.optim.Optimizer, method: str, why: str) -> Any:
    """A method that raises, for an optimizer whose parameters have gone to the owners."""
    refuse: Any = partial(_refuse, type(plain).__name__, method, why)
    refuse._wrapped_by_lr_sched = True  # torch marks a step() whose calls a scheduler counts; ours counts them
    return refuse


def _refuse(kind: str, method: str, why: str, *_: Any, **__: Any) -> None:
    raise UnsupportedError(
        f"{method}() was called on the {kind} that was given to rayzero.prepare(), where it would change nothing, "
        f"because the optimizer owners {why}; call {method}() of the optimizer that prepare() returned"
    )


def _ids(group: Mapping[str, Any]) -> frozenset[int]:
    """The ids of a group's parameters."""
    return frozenset(map(id, group["params"]))


def _members(group: Mapping[str, Any]) -> tuple[frozenset[int], Any]:
    """What a group trains, and by which class of several."""
    return _ids(group), group.get(CLASS)


def _late(name: str, kind: str) -> str:
    return f"{name!r} of the {kind} was set after rayzero.prepare(), when owners had made theirs; set it before"


def _checked(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{name} must be a number >= 0, got {value!r}")
    return float(value)
