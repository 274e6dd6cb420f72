"""Several optimizers over one model: the bits of each in plain PyTorch, states in torch's format, refusals by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic.disturbed import another_host
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.convert.conversion import convert
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.full_values import load_checkpoint
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.errors import CheckpointError, ConfigError, GradientAccessError, UnsupportedError
from rayzero.store.rank.rank_store import RankStore
from rayzero.telemetry.names import MATRIX_PRODUCT_SECONDS, MATRIX_PRODUCTS
from rayzero.testing import Transport, run_ranks
from tests.support import needs

from .models import Net, same_bits, seeded, tight, token_loss, tokens

MUON, ADAMW = "torch.optim:Muon", "torch.optim.adamw:AdamW"
BASE = seeded(Net)
Optimizers = list[torch.optim.Optimizer]


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of blocks, and everything else."""
    matrices = [param for param in model.layers.parameters() if param.dim() == 2]  # type: ignore[union-attr]
    known = set(map(id, matrices))
    return matrices, [param for param in model.parameters() if id(param) not in known]


def muon_and_adamw(model: nn.Module) -> Optimizers:
    matrices, others = divided(model)
    groups = [{"params": others[:3], "lr": 2e-3}, {"params": others[3:], "weight_decay": 0.2}]
    return [torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.01), torch.optim.AdamW(groups, lr=1e-3)]


def fused(model: nn.Module) -> Optimizers:
    muon, adamw = muon_and_adamw(model)
    return [torch.optim.AdamW(adamw.param_groups, fused=True), muon]


def sgd_and_adagrad(model: nn.Module) -> Optimizers:
    """Element-wise, so that shards cut parameters; Adagrad makes its states before the first step."""
    matrices, others = divided(model)
    return [
        torch.optim.SGD(matrices, lr=0.1, momentum=0.9),
        torch.optim.Adagrad(others, lr=0.05, initial_accumulator_value=0.3),
    ]


def train(
    model: nn.Module, optimizer: Any, steps: range, rank: int = 0, *, backwards: int = 1, max_norm: float | None = None
) -> None:
    for step in steps:
        for index in range(backwards):
            (token_loss(model, tokens(step, 10 * rank + index)) / backwards).backward()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()


def train_plain(model: nn.Module, optimizers: Optimizers, steps: range) -> None:
    for step in steps:
        token_loss(model, tokens(step)).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


def added(each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Sums of gradients, in order."""
    return [functools.reduce(torch.add, grads) for grads in zip(*each, strict=True)]


def plain(
    make: Any,
    steps: int,
    world_size: int,
    precision: str = "fp32",
    backwards: int = 1,
    max_norm: float | None = None,
) -> dict[str, Tensor]:
    """Train fp32 masters of an unsharded model on all ranks' batches, on one thread. The norm that clips is in fp64,
    as owners compute it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        masters = copy.deepcopy(BASE)
        model = copy.deepcopy(BASE).to(torch.bfloat16 if precision == "bf16" else torch.float32)
        optimizers = make(masters)
        for step in range(steps):
            rounds = []
            for index in range(backwards):
                ranks = []
                for rank in range(world_size):
                    model.zero_grad()
                    (token_loss(model, tokens(step, 10 * rank + index)) / backwards).backward()
                    ranks.append([param.grad.float() for param in model.parameters()])
                rounds.append(added(ranks))
            total = added(rounds)
            norm = sum(float(grad.double().square().sum()) for grad in total) ** 0.5 / world_size
            assert max_norm is None or norm > max_norm, "nothing would be clipped"
            scale = 1.0 if max_norm is None else max_norm / (norm + 1e-6)
            for param, grad in zip(masters.parameters(), total, strict=True):
                param.grad = grad * (scale / world_size)
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():
                for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                    param.copy_(master)
        return dict(masters.state_dict())
    finally:
        torch.set_num_threads(threads)


def loop(
    context: RankContext,
    make: Any = muon_and_adamw,
    precision: str = "fp32",
    backwards: int = 1,
    steps: int = 3,
    max_norm: float | None = None,
    matrix_updates: Any = "owner",
    **settings: Any,
) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model = copy.deepcopy(BASE)
    config = tight(model, precision=precision, prefetch_buffer_size=1, shard_bytes=16 << 10, **settings)
    config = config.replace(gradient_accumulation_steps=backwards, matrix_updates=matrix_updates)
    model, optimizer = rayzero.prepare(model, make(model), config)
    train(model, optimizer, range(steps), context.rank, backwards=backwards, max_norm=max_norm)
    return rayzero.full_state_dict(model)


# ---- bits


@pytest.mark.promise("exact", "optimizers")
@pytest.mark.spread(4)
@pytest.mark.parametrize("make", [muon_and_adamw, fused, sgd_and_adagrad])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize(("world_size", "owners"), [(1, 1), (2, 3), (3, 2)])
def test_several_optimizers_have_the_bits_of_each_in_plain_torch(
    make: Any, precision: str, backwards: int, world_size: int, owners: int
) -> None:
    expected = plain(make, 3, world_size, precision, backwards)
    each = functools.partial(loop, make=make, precision=precision, backwards=backwards)
    for state in run_ranks(each, world_size, owners):
        assert same_bits(state, expected)


def adafactor(model: nn.Module) -> Optimizers:
    return [torch.optim.Adafactor(model.parameters(), lr=1e-2)]


def lamb(model: nn.Module) -> Optimizers:
    from pytorch_optimizer import Lamb

    return [Lamb(model.parameters(), lr=1e-2)]


def soap(model: nn.Module) -> Optimizers:
    from pytorch_optimizer import SOAP

    return [SOAP(model.parameters(), lr=1e-2)]


def normuon(model: nn.Module) -> Optimizers:
    from pytorch_optimizer import NorMuon

    matrices, others = divided(model)
    return [NorMuon([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])]


def everything(make: Any, precision: str) -> Any:
    """A loop with clips, accumulation and activations on the host."""
    on_host = {"offload_activations": ("layers.*",), "activation_min_bytes": 1024}
    return functools.partial(loop, make=make, precision=precision, backwards=2, max_norm=0.1, **on_host)


@pytest.mark.promise("exact", "optimizers")
@needs.shared_memory
@pytest.mark.spread(1)
@pytest.mark.parametrize("make", [muon_and_adamw, adafactor])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("world_size", "owners"), [(1, 3), (2, 2), (3, 1)])
def test_clips_accumulation_and_activations_on_the_host_change_no_bit_of_plain_torch(
    make: Any, precision: str, world_size: int, owners: int
) -> None:
    expected = plain(make, 3, world_size, precision, 2, 0.1)
    for state in run_ranks(everything(make, precision), world_size, owners, "shm", True):
        assert same_bits(state, expected)


@pytest.mark.promise("exact", "optimizers")
@pytest.mark.thorough
@pytest.mark.parametrize("make", [normuon, lamb, soap])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("world_size", "owners"), [(1, 1), (3, 2)])
def test_nor_of_other_packages_classes(make: Any, precision: str, world_size: int, owners: int) -> None:
    expected = plain(make, 3, world_size, precision, 2, 0.1)
    for state in run_ranks(everything(make, precision), world_size, owners):
        assert same_bits(state, expected)


@pytest.mark.thorough
@needs.shared_memory
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [muon_and_adamw, adafactor])
def test_nor_do_owners_on_another_host(make: Any, precision: str) -> None:
    with another_host("optimizer 1") as hosts:
        found = run_ranks(everything(make, precision), 2, 2, "shm", True, hosts=hosts)
    for state in found:
        assert same_bits(state, plain(make, 3, 2, precision, 2, 0.1))


def on_ranks(context: RankContext, **given: Any) -> tuple[dict[str, Tensor], list[int]]:
    """What a loop ends with whose ranks multiply, and the versions that this rank has multiplied for. It has counted at
    least one matrix for each time."""
    versions, give = [], RankStore.multiplied

    def multiplied(store: RankStore, shard: int, version: int, values: Tensor) -> Any:
        if store.connection.rank == context.rank:
            versions.append(version)
        return give(store, shard, version, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankStore, "multiplied", multiplied)
        found = loop(context, matrix_updates="rank", **given)
    counted = {metric: sum(series.values()) for metric, series in context.recorder.counters().items()}
    assert counted.get(MATRIX_PRODUCTS, 0.0) >= len(versions)
    assert (counted.get(MATRIX_PRODUCT_SECONDS, 0.0) > 0) == bool(versions)
    return found, sorted(set(versions))


@pytest.mark.promise("exact", "optimizers")
@pytest.mark.spread(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("world_size", "owners"), [(1, 1), (2, 3), (3, 2), (2, 1)])
def test_matrices_that_ranks_multiply_have_the_bits_of_plain_torch(
    precision: str, world_size: int, owners: int
) -> None:
    expected = plain(muon_and_adamw, 3, world_size, precision)
    for state, _ in run_ranks(functools.partial(on_ranks, precision=precision), world_size, owners):
        assert same_bits(state, expected)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("world_size", "owners", "transport"), [(2, 1, "shm"), (1, 1, "shm"), (3, 2, "shm"), (2, 3, "shm"), (2, 2, "grpc")]
)
def test_every_rank_multiplies_over_every_transport(world_size: int, owners: int, transport: Transport) -> None:
    expected = plain(muon_and_adamw, 3, world_size)
    for state, versions in run_ranks(on_ranks, world_size, owners, transport, True):
        assert same_bits(state, expected)
        assert versions[-2:] == [2, 3], "an owner does not wait in its first step for a rank that has yet to ask"


@pytest.mark.thorough
def test_ranks_multiply_for_owners_of_another_host() -> None:
    with another_host("optimizer 1") as hosts:
        for state, versions in run_ranks(on_ranks, 2, 2, "shm", True, hosts=hosts):
            assert same_bits(state, plain(muon_and_adamw, 3, 2))
            assert versions[-2:] == [2, 3]


def test_where_ranks_would_multiply_and_nothing_is_to_be_multiplied_is_refused(alone: RankContext) -> None:
    model = copy.deepcopy(BASE)
    with pytest.raises(UnsupportedError, match=r"matrix_updates='rank' is for torch.optim.Muon, and .*AdamW has no"):
        rayzero.prepare(model, torch.optim.AdamW(model.parameters()), ZeroConfig(matrix_updates="rank"))
    with pytest.raises(ConfigError, match=r"matrix_updates='rank' is for owners on the host"):
        ZeroConfig(matrix_updates="rank", offload_fraction=0.5)


def test_equal_classes_are_one_optimizer_and_two_lists_in_another_order_are_alike(alone: RankContext) -> None:
    model = copy.deepcopy(BASE)
    matrices, others = divided(model)
    _, optimizer = rayzero.prepare(model, [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.AdamW(others)])
    assert optimizer.make.cls is torch.optim.AdamW
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]
    assert not any("optimizer" in group for group in optimizer.param_groups)
    assert optimizer.classes == ADAMW


class BySize(torch.optim.Optimizer):
    """As many have it: Muon for hidden matrices and Adam beside it, largest parameters first, in groups that have just
    these entries."""

    def __init__(self, params: Any) -> None:
        for group in params:
            group["params"] = sorted(group["params"], key=torch.numel, reverse=True)
            group.setdefault("lr", 0.02 if group["use_muon"] else 3e-4)
            group.setdefault("weight_decay", 0.01)
            name, value = ("momentum", 0.95) if group["use_muon"] else ("betas", (0.9, 0.95))
            group.setdefault(name, value)
            group.setdefault("schedule", [(3.4445, -4.775, 2.0315)])
            assert all(isinstance(each, tuple) for each in group["schedule"])
            assert set(group) == {"params", "lr", "weight_decay", name, "use_muon", "schedule"}, set(group)
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                state = self.state[p]
                if not state:
                    names = ["momentum_buffer"] if group["use_muon"] else ["exp_avg", "exp_avg_sq"]
                    state.update({name: torch.zeros_like(p) for name in names}, step=0)
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(self._direction(p.grad, state, group), alpha=-group["lr"])

    def _direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if group["use_muon"]:
            kept = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
            ahead = grad.lerp(kept, group["momentum"])
            newton = torch.optim._muon._zeropower_via_newtonschulz
            return newton(ahead, group["schedule"][0], 5, 1e-7) * max(1, grad.size(0) / grad.size(1)) ** 0.5
        first, second = group["betas"]
        mean, square = state["exp_avg"].lerp_(grad, 1 - first), state["exp_avg_sq"].lerp_(grad.square(), 1 - second)
        scaled = (square / (1 - second ** state["step"])).sqrt() + 1e-10
        return mean / (1 - first ** state["step"]) / scaled


def by_size(model: nn.Module) -> Optimizers:
    matrices, others = divided(model)
    return [BySize([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False, "lr": 1e-3}])]


@pytest.mark.promise("exact", "optimizers")
@pytest.mark.parametrize(("world_size", "owners"), [(1, 1), (2, 3)])
def test_a_class_that_switches_by_group_has_its_bits(world_size: int, owners: int) -> None:
    expected = plain(by_size, 3, world_size)
    for state in run_ranks(functools.partial(loop, make=by_size), world_size, owners):
        assert same_bits(state, expected)


def test_a_scheduler_of_such_a_class_and_its_checkpoint(tmp_path: Path) -> None:
    def train_on(resume: Path | None) -> dict[str, Tensor]:
        with running_in(RankContext()) as context:
            model = copy.deepcopy(BASE)
            (given,) = by_size(model)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)  # writes an entry before prepare()
            model, optimizer = rayzero.prepare(model, given, resume=resume)
            rayzero.track(scheduler=scheduler)
            for step in range(context.step, 4):
                train(model, optimizer, range(step, step + 1))
                scheduler.step()
                if step == 1 and resume is None:
                    rayzero.save_checkpoint(optimizer, tmp_path / "two")
            assert [len(state) for _, state in sorted(optimizer.state_dict()["state"].items())] == [2] * 6 + [3] * 15
            return rayzero.full_state_dict(model)

    assert same_bits(train_on(None), train_on(tmp_path / "two"))


class Counting(torch.optim.SGD):
    """Writes into its groups: counts its steps, and warms up."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in (each for each in group["params"] if each.grad is not None):
                p.sub_(p.grad * (group["lr"] * min(1.0, group["steps"] / 4)))


def muon_and_counting(model: nn.Module) -> Optimizers:
    matrices, others = divided(model)
    return [torch.optim.Muon(matrices), Counting(others, lr=0.1)]


@pytest.mark.parametrize("settings", [{}, {"offload_fraction": 0.5}])
def test_one_that_writes_into_its_groups_and_owners_beside_ranks(settings: Any, alone: RankContext) -> None:
    model, optimizer, _ = prepared(muon_and_counting, config=ZeroConfig(**settings))
    train(model, optimizer, range(3))
    assert same_bits(rayzero.full_state_dict(model), plain(muon_and_counting, 3, 1))
    assert [group.get("steps") for group in optimizer.param_groups] == [None, 3]


def three(model: nn.Module) -> Optimizers:
    """Two are of one class, and the list is not in the order of the model."""
    matrices, others = divided(model)
    return [torch.optim.AdamW(others[::2], lr=2e-3), torch.optim.Muon(matrices), torch.optim.AdamW(others[1::2])]


def test_two_of_three_may_be_of_one_class(alone: RankContext) -> None:
    model, optimizer, given = prepared(three)
    train(model, optimizer, range(3))
    assert same_bits(rayzero.full_state_dict(model), plain(three, 3, 1))
    assert [len(each.param_groups) for each in given] == [1, 1, 1]
    sizes = [len(each.state_dict()["state"]) for each in given]
    assert sizes == [len(each.param_groups[0]["params"]) for each in given]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", [muon_and_adamw, lambda model: [torch.optim.SGD(model.parameters(), momentum=0.9)]])
def test_each_of_those_given_drops_its_gradients(make: Any, set_to_none: bool, alone: RankContext) -> None:
    """Between two steps, as loops over plain ones do; and refused by name where a step's gradients have gone."""
    model, optimizer, given = prepared(make)
    theirs = copy.deepcopy(BASE)
    fresh = make(theirs)
    for of, steps, dropping in ((model, [optimizer], given), (theirs, fresh, fresh)):
        for step in range(3):
            for each in dropping:
                each.zero_grad(set_to_none=set_to_none)
            token_loss(of, tokens(step)).backward()
            for each in steps:
                each.step()
    assert same_bits(rayzero.full_state_dict(model), theirs.state_dict())
    optimizer.zero_grad()
    token_loss(model, tokens(3)).backward()
    if len(given) == 1:
        given[0].zero_grad()
    else:
        with pytest.raises(
            GradientAccessError, match=r"zero_grad\(\) was called on a part of the model, .* has already"
        ):
            given[0].zero_grad()
        optimizer.zero_grad()
    optimizer.step()
    assert same_bits(rayzero.full_state_dict(model), theirs.state_dict())


# ---- groups and states


Prepared = tuple[nn.Module, ZeroOptimizer, Optimizers]


def prepared(make: Any = muon_and_adamw, **settings: Any) -> Prepared:
    model = copy.deepcopy(BASE)
    given = make(model)
    return *rayzero.prepare(model, given, **settings), given


def test_one_optimizer_has_all_groups_and_each_says_its_class(alone: RankContext) -> None:
    _, optimizer, (muon, adamw) = prepared()
    assert [group["optimizer"] for group in optimizer.param_groups] == [MUON, ADAMW, ADAMW]
    assert [len(each.param_groups) for each in (muon, adamw)] == [1, 2]
    assert adamw.param_groups[1] is optimizer.param_groups[2]
    assert repr(optimizer) == "ZeroOptimizer of Muon and AdamW at step 0"
    assert optimizer.classes == f"{ADAMW}, {MUON}"


def test_each_has_torchs_state_and_plain_ones_load_it(alone: RankContext) -> None:
    ours, optimizer, given = prepared()
    train(ours, optimizer, range(3))
    model = copy.deepcopy(BASE)
    model.load_state_dict(rayzero.full_state_dict(ours))
    fresh = muon_and_adamw(model)
    for mine, theirs in zip(given, fresh, strict=True):
        theirs.load_state_dict(mine.state_dict())
    train_plain(model, fresh, range(3, 5))
    train(ours, optimizer, range(3, 5))
    assert same_bits(rayzero.full_state_dict(ours), model.state_dict())
    for mine, theirs in zip(given, fresh, strict=True):
        expected, found = theirs.state_dict(), mine.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for key, state in expected["state"].items():
            assert list(found["state"][key]) == list(state)
            assert all(torch.equal(torch.as_tensor(found["state"][key][name]), value) for name, value in state.items())


def test_each_loads_what_a_plain_one_saved_and_leaves_the_others_alone(alone: RankContext) -> None:
    model, optimizer, given = prepared()
    train(model, optimizer, range(2))
    trained = rayzero.full_state_dict(model)
    saved = [copy.deepcopy(each.state_dict()) for each in given]
    whole = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    expected = rayzero.full_state_dict(model)
    for load in (
        lambda: [each.load_state_dict(state) for each, state in zip(given, saved, strict=True)],
        lambda: optimizer.load_state_dict(whole),
        lambda: optimizer.load_state_dict(  # as someone merged it from two files
            {**whole, "param_groups": [{k: v for k, v in g.items() if k != "optimizer"} for g in whole["param_groups"]]}
        ),
    ):
        load()
        model.load_state_dict(trained)
        assert [group["optimizer"] for group in optimizer.param_groups] == [MUON, ADAMW, ADAMW]
        train(model, optimizer, range(2, 4))
        assert same_bits(rayzero.full_state_dict(model), expected)
    with pytest.raises(ValueError, match="other parameter groups"):
        given[1].load_state_dict(saved[0])
    whole["param_groups"][0]["optimizer"] = ADAMW
    with pytest.raises(ConfigError, match=f"group 0 of the optimizer state is of {ADAMW}, but the optimizer's is of"):
        optimizer.load_state_dict(whole)


@pytest.mark.parametrize("early", [True, False])
def test_a_scheduler_over_either_one_sets_its_rates(early: bool, alone: RankContext) -> None:
    def schedulers(optimizers: Optimizers) -> list[Any]:
        return [torch.optim.lr_scheduler.ExponentialLR(each, 0.5 + at / 4) for at, each in enumerate(optimizers)]

    ours, theirs = copy.deepcopy(BASE), copy.deepcopy(BASE)
    given, fresh = muon_and_adamw(ours), muon_and_adamw(theirs)
    plain_ones = schedulers(fresh)
    made = schedulers(given) if early else []
    model, optimizer = rayzero.prepare(ours, given)
    made = made or schedulers(given)
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        train_plain(theirs, fresh, range(step, step + 1))
        for scheduler in made + plain_ones:
            scheduler.step()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())  # makes new groups
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for each in fresh for g in each.param_groups]
    assert same_bits(rayzero.full_state_dict(model), theirs.state_dict())


@pytest.mark.parametrize("through", ["returned", "given"])
def test_a_group_added_later_is_of_the_class_that_it_says(through: str, alone: RankContext) -> None:
    def without_the_norm(model: nn.Module) -> Optimizers:
        muon, adamw = muon_and_adamw(model)
        group = adamw.param_groups[1]
        group["params"] = [param for param in group["params"] if param is not model.norm.bias]
        return [adamw, muon]

    model, optimizer, (adamw, muon) = prepared(without_the_norm)
    group = {"params": [model.norm.bias], "lr": 3e-3}
    with pytest.raises(ConfigError, match=r"has None as 'optimizer'; give it one of .*AdamW, .*Muon, or call"):
        optimizer.add_param_group(dict(group))
    with pytest.raises(UnsupportedError, match=r"Muon takes matrices only, and 'norm.bias' has shape \(64,\)"):
        muon.add_param_group(dict(group))
    if through == "given":
        adamw.add_param_group(dict(group))
    else:
        optimizer.add_param_group({**group, "optimizer": ADAMW})
    assert adamw.param_groups[-1] is optimizer.param_groups[-1]
    assert len(muon.param_groups) == 1
    train(model, optimizer, range(2))
    theirs = copy.deepcopy(BASE)
    fresh = without_the_norm(theirs)
    fresh[0].add_param_group({"params": [theirs.norm.bias], "lr": 3e-3})
    train_plain(theirs, fresh, range(2))
    assert same_bits(rayzero.full_state_dict(model), theirs.state_dict())
    assert adamw.state_dict()["state"].keys() == fresh[0].state_dict()["state"].keys()
    optimizer.param_groups[0]["optimizer"] = MUON
    with pytest.raises(UnsupportedError, match="group 0 of the optimizer has another 'optimizer' than"):
        optimizer.step()


# ---- checkpoints


@pytest.mark.promise("recoverable", "optimizers")
@pytest.mark.spread(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_interrupted_at_any_step_goes_on_with_the_same_bits(precision: str, tmp_path: Path) -> None:
    config = ZeroConfig(precision=precision, shard_bytes=16 << 10)

    def resumed(context: RankContext, path: Path | None, steps: int) -> dict[str, Tensor]:
        model = copy.deepcopy(BASE)
        given = muon_and_adamw(model)
        model, optimizer = rayzero.prepare(model, given, config, resume=path)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in given]
        rayzero.track(muon=schedulers[0], adamw=schedulers[1])
        for step in range(context.step, steps):
            train(model, optimizer, range(step, step + 1), context.rank)
            for scheduler in schedulers:
                scheduler.step()
            if path is None:
                rayzero.save_checkpoint(optimizer, tmp_path / f"step-{step + 1}")
        return rayzero.full_state_dict(model)

    expected, _ = run_ranks(functools.partial(resumed, path=None, steps=4), 2, 2)
    for step in range(1, 4):
        each = functools.partial(resumed, path=tmp_path / f"step-{step}", steps=4)
        for state in run_ranks(each, 2, 1 + step % 3):
            assert same_bits(state, expected)


@pytest.mark.parametrize("ways", [["rayzero"], ["dcp", "rayzero"]])
def test_a_checkpoint_that_is_loaded_or_converted_goes_on_with_the_same_bits(ways: list[str], tmp_path: Path) -> None:
    def save() -> dict[str, Tensor]:
        with running_in(RankContext()):
            model, optimizer, _ = prepared()
            train(model, optimizer, range(2))
            rayzero.save_checkpoint(optimizer, tmp_path / "first")
            train(model, optimizer, range(2, 4))
            expected = rayzero.full_state_dict(model)
            load_checkpoint(optimizer, tmp_path / "first")  # in the middle of a run
            train(model, optimizer, range(2, 4))
            assert same_bits(rayzero.full_state_dict(model), expected)
            return expected

    expected, path = save(), tmp_path / "first"
    for number, way in enumerate(ways):
        path = convert(path, tmp_path / f"{number}", to=way).path
    with running_in(RankContext()):
        model, optimizer, _ = prepared(resume=path)
        assert [group["optimizer"] for group in optimizer.param_groups] == [MUON, ADAMW, ADAMW]
        train(model, optimizer, range(2, 4))
        assert same_bits(rayzero.full_state_dict(model), expected)


def sgd_and_muon(model: nn.Module) -> Optimizers:
    """As ``muon_and_sgd``, but one matrix is SGD's. Both classes keep a ``momentum_buffer``."""
    matrices, others = divided(model)
    return [torch.optim.SGD([*others, matrices[0]], momentum=0.9), torch.optim.Muon(matrices[1:])]


def muon_and_sgd(model: nn.Module) -> Optimizers:
    matrices, others = divided(model)
    return [torch.optim.Muon(matrices), torch.optim.SGD(others, momentum=0.9)]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (muon_and_adamw, r"was (updated by torch.optim.sgd:SGD in .*|written with .*sgd:SGD, torch.optim:Muon'), but"),
        (sgd_and_muon, r"'layers.0.up.weight' was updated by torch.optim:Muon in .*, but by torch.optim.sgd:SGD"),
        (lambda model: torch.optim.SGD(model.parameters(), momentum=0.9), r"but this run has 'torch.optim.sgd:SGD'"),
    ],
)
def test_a_checkpoint_of_other_classes_is_refused_by_name(make: Any, says: str, tmp_path: Path) -> None:
    with running_in(RankContext()):
        model, optimizer, _ = prepared(muon_and_sgd)
        train(model, optimizer, range(1))
        rayzero.save_checkpoint(optimizer, tmp_path / "one")
    with running_in(RankContext()), pytest.raises(CheckpointError, match=says):
        prepared(make, resume=tmp_path / "one")
    with running_in(RankContext()):
        _, optimizer, _ = prepared(make)
        with pytest.raises(CheckpointError, match=says):
            load_checkpoint(optimizer, tmp_path / "one")


# ---- refusals


def hooked(model: nn.Module) -> Optimizers:
    muon, adamw = muon_and_adamw(model)
    adamw.register_step_post_hook(lambda *_: None)
    return [muon, adamw]


def stepped(model: nn.Module) -> Optimizers:
    muon, adamw = muon_and_adamw(model)
    token_loss(model, tokens(0)).backward()
    adamw.step()
    return [muon, adamw]


class Scaled(torch.optim.SGD):
    def __init__(self, params: Any, scale: float) -> None:
        super().__init__(params, lr=0.1)
        self.scale = scale


Make = Callable[[nn.Module], Any]
REFUSED: dict[str, tuple[Make, type[Exception], str]] = {
    "none": (lambda model: [], ConfigError, "a list of optimizers was empty"),
    "strangers": (lambda model: [*muon_and_adamw(model), 3], ConfigError, r"optimizer must be a .*, got int"),
    "shared": (
        lambda model: [*muon_and_adamw(model), torch.optim.SGD([model.norm.bias])],
        UnsupportedError,
        r"'norm.bias' is in two of the optimizers, AdamW \(number 1\) and SGD \(number 2\); give each parameter to one",
    ),
    "another model's": (
        lambda model: [*muon_and_adamw(model), torch.optim.SGD([nn.Parameter(torch.zeros(3))])],
        UnsupportedError,
        r"parameter 0 of the optimizer's group 3 \(shape \(3,\)\) is not in the model",
    ),
    "hooks": (hooked, UnsupportedError, "AdamW, one of several optimizers, has hooks.* register them on the optimizer"),
    "stepped": (stepped, UnsupportedError, "the optimizer has stepped already"),
    "vectors": (
        lambda model: [torch.optim.SGD(divided(model)[0]), Matrices(divided(model)[1])],
        UnsupportedError,
        r"Matrices takes matrices only, and 'layers.0.norm.weight' has shape \(64,\)",
    ),
    "attributes": (
        lambda model: [Scaled(params, scale) for params, scale in zip(divided(model), (1.0, 2.0), strict=True)],
        UnsupportedError,
        "two optimizers of the class .*Scaled have different attributes",
    ),
    "hybrid": (
        lambda model: [torch.optim.Muon(divided(model)[0]), rayzero.HybridDeviceOptimizer(divided(model)[1])],
        UnsupportedError,
        "HybridDeviceOptimizer",
    ),
}


class Matrices(torch.optim.SGD):
    """Takes matrices only, and says so when it steps."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if any(param.dim() != 2 for group in self.param_groups for param in group["params"]):
            raise ValueError("matrices only")
        super().step()


@pytest.mark.promise("refused", "optimizers")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(name: str, alone: RankContext) -> None:
    make, error, says = REFUSED[name]
    model = copy.deepcopy(BASE)
    given = make(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=says):
        rayzero.prepare(model, given)
    assert same_bits(model.state_dict(), before), "and nothing has changed"
    rayzero.prepare(model, muon_and_adamw(model))
