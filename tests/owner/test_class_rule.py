"""Optimizers other than Adam: as they are on shards, on whole parameters, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from store.stores import inprocess
from store.toy import WAIT, Grads, PlainAdamW, equal, make_spec, masters, random_grads, start, take_step
from torch import Tensor

from rayzero.checkpoint.writer import staging_path, write_rank_state
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.kernels.optimizer_class import OptimizerMaker
from rayzero.kernels.optimizer_trial import require_owned
from rayzero.owner.owned_model import choose_rule
from rayzero.owner.rules import AdamRule
from rayzero.protocol.hyper import resolve_optimizer
from rayzero.protocol.messages import Hyper, ModelSpec


class Lion(torch.optim.Optimizer):
    """A user's own optimizer: element-wise, and it replaces its state tensor instead of writing into it."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state.get("m", torch.zeros_like(p))
                p.add_(torch.sign(0.5 * m + p.grad), alpha=-group["lr"])
                state["m"] = m * group["beta"] + p.grad * (1 - group["beta"])


class NormScaled(torch.optim.Optimizer):
    """Not element-wise: it divides by the norm of the whole gradient, as LARS does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                p.sub_(group["lr"] * p.grad / p.grad.norm())


class Noisy(NormScaled):
    """Element-wise in form, but it draws random numbers."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.grad + torch.randn_like(p)))


class NeedsClosure(NormScaled):
    """Cannot step by itself."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is None:
            raise ValueError("give me a closure")


class MyAdamW(torch.optim.AdamW):
    """A subclass may change anything: it does not run on the tile kernels."""


def hyper_of(cls: type[torch.optim.Optimizer], **options: Any) -> Hyper:
    """A JSON-able parameter group, as prepare() makes it."""
    group = cls([torch.zeros(1, requires_grad=True)], **options).param_groups[0]
    return {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"}


def spec_of(cls: type[torch.optim.Optimizer], world_size: int = 1, **options: Any) -> ModelSpec:
    hyper = hyper_of(cls, **options)
    path = f"{cls.__module__}:{cls.__qualname__}"
    return make_spec(world_size, optimizer=path, hyper=[hyper, hyper | {"lr": 0.5 * hyper["lr"]}])


WORKS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.Rprop, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.01}),
    (MyAdamW, {"lr": 0.01}),
    (Lion, {"lr": 0.01}),
]
IDS = ["sgd", "nesterov", "adagrad", "rmsprop", "adadelta", "adamax", "nadam", "radam", "rprop", "asgd", "sub", "lion"]


def trained(spec: ModelSpec, schedule: list[list[Grads]], num_owners: int, directory: Path) -> list[Grads]:
    """Masters after a schedule (the gradients of each rank, by step), and after another number of owners has gone on
    from a checkpoint in its middle."""
    found, half = [], len(schedule) // 2
    for owners, restore_from in ((num_owners, None), (num_owners % 3 + 1, str(directory))):
        with inprocess(spec.world_size, owners) as stores:
            ranks = start(stores, replace(spec, restore_from=restore_from))
            for step, grads in enumerate(schedule):
                if step == half and restore_from is None:
                    files = [write_rank_state(staging_path(directory), rank.rank, {}, {}) for rank in ranks]
                    saves = [rank.store.save(half, directory, (file,)) for rank, file in zip(ranks, files, strict=True)]
                    assert [save.result(WAIT).step for save in saves] == [half] * spec.world_size
                if step >= half or restore_from is None:
                    take_step(ranks, grads)
            found.append(masters(ranks[0]))
    return found


def some_missing(spec: ModelSpec) -> list[list[Grads]]:
    """A schedule in which the state and step count of a parameter stand still twice."""
    schedule = [[random_grads(spec, 10 * step + rank) for rank in range(spec.world_size)] for step in range(6)]
    for step in (0, 2):
        for grads in schedule[step]:
            del grads["layers.0.b"]
    return schedule


@pytest.mark.promise("exact", "optimizers")
@pytest.mark.parametrize(("cls", "options"), WORKS, ids=IDS)
def test_an_elementwise_class_computes_alike_on_shards(
    cls: type[torch.optim.Optimizer], options: Any, tmp_path: Path
) -> None:
    spec = spec_of(cls, **options)
    plain = PlainAdamW(spec, cls, **{k: v for k, v in options.items() if cls is Lion})
    schedule = some_missing(spec)
    for grads in schedule:
        plain.step(grads)
    found, resumed = trained(spec, schedule, 2, tmp_path / "step-000003")
    assert equal(found, resumed)
    for name, value in plain.values.items():  # a vector's tail may round otherwise than in a padded slice
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def test_momentum_can_be_fetched_by_its_own_name() -> None:
    spec = spec_of(torch.optim.SGD, lr=0.1, momentum=0.9)
    with inprocess(1, 2) as stores:
        (rank,) = start(stores, spec)
        grads = random_grads(spec, 1)
        take_step([rank], [grads])
        assert equal(rank.fetch(1, "momentum_buffer"), grads)


def test_exactly_adam_and_adamw_run_on_tile_kernels() -> None:
    for cls in (torch.optim.Adam, torch.optim.AdamW):
        assert isinstance(choose_rule(spec_of(cls)), AdamRule)
    assert choose_rule(spec_of(MyAdamW)).kernel == "torch class"


@pytest.mark.parametrize("world_size", [1, 2])
def test_amsgrad_and_adam_equal_torch(world_size: int) -> None:
    spec = spec_of(torch.optim.Adam, world_size, lr=0.01, amsgrad=True, weight_decay=0.1)
    plain = PlainAdamW(spec, torch.optim.Adam)
    with inprocess(world_size, 2) as stores:
        ranks = start(stores, spec)
        for step in range(5):
            grads = [random_grads(spec, 10 * step + rank) for rank in range(world_size)]
            take_step(ranks, grads)
            plain.step(grads)
        found = masters(ranks[0])
        assert all(value.any() for value in ranks[0].fetch(5, "max_exp_avg_sq").values() if value.numel())
    for name, value in plain.values.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


# ---- whole parameters


class Muons(torch.optim.Optimizer):
    """Matrices as torch's Muon has them, everything else as SGD does: a class that switches by shape."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                kept = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                kept.lerp_(p.grad, 1 - group["momentum"])
                update = torch.optim._muon._zeropower_via_newtonschulz(kept, NEWTON, 5, 1e-7) if p.dim() == 2 else kept
                p.add_(update, alpha=-group["lr"])


NEWTON = (3.4445, -4.775, 2.0315)


def whole_spec(cls: type[torch.optim.Optimizer], world_size: int = 1, **options: Any) -> ModelSpec:
    spec = spec_of(cls, world_size, **options)
    return replace(spec, layout=replace(spec.layout, whole_parameters=True))


def test_a_layout_that_may_cut_parameters_is_refused_for_such_a_class() -> None:
    with pytest.raises(UnsupportedError, match="NormScaled needs whole parameters"):
        choose_rule(spec_of(NormScaled, lr=0.1))


# ---- refusals


@pytest.mark.promise("refused", "optimizers")
@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (torch.optim.LBFGS, r"torch.optim.lbfgs.LBFGS cannot run on shards: it needs a closure"),
        (torch.optim.SparseAdam, "SparseAdam cannot run on shards: it takes sparse gradients"),
        (Noisy, "Noisy cannot be offloaded: two equal trials gave different weights: it draws random numbers"),
        (NeedsClosure, "NeedsClosure cannot be offloaded: a trial step without a closure.* raised .*give me a closure"),
    ],
)
def test_what_owners_cannot_run_is_refused_by_name(cls: type[torch.optim.Optimizer], reason: str) -> None:
    group = cls([torch.zeros(1, requires_grad=True)]).param_groups[0]
    with pytest.raises(UnsupportedError, match=reason):
        require_owned(OptimizerMaker(cls), {key: value for key, value in group.items() if key != "params"})


def test_a_class_that_cannot_be_imported_is_named() -> None:
    for path in ("no_such_module:Opt", "torch.optim:NoSuch", f"{__name__}:outer.<locals>.Inner"):
        with pytest.raises(UnsupportedError, match=f"optimizer {path!r} cannot be imported"):
            resolve_optimizer(path)
    with pytest.raises(ConfigError, match="is not a torch"):
        resolve_optimizer("torch:Tensor")


def test_the_trial_leaves_torchs_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected: Tensor = torch.randn(3)
    torch.manual_seed(1)
    require_owned(OptimizerMaker(torch.optim.SGD), hyper_of(torch.optim.SGD) | {"lr": 0.77})
    assert torch.equal(torch.randn(3), expected)
