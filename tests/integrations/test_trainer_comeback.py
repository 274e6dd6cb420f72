"""A rank that dies inside ``trainer.train()`` repeats its step, and the run ends as one that was not disturbed."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine.models import same_bits
from torch import Tensor

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, get_context
from rayzero.errors import UnsupportedError
from rayzero.integrations.transformers import Trainer
from rayzero.testing import run_ranks

from .test_trainer import arguments, dataset, history
from .test_trainer_ranks import ragged
from .training import build
from .zoo import gpt2

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_with_trainers"), pytest.mark.thorough]
Point = tuple[str, int]  # where in the Trainer's step, and the global step that was reached

EXAMPLES, EPOCHS = 20, 3
SETTINGS: dict[str, Any] = {  # 2 ranks: 5 batches of an epoch each, so 3 steps, the last one of a single batch
    "num_train_epochs": EPOCHS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}


class Patience(transformers.EarlyStoppingCallback):
    """Counts how often the loss was not the best, and never stops."""

    def __init__(self) -> None:
        super().__init__(early_stopping_patience=100)


class Dies(transformers.TrainerCallback):
    """Ends the process at a point of the loop: each of the rank's lives at the next one of ``at``."""

    def __init__(self, context: RankContext, who: int, at: tuple[Point, ...]) -> None:
        self.at = at[context.life] if context.rank == who and context.life < len(at) else None

    def reach(self, point: str, step: int) -> None:
        if (point, step) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reach("begin", state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reach("substep", state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reach("pushed", state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reach("stepped", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reach("end", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reach("evaluated", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reach("saved", state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reach("epoch", state.global_step)


class Noisy(Trainer):
    """Draws before the model does."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        inputs = {**inputs, "attention_mask": (torch.rand(inputs["input_ids"].shape) < 0.9).long()}
        return super().compute_loss(model, inputs, **kwargs)


def train(
    context: RankContext,
    folder: Path,
    at: tuple[Point, ...] = (),
    who: int = 1,
    resume: str | None = None,
    data: Any = ragged,
    **settings: Any,
) -> Any:
    """Train; weights, moments, what was logged, the callback's count and the schedule."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    patience = Patience()
    trainer = Noisy(
        model=build(gpt2, dropout=0.1),
        args=arguments(folder, **SETTINGS | settings),
        train_dataset=data(EXAMPLES),
        eval_dataset=ragged(4, seed=1),
        callbacks=[patience, Dies(context, who, at)],
        zero_config=ZeroConfig(units=["GPT2Block"]),
    )
    trainer.train(resume_from_checkpoint=resume)
    states = trainer.zero_optimizer.state_dict()["state"]
    (counted,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, Patience))
    rest = history(trainer), counted.early_stopping_patience_counter, trainer.lr_scheduler.state_dict()["last_epoch"]
    return context.life, rayzero.full_state_dict(trainer.model), states, rest


def run(folder: Path, *at: Point, who: int = 1, ranks: int = 2, **more: Any) -> Any:
    one = functools.partial(train, folder=folder, at=at, who=who, **more)
    found = run_ranks(one, ranks, 2, "grpc", True, stall_timeout=60.0, max_failures=len(at), run_dir=folder)
    assert [life for life, *_ in found] == [len(at) if rank == who else 0 for rank in range(ranks)]
    return found


def assert_same(ours: Any, theirs: Any) -> None:
    for (_, weights, states, rest), (_, w, s, r) in zip(ours, theirs, strict=True):
        assert rest == r
        assert same_bits(weights, w)
        assert states.keys() == s.keys()
        for key, state in states.items():
            assert all(torch.equal(torch.as_tensor(state[n]), torch.as_tensor(s[key][n])) for n in state)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("plain"))


DEATHS: dict[str, tuple[Point, ...]] = {
    "in the first step": (("substep", 0), ("stepped", 0)),
    "in the middle of an epoch": (("begin", 1), ("substep", 1), ("pushed", 1), ("stepped", 1)),
    "around an epoch's end": (("pushed", 2), ("end", 3), ("evaluated", 3), ("epoch", 3), ("begin", 3)),
    "late": (("substep", 4), ("stepped", 4), ("pushed", 7), ("end", 8), ("epoch", 9)),
}


@pytest.mark.parametrize("when", DEATHS)
def test_a_rank_that_is_killed_repeats_its_step(when: str, undisturbed: Any, tmp_path: Path) -> None:
    assert_same(run(tmp_path, *DEATHS[when]), undisturbed)


def test_rank_0_may_die_around_its_saves(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": True}
    plain = run(tmp_path / "plain", **saving)
    deaths: tuple[Point, ...] = (("evaluated", 3), ("saved", 3), ("substep", 3), ("saved", 9))
    ours = run(tmp_path / "ours", *deaths, who=0, **saving)
    assert_same(ours, plain)
    for step in (3, 6, 9):
        one, other = (tmp_path / name / f"checkpoint-{step}" for name in ("ours", "plain"))
        assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_a_resumed_trainer_may_die_whose_order_comes_from_the_generators(tmp_path: Path) -> None:
    drawn = {"accelerator_config": {"use_seedable_sampler": False}, "save_strategy": "steps", "save_steps": 4}
    (tmp_path / "first").mkdir()
    run(tmp_path / "first", ranks=1, who=0, **drawn)
    resume = str(tmp_path / "first" / "checkpoint-4")
    plain = run(tmp_path / "plain", ranks=1, who=0, resume=resume, **drawn)
    deaths: tuple[Point, ...] = (("substep", 4), ("stepped", 4), ("begin", 6), ("pushed", 12))
    assert_same(run(tmp_path / "ours", *deaths, ranks=1, who=0, resume=resume, **drawn), plain)


class Drawing(torch.utils.data.Dataset[Any]):
    """Examples with a random part."""

    def __init__(self, size: int) -> None:
        self.examples = dataset(size)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        dropped = torch.rand(()) < 0.5
        return {name: ids.clone().fill_(2) if dropped else ids for name, ids in self.examples[index].items()}


def twice(context: RankContext, folder: Path) -> None:
    """Two calls of train(), of which the second one is cut."""
    torch.set_num_threads(1)
    args = arguments(folder, **SETTINGS | {"num_train_epochs": 1, "eval_strategy": "no"})
    trainer = Trainer(model=build(gpt2), args=args, train_dataset=dataset(EXAMPLES))
    trainer.train()
    trainer.add_callback(Dies(context, 1, (("pushed", 2),)))
    trainer.train()


def outside(context: RankContext, folder: Path) -> None:
    """The model runs with gradients between two steps."""

    class Runs(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model(**{name: ids[None] for name, ids in dataset(1)[0].items()})

    torch.set_num_threads(1)
    args = arguments(folder, **SETTINGS | {"eval_strategy": "no"})
    callbacks = [Runs(), Dies(context, 1, (("pushed", 1),))]
    Trainer(model=build(gpt2), args=args, train_dataset=dataset(EXAMPLES), callbacks=callbacks).train()


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        (functools.partial(train, at=(("pushed", 4),), data=Drawing), r"step 4: its dataset draws random numbers"),
        (twice, r"step 5: it had begun train\(\) number 2, and earlier ones cannot be done again"),
        (outside, r"step 1: its model ran with gradients outside of the Trainer's steps"),
    ],
)
def test_what_cannot_be_repeated_is_refused_by_name(loop: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"rank 1 .* its Trainer cannot repeat {why}.*; resume with trainer\."):
        run_ranks(functools.partial(loop, folder=tmp_path), 2, 2, "grpc", True, stall_timeout=60.0, max_failures=1)


def test_nothing_of_it_is_in_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They have the Trainer's own files, also those that were written before."""
    found = run_ranks(functools.partial(_saved, folder=tmp_path), 1, 1)
    assert found == [{}]
    found = run_ranks(functools.partial(_saved, folder=tmp_path, resume=str(tmp_path / "checkpoint-3")), 1, 1)
    assert "starts afresh" not in caplog.text


def _saved(context: RankContext, folder: Path, resume: str | None = None) -> Any:
    settings = {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 3}
    args = arguments(folder, **SETTINGS | settings | {"num_train_epochs": 2 if resume else 1})
    trainer = Trainer(model=build(gpt2), args=args, train_dataset=dataset(EXAMPLES // 2))
    trainer.train(resume_from_checkpoint=resume)
    tracked = get_context().tracked
    assert tracked is not None
    assert len(tracked.states()) == 1
    return tracked.checkpoint_states()
