"""A step cut in two at torch's Newton-Schulz: for which classes it is the class's own, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import _muon

from rayzero.errors import UnsupportedError
from rayzero.kernels.newton_schulz import answer_from, answered, as_product, newton_schulz, require_divided
from rayzero.kernels.optimizer_class import OptimizerMaker

NEWTON = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}
MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": None, **NEWTON}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
        {"momentum": 0.0, "ns_coefficients": [2.0, -1.5, 0.5]},
    ],
)
def test_torchs_muon_can_be_cut(options: Any) -> None:
    require_divided(OptimizerMaker(torch.optim.Muon), [MUON | options])


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (40, 40)])
def test_what_comes_out_of_a_bf16_matrix_has_the_bits_and_strides_of_the_fp32_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape)
    made, ours = newton_schulz(matrix, NEWTON), newton_schulz(matrix.bfloat16(), NEWTON)
    assert torch.equal(made, ours)
    assert as_product(torch.empty(made.numel(), dtype=torch.bfloat16), shape).stride() == made.stride()


def stepping(name: str, update: Callable[[Tensor], Tensor]) -> type[torch.optim.Muon]:
    """A class whose steps add this, made of the gradient."""

    @torch.no_grad()
    def step(self: torch.optim.Muon, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(update(param.grad))

    return type(name, (torch.optim.Muon,), {"step": step})


def iterated(matrix: Tensor, steps: int = 5) -> Tensor:
    return _muon._zeropower_via_newtonschulz(matrix, NEWTON["ns_coefficients"], steps, 1e-7)


OWN = stepping("Own", lambda grad: -0.02 * grad)  # an iteration of its own
TWICE = stepping("Twice", lambda grad: iterated(iterated(grad)))
OTHER_STEPS = stepping("OtherSteps", lambda grad: iterated(grad, 2))  # not as many as its groups say


@pytest.mark.promise("refused", "optimizers")
@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (OWN, r"Own with torch .* does not call torch's Newton-Schulz; set matrix_updates='owner'"),
        (TWICE, "does not call torch's Newton-Schulz once, and with the same matrix each time"),
        (OTHER_STEPS, "has other bits if its Newton-Schulz is computed before its step"),
    ],
)
def test_a_class_whose_steps_would_be_others_is_refused_by_name(cls: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        require_divided(OptimizerMaker(cls), [MUON])


def test_an_optimizer_without_newton_schulz_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"is for torch.optim.Muon, and torch.optim.adamw.AdamW has no group"):
        require_divided(OptimizerMaker(torch.optim.AdamW), [{"lr": 1e-3}])


def test_a_torch_that_calls_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(params: Any, grads: Any, *_: Any, lr: float, **__: Any) -> None:
        for param, grad in zip(params, grads, strict=True):
            param.add_(grad, alpha=-lr)

    monkeypatch.setattr(_muon, "_single_tensor_muon", other)
    with pytest.raises(UnsupportedError, match="does not call torch's Newton-Schulz"):
        require_divided(OptimizerMaker(torch.optim.Muon), [MUON])


def test_an_answer_is_for_this_thread_and_for_this_matrix_alone() -> None:
    ours, other = torch.randn(8, 12), torch.randn(8, 12)
    told = torch.full((8, 12), 0.5, dtype=torch.bfloat16)
    unused = [(ours.bfloat16(), told)]
    with answered(answer_from(unused)) as computed:
        found = [_muon._zeropower_via_newtonschulz(each, *NEWTON.values()) for each in (ours, other)]
    assert found[0] is told
    assert torch.equal(found[1], newton_schulz(other, NEWTON))
    assert (unused, len(computed)) == ([], 1)
    assert torch.equal(_muon._zeropower_via_newtonschulz(ours, *NEWTON.values()), newton_schulz(ours, NEWTON))
