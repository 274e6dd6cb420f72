"""A resumed run trains at the rates of one that never stopped: every torch scheduler, interrupted at every step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

import rayzero
from rayzero.engine.context import RankContext, get_context, running_in
from rayzero.engine.optimizer.param_groups import ResumedGroups
from rayzero.errors import CheckpointError, ConfigError, UnsupportedError

from .models import same_bits
from .schedules import SCHEDULERS, STEPS


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        for param in self.parameters():
            nn.init.normal_(param, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Training:
    """A plain loop over a prepared model: AdamW with two groups and a scheduler made before or after ``prepare``."""

    def __init__(self, name: str, *, early: bool, resume: Path | None = None, tensor_lr: bool = False) -> None:
        model = Line()
        groups = [
            {"params": list(model.first.parameters()), "lr": torch.tensor(1e-2) if tensor_lr else 1e-2},
            {
                "params": list(model.second.parameters()),
                "weight_decay": 0.3,
                "lr": torch.tensor(5e-3) if tensor_lr else 5e-3,
            },
        ]
        plain = torch.optim.AdamW(groups)
        scheduler = SCHEDULERS[name](plain) if early else None
        self.model, self.optimizer = rayzero.prepare(model, plain, resume=resume)
        self.scheduler = scheduler or SCHEDULERS[name](self.optimizer)
        if resume is not None:
            state = get_context().loop_state
            assert state is not None
            self.scheduler.load_state_dict(state["scheduler"])

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def run(self, start: int, stop: int) -> list[list[float]]:
        used = []
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(step * 7 + get_context().rank)
            x, y = torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator)
            loss = F.mse_loss(self.model(x), y)
            loss.backward()
            used.append(self.rates())
            self.optimizer.step()
            on_plateau = isinstance(self.scheduler, schedules.ReduceLROnPlateau)
            self.scheduler.step(*[1.0] if on_plateau else [])
            self.optimizer.zero_grad()
        return used

    def save(self, directory: Path) -> None:
        rayzero.save_checkpoint(self.optimizer, directory, {"scheduler": self.scheduler.state_dict()})


def _alone(tmp_path: Path, name: str, **kwargs: Any) -> tuple[list[list[float]], dict[str, Tensor]]:
    """An uninterrupted run that saves before every step."""
    with running_in(RankContext()):
        whole, rates = Training(name, **kwargs), []
        for step in range(STEPS):
            whole.save(tmp_path / f"step-{step:06d}")
            rates += whole.run(step, step + 1)
        return rates, rayzero.full_state_dict(whole.model)


@pytest.mark.spread(2)
@pytest.mark.parametrize("early", [False, True], ids=["made-after-prepare", "made-before-prepare"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_run_interrupted_at_any_step_equals_one_that_never_stopped(tmp_path: Path, name: str, early: bool) -> None:
    expected_rates, expected = _alone(tmp_path, name, early=early)
    for step in range(STEPS):
        with running_in(RankContext()):
            resumed = Training(name, early=early, resume=tmp_path / f"step-{step:06d}")
            assert resumed.run(step, STEPS) == expected_rates[step:], step
            assert same_bits(rayzero.full_state_dict(resumed.model), expected), step


def test_learning_rates_that_are_tensors_stay_tensors_of_their_bits(tmp_path: Path) -> None:
    expected_rates, expected = _alone(tmp_path, "CosineAnnealingLR", early=False, tensor_lr=True)
    with running_in(RankContext()):
        resumed = Training("CosineAnnealingLR", early=False, tensor_lr=True, resume=tmp_path / "step-000005")
        assert all(isinstance(group["lr"], Tensor) for group in resumed.optimizer.param_groups)
        assert all(isinstance(group["initial_lr"], Tensor) for group in resumed.optimizer.param_groups)
        assert resumed.run(5, STEPS) == expected_rates[5:]
        assert same_bits(rayzero.full_state_dict(resumed.model), expected)


# ---- groups -----------------------------------------------------------------------------------------------------


@contextmanager
def frozen_head_run(resume: Path | None = None) -> Iterator[tuple[Line, rayzero.ZeroOptimizer]]:
    """The second layer's group comes later."""
    with running_in(RankContext()):
        model = Line()
        yield rayzero.prepare(model, torch.optim.AdamW(model.first.parameters(), lr=1e-2), resume=resume)


def _add_head(model: Line, optimizer: rayzero.ZeroOptimizer, lr: float = 3e-3) -> None:
    optimizer.add_param_group({"params": list(model.second.parameters()), "lr": lr, "betas": (0.8, 0.9)})


def _train(model: Line, optimizer: rayzero.ZeroOptimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def test_a_group_added_later_is_added_again_and_gets_its_saved_options(tmp_path: Path) -> None:
    with frozen_head_run() as (model, optimizer):
        _train(model, optimizer, 0, 2)
        _add_head(model, optimizer)
        _train(model, optimizer, 2, 4)
        rayzero.save_checkpoint(optimizer, tmp_path / "step-000004", {})
        saved = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
        _train(model, optimizer, 4, 6)
        expected = rayzero.full_state_dict(model)
    with frozen_head_run(tmp_path / "step-000004") as (model, optimizer):
        _add_head(model, optimizer, lr=1.0)
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == saved
        _train(model, optimizer, 4, 6)
        assert same_bits(rayzero.full_state_dict(model), expected)


def test_a_group_that_is_not_added_again_is_missed_at_the_first_step(tmp_path: Path) -> None:
    with frozen_head_run() as (model, optimizer):
        _add_head(model, optimizer)
        _train(model, optimizer, 0, 1)
        rayzero.save_checkpoint(optimizer, tmp_path / "step-000001", {})
    with (
        frozen_head_run(tmp_path / "step-000001") as (model, optimizer),
        pytest.raises(CheckpointError, match=r"trains second\.bias, second\.weight, which no parameter group of this"),
    ):
        _train(model, optimizer, 1, 2)


def test_groups_are_known_by_their_parameters_and_others_keep_their_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(groups: dict[str, float], resume: Path | None = None) -> list[float]:
        with running_in(RankContext()):
            model = Line()
            params = dict(model.named_parameters())
            plain = torch.optim.AdamW(
                [{"params": [params[name] for name in names.split()], "lr": lr} for names, lr in groups.items()]
            )
            model, optimizer = rayzero.prepare(model, plain, resume=resume)
            rates = [group["lr"] for group in optimizer.param_groups]
            _train(model, optimizer, 0, 1)
            rayzero.save_checkpoint(optimizer, tmp_path / "step-000001", {})
            return rates

    first, second = "first.weight first.bias", "second.weight second.bias"
    run({first: 0.1, second: 0.2})
    assert run({second: 0.5, first: 0.6}, tmp_path / "step-000001") == pytest.approx([0.18, 0.09])
    assert not caplog.records
    assert run({f"{first} {second}": 0.7}, tmp_path / "step-000001") == [0.7]
    assert "optimizer's group 0: the group keeps the options that this run gave it (lr=0.7)" in caplog.text


def test_a_rate_that_the_loop_sets_after_prepare_is_used(tmp_path: Path) -> None:
    with frozen_head_run() as (model, optimizer):
        rayzero.save_checkpoint(optimizer, tmp_path / "step-000000", {})
    with frozen_head_run(tmp_path / "step-000000") as (model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.5
        _train(model, optimizer, 0, 1)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.45)


def test_options_that_no_scheduler_writes_stay_as_the_loop_set_them(tmp_path: Path) -> None:
    with frozen_head_run() as (model, optimizer):
        _add_head(model, optimizer)
        scheduler = schedules.OneCycleLR(optimizer, 2e-2, total_steps=9)
        _train(model, optimizer, 0, 1)
        rayzero.save_checkpoint(optimizer, tmp_path / "step-000001", {"scheduler": scheduler.state_dict()})
    with frozen_head_run(tmp_path / "step-000001") as (model, optimizer):
        optimizer.param_groups[0]["weight_decay"] = 0.5
        _add_head(model, optimizer)
        scheduler = schedules.OneCycleLR(optimizer, 2e-2, total_steps=9)
        scheduler.load_state_dict(get_context().loop_state["scheduler"])  # type: ignore[index]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.01]


def test_options_that_are_tensors_of_another_kind_and_empty_groups_come_back_as_saved() -> None:
    saved = [
        {"params": [], "options": {"lr": 0.1}},
        {"params": [], "options": {"lr": 0.2, "warm": torch.tensor(1.75)}},
    ]
    groups: list[dict[str, Any]] = [{"params": [], "lr": 1.0}, {"params": [], "lr": 1.0, "warm": torch.tensor(1)}]
    ResumedGroups(saved, {}, "here").restore(groups)
    assert [group["lr"] for group in groups] == [0.1, 0.2]
    assert groups[1]["warm"].item() == 1.75


def test_the_optimizer_given_to_prepare_cannot_step_but_serves_its_schedulers() -> None:
    with running_in(RankContext()):
        model = Line()
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
        before = schedules.StepLR(plain, 1, gamma=0.5)
        model, optimizer = rayzero.prepare(model, plain)
        after = schedules.StepLR(plain, 1, gamma=0.5)
        refused = r"step\(\) was called on the AdamW .* call step\(\) of the optimizer that"
        with pytest.raises(UnsupportedError, match=refused):
            plain.step()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        before.step()  # warns, and warnings are errors, where it takes the optimizer for one that has not stepped
        after.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0025)


# ---- prepare(resume=) -------------------------------------------------------------------------------------------


def _saved(directory: Path) -> None:
    with frozen_head_run() as (model, optimizer):
        _train(model, optimizer, 0, 1)
        rayzero.save_checkpoint(optimizer, directory, {"step": 1})


def test_prepare_resumes_from_text_and_from_the_runs_newest(tmp_path: Path) -> None:
    _saved(tmp_path / "checkpoints" / "mine")
    for context, resume in (
        (RankContext(), str(tmp_path / "checkpoints" / "mine")),
        (RankContext(run_dir=tmp_path), True),
        (RankContext(resume=str(tmp_path / "checkpoints" / "mine")), None),  # type: ignore[arg-type]
        (RankContext(resume=tmp_path / "checkpoints" / "mine"), True),
    ):
        with running_in(context):
            model = Line()
            rayzero.prepare(model, torch.optim.AdamW(model.first.parameters()), resume=resume)
            assert context.loop_state == {"step": 1}


def test_prepare_true_starts_afresh_where_the_run_has_saved_nothing(tmp_path: Path) -> None:
    with running_in(RankContext(run_dir=tmp_path)) as context:
        model = Line()
        rayzero.prepare(model, torch.optim.AdamW(model.parameters()), resume=True)
        assert context.loop_state is None


def test_prepare_says_what_resume_may_be(tmp_path: Path) -> None:
    _saved(tmp_path / "one")
    wrong: list[tuple[Any, RankContext, str]] = [
        (3, RankContext(), r"resume must be a checkpoint's path, True or None, got int"),
        ("", RankContext(), r"resume is an empty string"),
        (True, RankContext(), r"resume=True .* has no directory; .*rayzero.newest_checkpoint"),
        (tmp_path / "one", RankContext(resume=tmp_path / "two"), r"resume=.*one.* but the run resumes from .*two"),
    ]
    for given, context, message in wrong:
        with running_in(context):
            model = Line()
            with pytest.raises(ConfigError, match=message):
                rayzero.prepare(model, torch.optim.AdamW(model.parameters()), resume=given)
    with running_in(RankContext()):
        model = Line()
        with pytest.raises(CheckpointError, match="nowhere"):
            rayzero.prepare(model, torch.optim.AdamW(model.parameters()), resume=tmp_path / "nowhere")
