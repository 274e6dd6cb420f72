"""Training programs: what people's loops do around the step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from engine.models import VOCAB, Critic, Net, token_loss, tokens
from engine.schedules import SCHEDULERS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .case import Case, Run, steps
from .engines import Setting

# ---- batches ----------------------------------------------------------------------------------------------------


@steps
def accumulate(run: Run, step: int) -> None:
    """Three micro-batches a step."""
    for micro in range(3):
        (token_loss(run.model, run.batch(10 * step + micro)) / 3).backward()


@partial(steps, count=3)
def other_numbers_of_micro_batches(run: Run, step: int) -> None:
    """Ranks take turns at having none, one or two."""
    for micro in range((run.rank + step) % 3):
        token_loss(run.model, run.batch(10 * step + micro)).backward()


@partial(steps, count=3)
def other_batch_sizes(run: Run, step: int) -> None:
    """Another size and length on every rank and in every step."""
    token_loss(run.model, tokens(step, run.rank, size=1 + (run.rank + step) % 3, length=5 + 2 * step)).backward()


@steps
def averaged_by_tokens(run: Run, step: int) -> Tensor:
    """Micro-batches of different lengths; each token counts alike."""
    batches = [tokens(10 * step + micro, run.rank, length=3 + 4 * micro) for micro in range(3)]
    count = sum(targets.numel() for _, targets in batches)
    total = torch.zeros(())
    for inputs, targets in batches:
        logits = run.model(inputs).flatten(0, 1).float()
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / count
        loss.backward()
        total += loss.detach()
    return total


# ---- several models ---------------------------------------------------------------------------------------------


def adversarial(run: Run) -> list[Tensor]:
    """Two models in turn: the critic takes two steps for each of the generator's, which learns through the critic."""
    (critic,) = run.others
    seen = []
    for step in range(6):
        logits = run.model(run.batch(step)[0])
        if step % 3 == 2:
            loss = -critic.model(logits).float().tanh().mean()
        else:
            both = torch.cat([logits.detach().float(), F.one_hot(run.batch(step)[1], VOCAB).float()])
            score = critic.model(both).float().tanh()
            loss = score[:4].mean() - score[4:].mean()
        loss.backward()
        (run if step % 3 == 2 else critic).optimizer.step()
        for each in (run, critic):
            each.optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


def apart(run: Run) -> Any:
    """Two models of one shape learn from different batches; the second one every other step."""
    (other,) = run.others
    for step in range(4):
        token_loss(run.model, run.batch(step)).backward()
        run.update()
        if step % 2:
            token_loss(other.model, run.batch(10 + step)).backward()
            other.update()
    return other.full_state()


def two_models(run: Run) -> Any:
    """What both are in the end, beside the losses."""
    seen = adversarial(run)
    return seen, [other.full_state() for other in run.others]


# ---- hyper-parameters -------------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def own_groups(model: nn.Module) -> Optimizer:
    """Each group has its own lr, betas, eps and weight decay."""
    flat = [p for p in model.parameters() if p.dim() == 1]
    wide = [p for p in model.parameters() if p.dim() > 1]
    groups: list[dict[str, Any]] = [
        {"params": flat, "weight_decay": 0.0, "lr": 3e-2, "eps": 1e-6},
        {"params": wide, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)


@partial(steps, count=3)
def changed_by_hand(run: Run, step: int) -> None:
    """The loop sets lr, betas and weight decay of a group before each step."""
    token_loss(run.model, run.batch(step)).backward()
    for i, group in enumerate(run.optimizer.param_groups):
        group["lr"] = 1e-2 / (1 + step + i)
        group["betas"] = (0.9 - 0.1 * step, 0.99)
        group["weight_decay"] = 0.1 * step


def scheduled(make: Callable[[Optimizer], Any], run: Run) -> list[float]:
    """Four steps under a scheduler, which is used as torch's documentation shows; the learning rates."""
    rates = []
    for group in run.optimizer.param_groups:
        group["lr"] = 0.1
        group.pop("initial_lr", None)
    scheduler = make(run.optimizer)
    for step in range(4):
        token_loss(run.model, run.batch(step)).backward()
        run.update()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        rates.append(float(run.optimizer.param_groups[0]["lr"]))
    return rates


def every_scheduler(run: Run) -> list[list[float]]:
    """One after the other, on the same optimizer."""
    return [scheduled(make, run) for make in SCHEDULERS.values()]


# ---- clipping, loss scales, steps that are left out -------------------------------------------------------------


@partial(steps, count=3)
def clip_by_norm(run: Run, step: int) -> Tensor:
    token_loss(run.model, run.batch(step)).backward()
    return run.clip(0.1)


@partial(steps, count=3)
def clip_by_value(run: Run, step: int) -> None:
    token_loss(run.model, run.batch(step)).backward()
    run.clip_value(0.01)


@partial(steps, count=3)
def clip_by_both(run: Run, step: int) -> list[Tensor]:
    token_loss(run.model, run.batch(step)).backward()
    first = run.clip(0.5)
    run.clip_value(0.01)
    return [first, run.clip(0.1)]


def scaled_loss(run: Run) -> float:
    """torch.amp.GradScaler with unscaling by itself and by hand, then clipping; nothing overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(4):
        scaler.scale(token_loss(run.model, run.batch(step))).backward()
        if step % 2:
            scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    return scaler.get_scale()


def left_out(run: Run) -> list[bool]:
    """A loop that looks at its loss and leaves out the steps that are nan, gradients and all."""
    taken = []
    for step in range(4):
        loss = token_loss(run.model, run.batch(step)) * (math.nan if step == 1 else 1.0)
        loss.backward()
        taken.append(bool(torch.isfinite(loss)))
        if taken[-1]:
            run.optimizer.step()
        run.optimizer.zero_grad()
    return taken


def closures(run: Run) -> tuple[list[Tensor], int]:
    """step(closure): what it returns, and how often it was called."""
    losses, calls = [], 0
    for step in range(2):

        def closure(step: int = step) -> Tensor:
            nonlocal calls
            calls += 1
            run.optimizer.zero_grad()
            loss = token_loss(run.model, run.batch(step))
            loss.backward()
            return loss.detach()

        found = run.optimizer.step(closure)  # type: ignore[arg-type]
        assert isinstance(found, Tensor)
        losses.append(found)
    return losses, calls


def step_hooks(run: Run) -> list[str]:
    """torch's hooks around the step, and profiling names, are those of any optimizer."""
    seen: list[str] = []
    before = run.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    run.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for step in range(2):
        token_loss(run.model, run.batch(step)).backward()
        run.update()
        before.remove()
    return seen


# ---- between backward and step, and when something fails --------------------------------------------------------


@steps
def evaluate_between(run: Run, step: int) -> Tensor:
    """Evaluation after backward and before the step sees the old weights and leaves the gradients alone."""
    token_loss(run.model, run.batch(step)).backward()
    run.model.eval()
    with torch.no_grad():
        seen = token_loss(run.model, run.batch(100 + step))
    with torch.inference_mode():
        seen = seen + token_loss(run.model, run.batch(200 + step))
    run.model.train()
    return seen.clone()


class _Failure(Exception):
    pass


def _raise(*_: Any) -> None:
    raise _Failure


def _loader(run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    yield run.batch(0)
    raise _Failure


def failing(where: Callable[[Run], None], run: Run) -> None:
    """A right step, one in which ``where`` raises, and a right one."""
    for step in range(3):
        if step == 1:
            try:
                where(run)
            except _Failure:
                run.optimizer.zero_grad()
            else:
                raise AssertionError("it did not fail")
            continue
        token_loss(run.model, run.batch(step)).backward()
        run.update()


def in_forward(run: Run) -> None:
    hook = run.model.layers[1].register_forward_pre_hook(_raise)
    try:
        run.model(run.batch(1)[0])
    finally:
        hook.remove()


def in_backward(run: Run) -> None:
    x = run.model.layers[0](run.model.embed(run.batch(1)[0]))
    x.register_hook(_raise)
    run.model.head(run.model.norm(run.model.layers[2](x))).square().mean().backward()


def in_parameter_hook(run: Run) -> None:
    hook = run.model.layers[0].up.weight.register_hook(_raise)
    try:
        token_loss(run.model, run.batch(1)).backward()
    finally:
        hook.remove()


def in_loss(run: Run) -> None:
    token_loss(run.model, run.batch(1))
    raise _Failure


def in_loader(run: Run) -> None:
    for batch in _loader(run):
        token_loss(run.model, batch).backward()


# ---- averages of weights ----------------------------------------------------------------------------------------


def averaged_model(make: Callable[[nn.Module], AveragedModel], run: Run) -> dict[str, Tensor]:
    """torch.optim.swa_utils beside the model; what it holds after some steps."""
    average = make(run.model)
    for step in range(3):
        token_loss(run.model, run.batch(step)).backward()
        run.update()
        average.update_parameters(run.model)
    found = token_loss(average, run.batch(0)).detach()
    return {"loss": found} | {name: value.clone() for name, value in average.module.state_dict().items()}


def ema(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def own_ema(run: Run) -> list[Tensor]:
    """An average kept by hand."""
    shadow = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for step in range(2):
        token_loss(run.model, run.batch(step)).backward()
        run.update()
        with torch.no_grad():
            for name, p in run.model.named_parameters():
                shadow[name].lerp_(p, 0.1)
    return list(shadow.values())


def best_so_far(run: Run) -> dict[str, Tensor]:
    """A copy of the model taken in the middle, used at the end."""
    for step in range(3):
        token_loss(run.model, run.batch(step)).backward()
        run.update()
        if step == 0:
            best = copy.deepcopy(run.model)
    loss = token_loss(best, run.batch(9))
    loss.backward()
    return {"loss": loss.detach()} | {name: p.detach() for name, p in best.named_parameters()}


# ---- optimizers -------------------------------------------------------------------------------------------------

ELEMENTWISE: dict[str, Any] = {
    "Adadelta": {"lr": 0.5},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 1e-2, "fused": True},
    "Adamax": {"lr": 1e-2},
    "AdamW": {"lr": 1e-2, "fused": True, "amsgrad": True},
    "ASGD": {"lr": 0.05, "t0": 1.0},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 1e-2},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
REFUSED = {
    "LBFGS": "LBFGS cannot run on shards: it needs a closure",
    "SparseAdam": "SparseAdam cannot run on shards: it takes sparse gradients only",
}


def made(name: str, options: dict[str, Any], model: nn.Module) -> Optimizer:
    kind: type[Optimizer] = getattr(torch.optim, name)
    return kind(model.parameters(), **options)


class Matrices(nn.Module):
    """No biases: what Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.one_hot(x, VOCAB).float().repeat(1, 1, 64 // VOCAB)
        for layer in self.layers:
            x = layer(x)
        return x


train_three = partial(steps, count=3)(lambda run, step: token_loss(run.model, run.batch(step)).backward())

LOOSE = 2e-3  # a factor that differs in its last bit can round a master to the next bf16 parameter

ROOM = {"gpu_param_memory_budget": 1 << 30}
ONCE: dict[str, Any] = {"ranks": (2,), "precisions": ("fp32",)}  # the optimizer is not the engine's business

# Annotated, so that it is not in the table yet: to be recorded under FSDP2, which takes minutes for these.
CASES: list[Case] = [
    Case("gradient accumulation", accumulate, backwards=3),
    Case("ranks with different numbers of micro-batches, also none", other_numbers_of_micro_batches, backwards=2),
    Case("batches of different sizes and lengths", other_batch_sizes),
    Case("accumulation with the loss averaged by tokens", averaged_by_tokens, backwards=3),
    Case("parameter groups with own lr, betas, eps and weight decay", train_three, optimizer=own_groups),
    Case("lr, betas and weight decay changed between steps", changed_by_hand, optimizer=own_groups),
    Case("every torch learning rate scheduler", every_scheduler),
    Case(
        "OneCycleLR that cycles Adam's betas",
        partial(scheduled, partial(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=5)),
        optimizer=adamw,
    ),
    Case("clipping by norm", clip_by_norm, tolerance=LOOSE),
    Case("clipping by value", clip_by_value),
    Case("clipping by norm, by value and by norm again", clip_by_both, tolerance=LOOSE),
    Case("GradScaler in fp32", scaled_loss, precisions=("fp32",)),
    Case("steps left out because the loss is nan", left_out),
    Case("step(closure)", closures, ranks=(1,), precisions=("fp32",)),  # the oracle averages before the closure
    Case("step hooks", step_hooks),
    Case("evaluation between backward and step", evaluate_between),
    Case("two prepared models, interleaved", two_models, others=(Critic,), backwards=2),
    Case("two prepared models of one kind, interleaved", apart, others=(Net,)),
    Case("a failure in forward, then a right step", partial(failing, in_forward), ranks=(2,)),
    Case("a failure in backward, then a right step", partial(failing, in_backward), ranks=(2,)),
    Case("a failure in a parameter's hook, then a right step", partial(failing, in_parameter_hook), ranks=(2,)),
    Case("a failure between forward and backward, then a right step", partial(failing, in_loss), ranks=(2,)),
    Case("a failure of the data loader, then a right step", partial(failing, in_loader), ranks=(2,)),
    Case("swa_utils.AveragedModel with room for the model", partial(averaged_model, AveragedModel), settings=ROOM),
    Case("an exponential moving average by swa_utils with room", partial(averaged_model, ema), settings=ROOM),
    Case(
        "swa_utils.AveragedModel, which reads all parameters at once, without room",
        partial(averaged_model, ema),
        refused="no room for unit 'layers.2' .*held by views or graphs.*; set it to at least",
        once=True,  # where all stays up there is room
    ),
    Case("an exponential moving average by hand", own_ema),
    Case("a deep copy of the model kept aside", best_so_far),
    *(
        Case(f"torch.optim.{name}", train_three, optimizer=partial(made, name, options), **ONCE)
        for name, options in ELEMENTWISE.items()
    ),
    *(
        Case(f"torch.optim.{name}", optimizer=partial(made, name, {}), refused=message, **ONCE)
        for name, message in REFUSED.items()
    ),
    Case("torch.optim.Adafactor", train_three, optimizer=partial(made, "Adafactor", {"lr": 1e-2}), **ONCE),
    Case("torch.optim.Muon", train_three, build=Matrices, optimizer=partial(made, "Muon", {"lr": 1e-2}), **ONCE),
]


@pytest.mark.promise("exact", "accumulation")
@pytest.mark.spread(16, second=55)
def test_trains_as_unsharded(case: Case, setting: Setting, check: Callable[[Case, Setting], None]) -> None:
    check(case, setting)


def test_no_scheduler_of_torch_is_missing() -> None:
    theirs = {
        kind
        for kind in vars(lr_scheduler).values()
        if isinstance(kind, type) and issubclass(kind, LRScheduler) and not kind.__name__.endswith("LRScheduler")
    }
    assert {kind.__name__ for kind in theirs} <= SCHEDULERS.keys()


def test_no_optimizer_of_torch_is_missing() -> None:
    kinds = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    assert kinds - {"Optimizer"} == {*ELEMENTWISE, *REFUSED, "Adafactor", "Muon"}
