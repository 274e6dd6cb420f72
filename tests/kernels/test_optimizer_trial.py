"""What the trial of an optimizer class finds: classes that change their minds by size, shape, direction or time."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rayzero.errors import UnsupportedError
from rayzero.kernels.optimizer_class import GroupEntries, OptimizerMaker, plain_value
from rayzero.kernels.optimizer_trial import require_owned, try_class
from rayzero.protocol.messages import canonical_json

OPTIONS = {"lr": 0.1}


class Each(torch.optim.Optimizer):
    """Descends by what ``direction`` says for each parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad

    def begin(self, group: dict[str, Any]) -> None:
        """Called once a step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, p.grad, self.state[p], group))


Direction = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], Tensor]


def going(direction: Direction) -> type[Each]:
    """A class whose steps go in this direction."""
    return type("Going", (Each,), {"direction": lambda self, *given: direction(*given)})


def in_blocks(p: Tensor, grad: Tensor, state: Any, group: Any) -> Tensor:
    """From 4,096 elements on, an element's step depends on its block of 256, as states in 8 bits do."""
    if p.numel() < 4096:
        return grad
    flat = grad.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-9)
    return ((blocks / scale * 127).round() / 127 * scale).view(-1)[: flat.numel()].view_as(grad)


def centred_if(when: Callable[..., bool]) -> Direction:
    return lambda p, grad, state, group: grad - grad.mean() if when(p, state, group) else grad


def every_tenth(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
    state["count"] = state.get("count", 0) + 1
    return state["count"] % 10 == 0


def cosine(p: Tensor, grad: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(grad.reshape(1, -1), p.reshape(1, -1)).abs()


MIXES: dict[str, Direction] = {
    "in blocks of large parameters": in_blocks,
    "large matrices": lambda p, grad, *_: grad / grad.norm(dim=0) if p.dim() == 2 and min(p.shape) >= 128 else grad,
    "tall matrices": centred_if(lambda p, *_: p.dim() == 2 and p.shape[0] > p.shape[1]),
    "wide matrices": centred_if(lambda p, *_: p.dim() == 2 and p.shape[0] < p.shape[1]),
    "filters": centred_if(lambda p, *_: p.dim() == 4),
    "single numbers": lambda p, grad, *_: torch.zeros_like(grad) if p.dim() == 0 else grad,
    "gradients orthogonal to weights": lambda p, grad, *_: grad * 0.5 if cosine(p, grad) < 1e-6 else grad,
    "gradients along weights": lambda p, grad, *_: grad * (1 + 1e-3 * p.norm()) if cosine(p, grad) > 0.99 else grad,
    "large gradients": lambda p, grad, *_: grad / max(1.0, float(grad.square().mean().sqrt()) / 5),
    "every tenth step": centred_if(every_tenth),
    "after the rate has changed": centred_if(
        lambda p, state, group: group["lr"] < 0.9 * state.setdefault("first", float(torch.tensor(group["lr"])))
    ),
}


@pytest.mark.parametrize("mixes", MIXES)
def test_a_class_that_mixes_elements_now_and_then_gets_whole_parameters(mixes: str) -> None:
    make = OptimizerMaker(going(MIXES[mixes]))
    assert require_owned(make, OPTIONS).whole
    with pytest.raises(UnsupportedError, match="Going needs whole parameters with these options"):
        require_owned(make, OPTIONS, whole=False)


class Late(Each):
    """Keeps something of rows from its second step on."""

    def direction(self, p, grad, state, group):
        if "first" in state:
            state["second"] = torch.zeros(p.shape[:1])
        state["first"] = True
        return grad


class Queue(Each):
    def direction(self, p, grad, state, group):
        state.setdefault("queue", deque(maxlen=2)).append(grad.clone())
        return state["queue"][0]


class Fp64(Each):
    def direction(self, p, grad, state, group):
        state["mean"] = state.get("mean", torch.zeros_like(p, dtype=torch.float64)) * 0.9 + grad
        return state["mean"].float()


class Beside(Each):
    def direction(self, p, grad, state, group):
        self.state["average"] = {"short": 1.0}
        return grad


class LongNumber(Each):
    def direction(self, p, grad, state, group):
        state["product"] = (state.get("product", 1) * 101 + 7) % (1 << 30)
        return grad * float(state["product"] % 7)


class CountsInAttribute(Each):
    """Halves its steps from the fifth on, and counts them where no checkpoint looks."""

    count = 0

    def begin(self, group):
        self.count += 1

    def direction(self, p, grad, state, group):
        return grad if self.count < 5 else grad * 0.5


class RemembersFirst(Each):
    """Keeps beside its states what each parameter was at first."""

    def direction(self, p, grad, state, group):
        self.first = getattr(self, "first", {})
        return grad + self.first.setdefault(p, p.clone())


class CountsInGroup(Each):
    def begin(self, group):
        group["count"] = group.get("count", 0) + 1
        group["warm"] = min(1.0, group["count"] / 5) * group["lr"]

    def direction(self, p, grad, state, group):
        return grad * group["warm"] / group["count"]


class SumsInGroup(Each):
    """Writes into its group what it knows of the gradients."""

    def begin(self, group):
        group["sum"] = group.get("sum", 0.0) + sum(float(p.grad.sum()) for p in group["params"] if p.grad is not None)


class CountsBeside(Each):
    """Writes into its group what it counts in an attribute, and does not look at it."""

    count = 0

    def begin(self, group):
        self.count += 1
        group["count"] = self.count


def test_entries_of_groups_that_a_step_writes_are_found_and_can_be_written_elsewhere() -> None:
    assert require_owned(OptimizerMaker(CountsInGroup), OPTIONS).writes == ("count", "warm")
    entries, group = GroupEntries(OptimizerMaker(CountsInGroup), [OPTIONS]), {**OPTIONS, "count": 1, "mine": "x"}
    entries.step([group])
    assert group == {**OPTIONS, "count": 2, "mine": "x", "warm": 0.1 * 0.4}


class CountsInTensor(Each):
    """Counts in a tensor of its group, in place."""

    def begin(self, group):
        if "count" not in group:
            group["count"] = torch.tensor(0, dtype=torch.int32)
        group["count"].add_(1)

    def direction(self, p, grad, state, group):
        return grad / group["count"]


def test_a_count_in_a_tensor_stays_one_and_is_nobody_elses() -> None:
    assert require_owned(OptimizerMaker(CountsInTensor), OPTIONS).writes == ("count",)
    count = torch.tensor(4, dtype=torch.int32)
    group = {**OPTIONS, "count": count}
    entries = GroupEntries(OptimizerMaker(CountsInTensor), [OPTIONS])
    entries.step([group])
    entries.step([group])
    assert torch.equal(group["count"], torch.tensor(6, dtype=torch.int32))
    assert group["count"].dtype == torch.int32
    assert count == 4
    # an optimizer that has counted already is tried with its count
    told = {name: plain_value(value, name) for name, value in group.items()}
    assert json.loads(canonical_json(told)) == told
    assert require_owned(OptimizerMaker(CountsInTensor), told).writes == ("count",)


class GlobalNorm(Each):
    def begin(self, group):
        self.norm = torch.stack([p.grad.norm() for p in group["params"] if p.grad is not None]).norm()

    def direction(self, p, grad, state, group):
        return grad / self.norm


class MatricesOnly(Each):
    def begin(self, group):
        group["count"] = group.get("count", 0) + 1

    def direction(self, p, grad, state, group):
        if p.dim() != 2:
            raise ValueError("matrices only")
        return grad - grad.mean()


def test_a_class_that_takes_matrices_only_is_tried_with_matrices() -> None:
    verdict = require_owned(OptimizerMaker(MatricesOnly), OPTIONS)
    assert (verdict.whole, verdict.writes) == (True, ("count",))


class Noisy(Each):
    def direction(self, p, grad, state, group):
        return grad + torch.randn_like(grad)


class TensorRate(Each):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = torch.tensor(self.param_groups[-1]["lr"])


class NeedsArgument(Each):
    def __init__(self, params: Any, size: int) -> None:
        super().__init__(params)


class NeverWithout(torch.optim.Optimizer):
    """Does not look whether there is a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


def test_a_class_that_needs_every_gradient_is_accepted() -> None:
    assert not try_class(OptimizerMaker(NeverWithout), OPTIONS).whole


class Counted(Each):
    made = 0

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        type(self).made += 1


def test_a_class_is_tried_once_with_the_same_options_and_attributes() -> None:
    require_owned(OptimizerMaker(Counted), OPTIONS)
    made = Counted.made
    require_owned(OptimizerMaker(Counted), dict(OPTIONS))
    assert Counted.made == made
    require_owned(OptimizerMaker(Counted, {"flag": True}), OPTIONS)
    require_owned(OptimizerMaker(Counted), {"lr": 0.2})
    assert Counted.made > made + 1


def test_torchs_hooks_for_all_optimizers_do_not_run_in_a_trial() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    calls: list[Any] = []
    hooks = [
        register(lambda *given: calls.append(given))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        require_owned(OptimizerMaker(torch.optim.SGD), {"lr": 0.321, "momentum": 0.5})
    finally:
        for hook in hooks:
            hook.remove()
    assert not calls


class Made8bit(Each):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        raise TypeError("32 bits only")


class ByPlace(Each):
    """Later parameters of a group take smaller steps."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for place, p in enumerate(group["params"]):
                    if p.grad is not None:
                        p.sub_(group["lr"] * 0.5**place * p.grad)


class ByFirstGroup(Each):
    """Takes the first group's rate for all."""

    def direction(self, p, grad, state, group):
        return grad * (self.param_groups[0]["lr"] / group["lr"])


class ByGroups(Each):
    def direction(self, p, grad, state, group):
        return grad / len(self.param_groups)


class DecaysAll(Each):
    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)


class CountsAll(Each):
    """Counts steps of parameters that had no gradient, too."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
        super().step()

    def direction(self, p, grad, state, group):
        return grad / state["count"]


class LowersAtZeroGrad(Each):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            group["lr"] *= 0.5


REFUSED = {
    Late: "cannot run on shards: second of what it keeps have another form after a parameter's first update",
    Queue: "cannot run on shards: it keeps 'queue', which is a deque",
    Beside: "cannot run on shards: it keeps 'average' beside the states of parameters",
    Fp64: "cannot run on shards: it keeps 'mean' in torch.float64",
    LongNumber: "cannot run on shards: it keeps product as an integer that fp32 would round",
    CountsInAttribute: r"cannot be offloaded: .* it mixes parameters, or keeps .* they do not share \(count\)",
    RemembersFirst: r"cannot run on shards: .* made again from its states.* changes its attributes first",
    SumsInGroup: r"cannot be offloaded: step\(\) writes sum of its parameter groups from gradients",
    CountsBeside: r"cannot be offloaded: step\(\) writes count of its parameter groups",
    GlobalNorm: "cannot be offloaded: parameters get other values in instances of their own: it mixes parameters, or "
    r"keeps .* \(norm\)",
    Noisy: "cannot be offloaded: two equal trials gave different weights: it draws random numbers",
    TensorRate: "cannot be offloaded: it turns lr of its parameter groups into tensors",
    NeedsArgument: r"cannot be offloaded: owners make instances of it from what .* say \(lr\), and its constructor "
    "then raised TypeError",
    Made8bit: r"cannot be offloaded: .*for fewer bytes torch\.optim\.AdamW with ZeroConfig\(moments='int8'\)",
    ByPlace: "cannot be offloaded: .* it mixes parameters",
    ByFirstGroup: "cannot be offloaded: .* it mixes parameters",
    ByGroups: "cannot be offloaded: .* it mixes parameters",
    DecaysAll: "cannot be offloaded: .*without a gradient",
    CountsAll: "cannot be offloaded: .*without a gradient",
    LowersAtZeroGrad: r"cannot be offloaded: its zero_grad\(\) changes lr of its parameter",
}


@pytest.mark.parametrize("cls", REFUSED)
def test_what_owners_cannot_run_is_refused_with_the_reason(cls: type[Each]) -> None:
    with pytest.raises(UnsupportedError, match=f"{cls.__name__} {REFUSED[cls]}"):
        require_owned(OptimizerMaker(cls), OPTIONS)
