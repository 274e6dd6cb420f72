"""The optimizer that a training loop holds: a real ``torch.optim.Optimizer`` whose updates the owners compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from rayzero.engine.engine import Engine
from rayzero.engine.optimizer.given import HOOKS, attribute_values, late_attribute
from rayzero.engine.optimizer.param_groups import ResumedGroups, hyper_of
from rayzero.engine.optimizer.states import (
    StateFormat,
    check_group,
    check_states,
    read_states,
    write_states,
)
from rayzero.engine.private_torch import inverse_scale, route_scheduler_loads, route_unscaling
from rayzero.engine.rank_step import RankStep
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.kernels.group_entries import GroupEntries
from rayzero.kernels.optimizer_class import OptimizerMaker, State
from rayzero.protocol.messages import Decision, Hyper

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
    clear = pop = popitem = setdefault = update = refuse


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
        can no longer step. ``make``: what makes the owners' instances. ``writes_groups``: ``step()`` of the class
        writes entries of its groups. ``resumed``: the groups of the checkpoint that the run resumes from."""
        self.engine = engine
        self.make, self._writes_groups = make, writes_groups
        self._entries: GroupEntries | None = None
        self._resumed: ResumedGroups | None = None
        self._owned = OwnedStates(engine.step_state)
        self._read: dict[Any, State] | None = None  # the owners' states, while state_dict() reads them
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        for hooks in HOOKS:  # the same dicts, so that those registered on either one run, and can be removed
            setattr(self, hooks, getattr(optimizer, hooks))
        route_unscaling()
        self._members = list(map(_members, self.param_groups))
        self._plain = optimizer
        self._plain.step = _refusing(optimizer)  # type: ignore[method-assign]
        self._plain.load_state_dict = partial(_refuse_plain_load, type(optimizer).__name__)  # type: ignore[method-assign]
        self._plain.state = self._owned  # type: ignore[assignment]
        self._share_groups()
        self._attributes = attribute_values(optimizer)
        self._resumed = resumed
        if resumed is not None:
            resumed.restore(self.param_groups)
            resumed.tell_kept(self.param_groups)
            route_scheduler_loads(self)

    def _share_groups(self) -> None:
        """Share the list of groups, because schedulers made on the plain optimizer read them there, later ones
        included."""
        self._plain.param_groups = self.param_groups

    def restore_groups(self) -> None:
        """Restore what creating a scheduler overwrote in a resumed run's parameter groups, until the first step ([Note:
        schedulers on resume]): rates, momenta, and entries that are no options of the optimizer. Other options stay as
        ``prepare()`` or the loop left them."""
        if self._resumed is not None:
            options = {key for group in self.param_groups for key in group} - set(self.defaults)
            self._resumed.restore(self.param_groups, only=options | _SCHEDULED)

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        return self.make.cls

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
            kept = any(path.partition(".")[0] == name for path in self._attributes)
            if kept or hasattr(self.make.cls, name):
                raise UnsupportedError(_late(name, self.make.cls.__name__))
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"ZeroOptimizer of {self.optimizer_class.__name__} at step {self.engine.step_state.step}"

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
        if changed := late_attribute(self._attributes, self._plain):
            raise UnsupportedError(_late(changed, self.make.cls.__name__))
        self.engine.step(self.hyper())
        if self._writes_groups and not float(getattr(self, "found_inf", 0.0)):  # set by a GradScaler
            self._write_groups()
        self._plain._opt_called = True  # type: ignore[attr-defined]  # a scheduler made over it looks there
        return loss

    def _write_groups(self) -> None:
        """Write into the groups what the class's own ``step()`` would."""
        if self._entries is None or self._entries.num_groups != len(self.param_groups):
            self._entries = GroupEntries(self.make, self.hyper())
        self._entries.step(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this step. After clip_grad_norm_ either every rank does so or none.

        set_to_none: False: as in torch, a parameter that had a gradient has a zero one until it gets another, so its
            moments and weights still decay."""
        self.engine.discard(set_to_none=set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the step's global gradient norm to ``max_norm``; call it after the last backward of the step.

        Returns the norm, before this clip, of the gradients averaged over ranks: a 0-dim fp32 CPU tensor. Waits for all
        ranks. Acts on the result of earlier calls of this, ``clip_grad_value_`` and ``scaler.unscale_``. Under
        ``nonfinite="raise"`` an inf or NaN norm raises NonFiniteGradientError; under ``"skip"`` it is returned, and the
        step changes nothing."""
        norm = self.engine.clip_norm(_checked("max_norm", max_norm))
        return torch.tensor(norm, dtype=torch.float32, device=self.engine.device)

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
        group. Raises UnsupportedError for other parameters, and for options that need states which no group at prepare
        had."""
        super().add_param_group(param_group)
        if not hasattr(self, "_members"):  # during prepare()
            return
        try:
            hyper = self.hyper()
            check_group(self.make, hyper[:-1], hyper[-1], whole=self.engine.layout.whole_parameters)
            self.engine.train(self.param_groups[-1]["params"], len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise
        self._members.append(_members(self.param_groups[-1]))
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
                raise UnsupportedError(
                    f"group {index} of the optimizer has other parameters than rayzero.prepare() and "
                    "add_param_group() were given, but the owners train those; to train fewer, set their "
                    "requires_grad to False, and divide parameters among groups before prepare()"
                )

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's format, which a plain optimizer of the same class can load too: complete fp32 CPU
        tensors in the parameters' shapes.

        Any rank may call it alone: it reads from the owners, unit by unit, and waits for the last step's update."""
        self._read = dict(read_states(self.engine, self._format()))
        try:
            return super().state_dict()
        finally:
            self._read = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` of this class, or of a plain torch optimizer of the same class, returned. Every
        rank calls it with equal values.

        Before anything is changed, raises ConfigError if a parameter's state has other names or shapes,
        UnsupportedError if the parameter was frozen at prepare, and torch's own errors."""
        states: dict[int, State] = {}

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            states.update(self._by_param(given))
            check_states(self.engine, self._format(), states)
            return {**given, "state": {}}

        def give(_: torch.optim.Optimizer) -> None:
            write_states(self.engine, self._format(), states)

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

    def _format(self) -> StateFormat:
        return StateFormat(self.make, self.hyper())

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


def _refusing(optimizer: torch.optim.Optimizer) -> Any:
    """A ``step`` that raises, for an optimizer whose parameters have gone to the owners."""
    refuse: Any = partial(_refuse_plain_step, type(optimizer).__name__)
    refuse._wrapped_by_lr_sched = True  # torch marks a step() whose calls a scheduler counts; ours counts them
    return refuse


def _refuse_plain_step(kind: str, *_: Any, **__: Any) -> None:
    raise UnsupportedError(
        f"step() was called on the {kind} that was given to rayzero.prepare(), where it would change nothing, "
        f"because the optimizer owners update the parameters; call step() of the optimizer that prepare() returned"
    )


def _refuse_plain_load(kind: str, *_: Any, **__: Any) -> None:
    raise UnsupportedError(
        f"load_state_dict() was called on the {kind} that was given to rayzero.prepare(), where it would change "
        "nothing, because the optimizer owners keep the states; call that of the optimizer that prepare() returned"
    )


def _members(group: Mapping[str, Any]) -> frozenset[int]:
    """The ids of a group's parameters."""
    return frozenset(map(id, group["params"]))


def _late(name: str, kind: str) -> str:
    return f"{name!r} of the {kind} was set after rayzero.prepare(), when owners had made theirs; set it before"


def _checked(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{name} must be a number >= 0, got {value!r}")
    return float(value)
