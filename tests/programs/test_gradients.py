"""Gradients between steps: what drops them, and what becomes of a loop that does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from engine.models import token_loss
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Run
from .engines import Setting


def dropped_by(drop: Callable[[Run], None], run: Run) -> None:
    """Three steps, the gradients dropped in another way than by the optimizer."""
    for step in range(3):
        token_loss(run.model, run.batch(step)).backward()
        run.optimizer.step()
        drop(run)


def by_hand(run: Run) -> None:
    for param in run.model.parameters():
        param.grad = None


def by_deleting(run: Run) -> None:
    for param in run.model.parameters():
        del param.grad


def by_parts(run: Run) -> None:
    for module in run.model.children():
        module.zero_grad()


def by_outer_module(run: Run) -> None:
    nn.Sequential(run.model).zero_grad()


def taken_back(run: Run) -> None:
    """The model's zero_grad() drops gradients that have been pushed."""
    for step in range(2):
        token_loss(run.model, run.batch(10 + step)).backward()
        run.model.zero_grad()
        token_loss(run.model, run.batch(step)).backward()
        run.optimizer.step()
        run.model.zero_grad(set_to_none=True)


def zeros(run: Run) -> None:
    """Zero gradients decay and move moments, as absent ones do not."""
    token_loss(run.model, run.batch(0)).backward()
    run.optimizer.step()
    run.model.zero_grad(set_to_none=False)
    F.relu(run.model.layers[0](run.model.embed(run.batch(1)[0]))).sum().backward()
    run.optimizer.step()
    run.model.zero_grad()


def zeroed_then(drop: Callable[[Run], None], run: Run) -> None:
    """A gradient that was zero is absent once it is dropped: momentum and decay leave its parameter alone."""
    token_loss(run.model, run.batch(0)).backward()
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=False)
    drop(run)
    run.optimizer.step()
    run.optimizer.zero_grad()


def first_part(run: Run) -> None:
    run.model.layers[0].zero_grad()


def zeroed_by_hand(run: Run) -> None:
    """Gradients that were set by hand are zero after zero_grad(set_to_none=False), and not absent."""
    token_loss(run.model, run.batch(0)).backward()
    run.update()
    for param in run.model.parameters():
        param.grad = torch.ones_like(param)
    run.optimizer.zero_grad(set_to_none=False)
    run.optimizer.step()
    run.optimizer.zero_grad()


def zeroed_before_the_step(run: Run) -> None:
    for step in range(2):
        token_loss(run.model, run.batch(step)).backward()
        run.optimizer.zero_grad(set_to_none=False)
        run.optimizer.step()
        run.optimizer.zero_grad()


class Judge(nn.Module):
    """A score for each row of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, logits: Tensor) -> Tensor:
        return self.layers(F.pad(logits, (0, 64 - logits.shape[-1])))


def generator_after_critic(run: Run) -> None:
    """The usual GAN loop: the generator's backward reaches the critic, whose old gradients are dropped later."""
    (critic,) = run.others
    for step in range(3):
        critic.optimizer.zero_grad()
        logits = run.model(run.batch(step)[0])
        critic.model(logits.detach()).float().mean().backward()
        critic.optimizer.step()
        run.optimizer.zero_grad()
        critic.model(logits).float().square().mean().backward()
        run.optimizer.step()


def never_dropped(run: Run) -> None:
    for step in range(2):
        token_loss(run.model, run.batch(step)).backward()
        run.optimizer.step()


def clipped_without_dropping(run: Run) -> None:
    for step in range(2):
        token_loss(run.model, run.batch(step)).backward()
        run.clip(1.0)
        run.optimizer.step()


def stepped_twice(run: Run) -> None:
    token_loss(run.model, run.batch(0)).backward()
    run.optimizer.step()
    run.optimizer.step()


def part_dropped(run: Run) -> None:
    token_loss(run.model, run.batch(0)).backward()
    run.model.layers[0].zero_grad()


STALE = (
    r"was not zeroed after the last step\(\), which applied its gradient\. "
    r".* optimizer\.zero_grad\(\) between step\(\) and"
)

# In fp32 alone where the oracle of lower precisions, which sums gradients beside the model, does not see the call.
CASES = [
    Case("model.zero_grad()", partial(dropped_by, lambda run: run.model.zero_grad())),
    Case("zero_grad() of each part, between steps", partial(dropped_by, by_parts)),
    Case("zero_grad() of a module around the model", partial(dropped_by, by_outer_module)),
    Case("param.grad = None, between steps", partial(dropped_by, by_hand)),
    Case("del param.grad, between steps", partial(dropped_by, by_deleting)),
    Case("model.zero_grad() takes back a backward", taken_back, precisions=("fp32",)),
    Case("model.zero_grad(set_to_none=False)", zeros, precisions=("fp32",)),
    Case("zero gradients that are set to None by hand", partial(zeroed_then, by_hand), precisions=("fp32",)),
    Case("zero gradients of which a part is dropped", partial(zeroed_then, first_part), precisions=("fp32",)),
    Case("gradients set by hand, then zero", zeroed_by_hand, precisions=("fp32",)),
    Case("gradients made zero before the step", zeroed_before_the_step, precisions=("fp32",)),
    Case(
        "gradients that wait on the device made zero before the step",
        zeroed_before_the_step,
        precisions=("fp32",),
        settings={"offload_grads": False},
    ),
    Case("a GAN's loop, which drops the critic's gradients late", generator_after_critic, others=(Judge,), backwards=2),
    Case("no zero_grad()", never_dropped, refused=STALE),
    Case("no zero_grad(), clipped", clipped_without_dropping, refused=STALE),
    Case("step() twice", stepped_twice, refused=STALE),
    Case(
        "zero_grad() of a part after backward",
        part_dropped,
        refused=r"zero_grad\(\) was called on a part of the model, but the gradient of 'layers.0.\w+.\w+' has already "
        "gone to the optimizer owners",
    ),
]


@pytest.mark.spread(7)
def test_trains_as_unsharded(case: Case, setting: Setting, check: Callable[[Case, Setting], None]) -> None:
    check(case, setting)
