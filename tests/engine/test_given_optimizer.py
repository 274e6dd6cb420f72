"""What the optimizer that a user gives to prepare() has beyond its class: attributes, entries of groups, hooks, methods
that were replaced. Each trains as in plain PyTorch, or is refused by name."""

from __future__ import annotations

import copy
import functools
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


# ---- attributes


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Mine(params, scale=3.0),
        lambda params: Mine(params, bits=8),
        after(Mine, lambda optimizer: setattr(optimizer, "scale", 0.5)),
        after(Mine, lambda optimizer: setattr(optimizer.args, "bits", 16)),
        lambda params: Kept(params, bits=16),
        lambda params: Flagged(params, signs=True),
        after(Flagged, lambda optimizer: setattr(optimizer, "signs", True)),
        lambda params: Mine([{"params": list(params), "mine": 0.25}]),
    ],
    ids=[
        "argument",
        "nested argument",
        "set",
        "nested set",
        "needed argument",
        "subclass",
        "subclass set",
        "entry of a group",
    ],
)
def test_what_an_instance_keeps_trains(make: Make) -> None:
    both(make)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda o: setattr(o, "decay", lambda p: p), "'decay'"),
        (lambda o: setattr(o, "mine", list(o.param_groups[0]["params"])), "'mine'"),
        (lambda o: setattr(o.args, "bits", torch.ones(3)), "'args.bits'"),
        (lambda o: setattr(o, "scale", float("inf")), "'scale'"),
        (lambda o: delattr(o, "twice"), "'twice'"),
    ],
)
def test_an_attribute_that_owners_cannot_get_is_refused_by_name(change: Callable[[Any], object], name: str) -> None:
    model = net()
    with pytest.raises(UnsupportedError, match=f"the Mine has attributes that owners cannot get: {name}"):
        rayzero.prepare(model, after(Mine, change)(model.parameters()))


def test_an_attribute_that_is_set_after_prepare_is_refused_by_name() -> None:
    model = net()
    given = Mine(model.parameters())
    model, optimizer = rayzero.prepare(model, given)
    with pytest.raises(UnsupportedError, match="'scale' of the Mine was set after"):
        optimizer.scale = 2.0
    given.scale = 2.0
    model(batch(0)).square().mean().backward()
    with pytest.raises(UnsupportedError, match="'scale' of the Mine was set after"):
        optimizer.step()


def test_arguments_that_leave_no_trace_are_named_as_the_reason() -> None:
    model = net()
    with pytest.raises(UnsupportedError, match=r"Needs cannot be offloaded: owners make .*missing 1 required .*'size'"):
        rayzero.prepare(model, Needs(model.parameters(), 2))


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


@pytest.mark.parametrize("make", [Mine, functools.partial(torch.optim.AdamW, fused=True)])
def test_step_hooks_that_were_registered_before_prepare_run(make: Make) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    @torch.no_grad()
    def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.05, 0.05)

    def register(optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(clamp)

    both(after(make, register))


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


def _mine(optimizer: torch.optim.Optimizer) -> None:
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)  # type: ignore[method-assign]


def _wrapping_a_schedulers(optimizer: torch.optim.Optimizer) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step = functools.wraps(optimizer.step)(lambda *given: None)  # type: ignore[method-assign]


def _bound(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = Mine.step.__get__(optimizer)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize("replace", [_mine, _wrapping_a_schedulers, _bound])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, Flagged])
def test_a_step_that_was_replaced_is_refused(cls: Any, replace: Callable[[Any], None]) -> None:
    model = net()
    with pytest.raises(UnsupportedError, match=r"step\(\) of the .* was replaced by .*register_step_pre_hook"):
        rayzero.prepare(model, after(cls, replace)(model.parameters()))


def test_other_methods_that_were_replaced_are_refused() -> None:
    model = net()
    with pytest.raises(UnsupportedError, match=r"zero_grad\(\) of the AdamW that was given"):
        rayzero.prepare(
            model,
            after(torch.optim.AdamW, lambda o: setattr(o, "zero_grad", lambda: None))(model.parameters()),
        )


@pytest.mark.parametrize("cls", [torch.optim.AdamW, Flagged])
def test_schedulers_that_were_made_before_prepare_are_accepted(cls: Any) -> None:
    schedulers: dict[int, Any] = {}

    def schedule(optimizer: torch.optim.Optimizer) -> None:
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
        schedulers[len(schedulers)] = torch.optim.lr_scheduler.ChainedScheduler([warm], optimizer)

    make = functools.partial(cls, lr=0.01, fused=True) if cls is torch.optim.AdamW else cls
    both(after(make, schedule))


# ---- changes after prepare() that owners never hear of


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


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda given: given.scales.append(3.0), "scales"),
        (lambda given: given.factors.update(all=3.0), "factors"),
        (lambda given: setattr(given.args, "bits", 8), "args.bits"),
        (lambda given: given.defaults.update(lr=3.0), "defaults"),
        (lambda given: setattr(given, "boost", 3.0), "boost"),
        (lambda given: setattr(given, "boosted", lambda: 3.0), "boosted"),
    ],
)
def test_a_change_inside_the_given_optimizer_after_prepare_is_refused_by_name(
    change: Callable[[Any], object], name: str
) -> None:
    model = net()
    given = Both(model.parameters())
    model, optimizer = rayzero.prepare(model, given)
    train(model, optimizer, 1)
    change(given)
    model(batch(1)).square().mean().backward()
    with pytest.raises(UnsupportedError, match=f"'{name}' of the Both was set after"):
        optimizer.step()


@pytest.mark.parametrize("name", ["boost", "boosted"])
def test_what_the_class_reads_cannot_be_set_on_the_returned_optimizer(name: str) -> None:
    _, optimizer = prepared_copy(net(), Tuned)
    with pytest.raises(UnsupportedError, match=f"'{name}' of the Tuned was set after"):
        setattr(optimizer, name, 3.0)
    optimizer.note = "a loop's own"


def test_a_loops_own_attributes_and_entries_of_the_defaults_of_torchs_classes_stay_free() -> None:
    model = net()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = rayzero.prepare(model, given)
    given.defaults["lr"] = 0.5
    train(model, optimizer, 1)


class Slotted(Mine):
    __slots__ = ("boost",)

    def __init__(self, params: Any, lr: float = 0.1, boost: float = 1.0) -> None:
        super().__init__(params, lr)
        self.boost = boost

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["mine"] = self.boost
        super().step()


def test_a_value_in_a_slot_of_the_class_trains() -> None:
    both(lambda params: Slotted(params, boost=3.0))


# ---- states and groups of the returned optimizer

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


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
    train(model, optimizer, 1)
    for each in (optimizer, given):
        with pytest.raises(UnsupportedError, match=r"optimizer\.state is empty, .*state_dict\(\)"):
            use(each.state, model[0].weight)
    assert optimizer.state_dict()["state"].keys() == {0, 1, 2}


def test_states_cannot_be_exchanged_or_set_before_the_first_step() -> None:
    model, optimizer = prepared_copy(net(), MOMENTUM)
    with pytest.raises(UnsupportedError, match=r"optimizer\.state is empty"):
        optimizer.state = {}
    with pytest.raises(UnsupportedError, match=r"optimizer\.state is empty"):
        optimizer.state[model[0].weight] = {"momentum_buffer": torch.ones(64, 64)}


def test_states_are_reset_by_loading_none() -> None:
    def reset(optimizer: Any, step: int) -> None:
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict() | {"state": {}})

    both(MOMENTUM, steps=4, around=reset)


def test_states_cannot_be_loaded_into_or_saved_from_the_given_optimizer() -> None:
    model = net()
    given = MOMENTUM(model.parameters())
    model, optimizer = rayzero.prepare(model, given)
    train(model, optimizer, 1)
    with pytest.raises(UnsupportedError, match=r"load_state_dict\(\) was called on the SGD that was given"):
        given.load_state_dict(optimizer.state_dict())
    with pytest.raises(UnsupportedError, match=r"optimizer\.state is empty"):
        given.state_dict()


def _two_groups(params: Any) -> torch.optim.Optimizer:
    first, second, third = params
    return MOMENTUM([{"params": [first, second]}, {"params": [third], "lr": 0.01}])


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
    model, optimizer = prepared_copy(net(), _two_groups)
    train(model, optimizer, 1)
    change(optimizer.param_groups)
    model(batch(1)).square().mean().backward()
    with pytest.raises(UnsupportedError, match=r"group 0 of the optimizer has other parameters than"):
        optimizer.step()


def test_groups_may_be_exchanged_for_others_of_the_same_parameters() -> None:
    def exchange(optimizer: Any, step: int) -> None:
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.3 / (step + 1)}
        optimizer.param_groups[0]["params"].reverse()

    both(_two_groups, around=exchange)


# ---- what the class asks of Parameters


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


def test_a_class_that_reads_an_attribute_of_parameters_is_refused_if_one_has_it() -> None:
    model = net()
    model[2].weight.rate = 0.5
    with pytest.raises(UnsupportedError, match=r"ByAttribute cannot be offloaded: it reads 'rate' of the Parameters"):
        rayzero.prepare(model, ByAttribute(model.parameters()))
    both(ByAttribute)


def test_a_class_that_reads_names_of_parameters_is_refused_if_they_were_given() -> None:
    model = net()
    with pytest.raises(UnsupportedError, match=r"ByName cannot be offloaded: it reads 'param_names' of its groups"):
        rayzero.prepare(model, ByName(model.named_parameters()))
    both(ByName)


def test_a_class_that_asks_for_parameters_finds_them() -> None:
    both(OfParameters)
