"""What the optimizer that a user gives to prepare() has beyond its class: attributes, entries of groups, hooks, methods
that were replaced. Each trains as in plain PyTorch, or is refused by name."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import rayzero
from rayzero.engine.context import RankContext
from rayzero.errors import RayZeroError, UnsupportedError

from .models import prepared_copy

pytestmark = pytest.mark.usefixtures("alone")


class Bits:
    def __init__(self, bits: int) -> None:
        self.bits = bits


class Mine(torch.optim.Optimizer):
    """Element-wise; what it computes depends on attributes and on entries of its groups."""

    def __init__(self, params: Any, lr: float = 0.1, scale: float = 1.0, bits: int = 32) -> None:
        super().__init__(params, {"lr": lr})
        self.scale, self.args, self.twice = scale, Bits(bits), scale * 2

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            factor = group["lr"] * self.scale * self.twice * group.get("mine", 1.0) * self.args.bits / 32
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * factor)


class Flagged(torch.optim.AdamW):
    """AdamW that descends by signs if a flag says so."""

    def __init__(self, params: Any, lr: float = 0.01, *, signs: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.signs = signs

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"] if self.signs else ():
                if p.grad is not None:
                    p.grad.sign_()
        super().step()


class Counting(Mine):
    """Counts its steps in its groups, as many classes do, and warms up."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["mine"] = min(1.0, group["step"] / 4)
        super().step()


class CountingInTensor(Mine):
    """Counts in a tensor of its groups, in place."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("step", torch.tensor(0, dtype=torch.int32)).add_(1)
            group["mine"] = min(1.0, group["step"].item() / 4)
        super().step()


class Rounding(Mine):
    """Computes in a dtype, by numbers of a dict, that its groups have."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("within", torch.bfloat16)
            group.setdefault("given", {"by": [0.5, 0.25], "norm": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["given"]["by"]
            for p in (each for each in group["params"] if each.grad is not None):
                p.sub_(p.grad.to(group["within"]).float(), alpha=group["lr"] * first / second)


class Closed(Mine):
    """Its constructor makes a function of an argument that nothing else says."""

    def __init__(self, params: Any, lr: float = 0.1, base: float = 2.0) -> None:
        super().__init__(params, lr)

        def scaled(grad: Tensor, more: float = 1.0) -> Tensor:
            return grad * (base + more + self.scale)

        self.scaled = scaled

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                p.sub_(self.scaled(p.grad), alpha=group["lr"])


class Needs(torch.optim.SGD):
    def __init__(self, params: Any, size: int) -> None:
        super().__init__(params, lr=0.1 * size)


class Kept(Mine):
    """Cannot be made without an argument, which it keeps in an object."""

    def __init__(self, params: Any, lr: float = 0.1, *, bits: int) -> None:
        super().__init__(params, lr, bits=bits)


class Large(Mine):
    """Changes its mind at a size that no trial has."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                self.state[p]["kept"] = torch.zeros(p.numel() // 64) if p.numel() >= 100_000 else torch.zeros_like(p)


class Slotted(Mine):
    __slots__ = ("boost",)

    def __init__(self, params: Any, lr: float = 0.1, boost: float = 1.0) -> None:
        super().__init__(params, lr)
        self.boost = boost

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["mine"] = self.boost
        super().step()


class Nested(Mine):
    """What it computes depends on values inside a list, a dict and an object, and on its defaults."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.scales, self.factors = [1.0, 2.0], {"all": 1.0}


class Tuned(Mine):
    """Has a value that only its class knows until it is set."""

    boost = 1.0

    def boosted(self) -> float:
        return self.boost


class Both(Nested, Tuned):
    pass


class ByAttribute(Mine):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad * group["lr"] * getattr(p, "rate", 1.0))


class ByName(Mine):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p, name in zip(group["params"], group.get("param_names", [""] * 9), strict=False):
                    if p.grad is not None and "bias" not in name:
                        p.sub_(p.grad * group["lr"])


class OfParameters(Mine):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and isinstance(p, nn.Parameter):
                        p.sub_(p.grad * group["lr"])


Make = Callable[[Any], torch.optim.Optimizer]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=False))


def both(make: Make, steps: int = 3, around: Callable[[Any, int], None] = lambda *_: None) -> None:
    """Train beside plain PyTorch and compare every bit."""
    ours, plain = net(), net()
    theirs = make(plain.parameters())
    model, optimizer = rayzero.prepare(ours, make(ours.parameters()))
    train(plain, theirs, steps, around)
    train(model, optimizer, steps, around)
    same(model, plain)


def train(model: nn.Module, optimizer: Any, steps: int, around: Callable[[Any, int], None] = lambda *_: None) -> None:
    for step in range(steps):
        around(optimizer, step)
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def batch(step: int) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(step))


def same(model: nn.Module, plain: nn.Module) -> None:
    found = rayzero.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name], value), name


def after(make: Make, change: Callable[[Any], object]) -> Make:
    """``make``, and then a change of what it made."""

    def made(params: Any) -> torch.optim.Optimizer:
        optimizer = make(params)
        change(optimizer)
        return optimizer

    return made


def registering(optimizer: torch.optim.Optimizer) -> None:
    """Hooks as a user registers them."""

    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    @torch.no_grad()
    def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.05, 0.05)

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(clamp)


SCHEDULERS: list[Any] = []  # alive as long as a user's


def scheduled(optimizer: torch.optim.Optimizer) -> None:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    SCHEDULERS.append(torch.optim.lr_scheduler.ChainedScheduler([warm], optimizer))


def reset(optimizer: Any, step: int) -> None:
    if step == 2:
        optimizer.load_state_dict(optimizer.state_dict() | {"state": {}})


def exchange(optimizer: Any, step: int) -> None:
    """Groups for others of the same parameters."""
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.3 / (step + 1)}
    optimizer.param_groups[0]["params"].reverse()


def halve(optimizer: Any, step: int) -> None:
    """As schedulers do with a rate that is a tensor."""
    optimizer.param_groups[0]["lr"].mul_(0.5)


def two_groups(params: Any) -> torch.optim.Optimizer:
    first, second, third = params
    return MOMENTUM([{"params": [first, second]}, {"params": [third], "lr": 0.01}])


MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
FUSED = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
TRAINS: dict[str, tuple[Any, ...]] = {  # what makes the optimizer, and what is done around each step
    "an argument": (lambda params: Mine(params, scale=3.0),),
    "a nested argument": (lambda params: Mine(params, bits=8),),
    "an attribute that was set": (after(Mine, lambda optimizer: setattr(optimizer, "scale", 0.5)),),
    "a nested one": (after(Mine, lambda optimizer: setattr(optimizer.args, "bits", 16)),),
    "a needed argument": (lambda params: Kept(params, bits=16),),
    "a subclass": (lambda params: Flagged(params, signs=True),),
    "a subclass, set": (after(Flagged, lambda optimizer: setattr(optimizer, "signs", True)),),
    "an entry of a group": (lambda params: Mine([{"params": list(params), "mine": 0.25}]),),
    "a slot of the class": (lambda params: Slotted(params, boost=3.0),),
    "a dtype and a dict in its groups": (Rounding,),
    "a function that it makes": (Closed,),
    "hooks": (after(Mine, registering),),
    "hooks of a kernel's class": (after(FUSED, registering),),
    "a scheduler": (after(Flagged, scheduled),),
    "a scheduler of a kernel's class": (after(FUSED, scheduled),),
    "a rate that is a tensor": (lambda params: torch.optim.SGD(params, lr=torch.tensor(0.1)), halve),
    "a tensor of another class": (lambda params: Mine(params, lr=torch.tensor(0.1)), halve),
    "states reset by loading none": (MOMENTUM, reset),
    "groups exchanged": (two_groups, exchange),
    "it would read attributes of Parameters": (ByAttribute,),
    "it would read their names": (ByName,),
    "it asks for Parameters": (OfParameters,),
}


@pytest.mark.parametrize("what", TRAINS)
def test_what_an_instance_has_trains(what: str) -> None:
    make, *around = TRAINS[what]
    both(make, 4, *around)


def test_a_gradients_own_dtype_ends_at_the_push() -> None:
    """Owners get gradients in the dtype of the computation: plain PyTorch's SGD adds 64-bit ones."""
    ours, plain = net(), net()
    for weight in (*ours.parameters(), *plain.parameters()):
        weight.grad_dtype = torch.float64
    model, optimizer = rayzero.prepare(ours, MOMENTUM(ours.parameters()))
    train(model, optimizer, 3)
    train(plain, MOMENTUM(plain.parameters()), 3)
    torch.testing.assert_close(rayzero.full_state_dict(model), dict(plain.state_dict()), rtol=0, atol=1e-6)


def replaced(optimizer: torch.optim.Optimizer) -> None:
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)  # type: ignore[method-assign]


def wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Around the step that a scheduler has wrapped."""
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step = functools.wraps(optimizer.step)(lambda *given: None)  # type: ignore[method-assign]


def bound(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = Mine.step.__get__(optimizer)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def rated(model: nn.Module) -> torch.optim.Optimizer:
    model[2].weight.rate = 0.5
    return ByAttribute(model.parameters())


def given(make: Make, change: Callable[[Any], object]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: after(make, change)(model.parameters())


ATTRIBUTES = "the Mine has attributes that owners cannot get: "
STEP = r"step\(\) of the .* was replaced by .*register_step_pre_hook"
REFUSED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "a function": (given(Mine, lambda o: setattr(o, "decay", lambda p: p)), f"{ATTRIBUTES}'decay'"),
    "a function of an argument": (
        lambda model: Closed(model.parameters(), base=3.0),
        "the Closed has attributes that owners cannot get: 'scaled'",
    ),
    "one with another default": (
        given(Closed, lambda o: setattr(o.scaled, "__defaults__", (4.0,))),
        "the Closed has attributes that owners cannot get: 'scaled'",
    ),
    "Parameters": (given(Mine, lambda o: setattr(o, "mine", o.param_groups[0]["params"])), f"{ATTRIBUTES}'mine'"),
    "a tensor": (given(Mine, lambda o: setattr(o.args, "bits", torch.ones(3))), f"{ATTRIBUTES}'args.bits'"),
    "an infinite number": (given(Mine, lambda o: setattr(o, "scale", float("inf"))), f"{ATTRIBUTES}'scale'"),
    "one that is gone": (given(Mine, lambda o: delattr(o, "twice")), f"{ATTRIBUTES}'twice'"),
    "an argument without a trace": (
        lambda model: Needs(model.parameters(), 2),
        r"Needs cannot be offloaded: owners make .*missing 1 required .*'size'",
    ),
    "step()": (given(torch.optim.AdamW, replaced), STEP),
    "step() of a subclass": (given(Flagged, replaced), STEP),
    "a scheduler's step()": (given(torch.optim.AdamW, wrapped), STEP),
    "another class's step()": (given(torch.optim.AdamW, bound), STEP),
    "zero_grad()": (
        given(torch.optim.AdamW, lambda o: setattr(o, "zero_grad", lambda: None)),
        r"zero_grad\(\) of the AdamW that was given",
    ),
    "attributes of Parameters": (rated, "ByAttribute cannot be offloaded: it reads 'rate' of the Parameters"),
    "names of Parameters": (
        lambda model: ByName(model.named_parameters()),
        "ByName cannot be offloaded: it reads 'param_names' of its groups",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_owners_cannot_get_or_call_is_refused_by_name(what: str) -> None:
    make, says = REFUSED[what]
    model = net()
    with pytest.raises(UnsupportedError, match=says):
        rayzero.prepare(model, make(model))


def test_states_that_cannot_be_kept_fail_the_first_step_and_no_value_changes() -> None:
    model = nn.Linear(512, 256, bias=False)
    before = copy.deepcopy(model.weight.detach())
    model, optimizer = rayzero.prepare(model, Large(model.parameters()))
    model(torch.ones(1, 512)).sum().backward()
    with pytest.raises(RayZeroError, match=r"a step made 'kept' of shape \(\d+,\).*no value was changed"):
        optimizer.step()
    assert all(torch.equal(owned.master, before.view(-1)) for owned in _shards(optimizer))


def _shards(optimizer: Any) -> list[Any]:
    (owner,) = optimizer.engine.store.connection.owners.services
    return list(owner._parts.model.shards.values())


# ---- entries that step() writes into its groups


@pytest.mark.parametrize("cls", [Counting, CountingInTensor])
def test_a_class_that_counts_in_its_groups_trains_resumes_and_saves(
    alone: RankContext, tmp_path: Any, cls: type[Mine]
) -> None:
    plain = net()
    theirs = cls(plain.parameters())
    train(plain, theirs, 3)
    model, optimizer = prepared_copy(net(), cls)
    train(model, optimizer, 3)
    same(model, plain)
    ours = {key: value for key, value in optimizer.state_dict()["param_groups"][0].items() if key != "params"}
    assert ours == {"lr": 0.1, "step": 3, "mine": 0.75}
    assert type(ours["step"]) is type(theirs.param_groups[0]["step"])
    rayzero.save_checkpoint(optimizer, tmp_path / "at-3")
    again = net()
    again, resumed = rayzero.prepare(again, cls(again.parameters()), resume=tmp_path / "at-3")
    train(again, resumed, 2)
    train(plain, theirs, 2)
    same(again, plain)
    loaded = net()
    loaded, third = rayzero.prepare(loaded, cls(loaded.parameters()))
    third.load_state_dict(theirs.state_dict())
    loaded.load_state_dict(plain.state_dict())
    train(loaded, third, 2)
    train(plain, theirs, 2)
    same(loaded, plain)


@pytest.mark.parametrize("cls", [Counting, CountingInTensor])
def test_a_step_that_a_grad_scaler_skips_is_not_counted(cls: type[Mine]) -> None:
    model, optimizer = prepared_copy(net(), cls)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(batch(0)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["step"] == 2


# ---- hooks and methods


@pytest.fixture
def global_calls() -> Iterator[list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: calls.append(("pre", type(optimizer).__name__))),
        register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(("post", type(optimizer).__name__))),
    ]
    yield calls
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, Flagged])
def test_hooks_for_all_optimizers_run_once_a_step_of_the_users(cls: Any, global_calls: list[tuple[str, str]]) -> None:
    model, optimizer = prepared_copy(net(), cls, lr=0.01)
    train(model, optimizer, 2)
    rayzero.full_state_dict(model)
    optimizer.load_state_dict(optimizer.state_dict())
    assert global_calls == [("pre", "ZeroOptimizer"), ("post", "ZeroOptimizer")] * 2


def test_a_hook_can_be_removed_and_state_dict_hooks_run() -> None:
    model, calls = net(), []
    given = torch.optim.AdamW(model.parameters())
    handle = given.register_step_pre_hook(lambda *_: calls.append("step"))
    given.register_state_dict_pre_hook(lambda optimizer: calls.append("before save"))
    given.register_state_dict_post_hook(lambda optimizer, state: {**state, "mine": 1})
    given.register_load_state_dict_pre_hook(lambda optimizer, state: calls.append(f"load {state.pop('mine')}"))
    given.register_load_state_dict_post_hook(lambda optimizer: calls.append("loaded"))
    model, optimizer = rayzero.prepare(model, given)
    train(model, optimizer, 1)
    handle.remove()
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["step", "before save", "load 1", "loaded"]


# ---- changes after prepare() that owners never hear of


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda given: setattr(given, "scale", 2.0), "scale"),
        (lambda given: given.scales.append(3.0), "scales"),
        (lambda given: given.factors.update(all=3.0), "factors"),
        (lambda given: setattr(given.args, "bits", 8), "args.bits"),
        (lambda given: given.defaults.update(lr=3.0), "defaults"),
        (lambda given: setattr(given, "boost", 3.0), "boost"),
        (lambda given: setattr(given, "boosted", lambda: 3.0), "boosted"),
    ],
)
def test_a_change_of_the_given_optimizer_after_prepare_is_refused_by_name(
    change: Callable[[Any], object], name: str
) -> None:
    model = net()
    given = Both(model.parameters())
    model, optimizer = rayzero.prepare(model, given)
    train(model, optimizer, 1)
    for known in ("scale", "boost", "boosted"):  # at once where it is seen
        with pytest.raises(UnsupportedError, match=f"'{known}' of the Both was set after"):
            setattr(optimizer, known, 3.0)
    change(given)
    model(batch(1)).square().mean().backward()
    with pytest.raises(UnsupportedError, match=f"'{name}' of the Both was set after"):
        optimizer.step()


def test_a_loops_own_attributes_and_entries_of_the_defaults_of_torchs_classes_stay_free() -> None:
    model = net()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = rayzero.prepare(model, given)
    given.defaults["lr"] = 0.5
    optimizer.note = "mine"  # type: ignore[attr-defined]
    train(model, optimizer, 1)


# ---- states and groups of the returned optimizer


@pytest.mark.parametrize(
    "use",
    [
        lambda state, param: state[param]["momentum_buffer"].zero_(),
        lambda state, param: state[param].clear(),
        lambda state, param: state.update({param: {}}),
        lambda state, param: state.setdefault(param, {}),
        lambda state, param: state.pop(param, None),
        lambda state, param: state.clear(),
        lambda state, param: state.get(param),
        lambda state, param: list(state.items()),
        lambda state, param: list(state.values()),
        lambda state, param: list(state.keys()),
        lambda state, param: list(state),
        lambda state, param: len(state),
        lambda state, param: param in state,
    ],
)
def test_states_that_are_not_here_cannot_be_read_or_changed(use: Callable[[Any, Any], object]) -> None:
    model = net()
    given = MOMENTUM(model.parameters())
    model, optimizer = rayzero.prepare(model, given)
    assert not optimizer.state, "as in plain PyTorch before the first step"
    with pytest.raises(UnsupportedError, match=r"optimizer\.state is empty"):
        optimizer.state = {}
    with pytest.raises(UnsupportedError, match=r"optimizer\.state is empty"):
        optimizer.state[model[0].weight] = {"momentum_buffer": torch.ones(64, 64)}
    for each, copied in itertools.product((optimizer, given), (copy.deepcopy, pickle.dumps)):
        with pytest.raises(UnsupportedError, match=r"optimizer\.state is empty"):
            copied(each)
    train(model, optimizer, 1)
    for each in (optimizer, given):
        with pytest.raises(UnsupportedError, match=r"optimizer\.state is empty, .*state_dict\(\)"):
            use(each.state, model[0].weight)
    assert optimizer.state_dict()["state"].keys() == {0, 1, 2}


def test_states_cannot_be_loaded_into_or_saved_from_the_given_optimizer() -> None:
    model = net()
    given = MOMENTUM(model.parameters())
    model, optimizer = rayzero.prepare(model, given)
    train(model, optimizer, 1)
    with pytest.raises(UnsupportedError, match=r"load_state_dict\(\) was called on the SGD that was given"):
        given.load_state_dict(optimizer.state_dict())
    with pytest.raises(UnsupportedError, match=r"optimizer\.state is empty"):
        given.state_dict()


@pytest.mark.parametrize(
    "change",
    [
        lambda groups: groups[0]["params"].pop(),
        lambda groups: groups[0].update(params=groups[0]["params"][:1]),
        lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
        lambda groups: groups.reverse(),
    ],
)
def test_a_group_that_trains_other_parameters_than_at_prepare_is_refused(change: Callable[[Any], object]) -> None:
    model, optimizer = prepared_copy(net(), two_groups)
    train(model, optimizer, 1)
    change(optimizer.param_groups)
    model(batch(1)).square().mean().backward()
    with pytest.raises(UnsupportedError, match=r"group 0 of the optimizer has other parameters than"):
        optimizer.step()
