"""The Trainer on two ranks that are processes: data split by rank, tokens counted over both, evaluation whole, one
checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import pytest
import torch
import transformers
from engine.models import relative_difference, same_bits, tight
from torch import Tensor

import rayzero
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import UnsupportedError
from rayzero.integrations.transformers import Trainer
from rayzero.testing import run_ranks

from .test_trainer import LENGTH, arguments, dataset, history
from .training import build
from .zoo import llama

STEPS = 4


def ragged(size: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Examples with different numbers of labels: 1 of the first, 7 of the last."""
    examples = dataset(size, seed)
    for i, example in enumerate(examples):
        example["labels"] = example["labels"].clone()
        example["labels"][: LENGTH - 1 - 6 * i // (size - 1)] = -100
    return examples


def trainer_of(kind: type, directory: Path, batch_size: int, **settings: Any) -> Any:
    """More than an epoch, which ends with a step of one batch; evaluated in the middle and at the end."""
    extra = {} if kind is transformers.Trainer else {"zero_config": tight(build(llama), spare=0)}
    args = arguments(
        directory,
        per_device_train_batch_size=batch_size,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=2,
        gradient_accumulation_steps=2,
        include_num_input_tokens_seen="all",
        **settings,
    )
    return kind(model=build(llama), args=args, train_dataset=ragged(12), eval_dataset=ragged(6, seed=1), **extra)


class Best(NamedTuple):
    """What a rank says of its best model."""

    step: int
    folder: str
    state: dict[str, Tensor]


def train(context: RankContext) -> tuple[dict[str, Tensor], list[dict[str, Any]], Best]:
    """Train; then with a rate that makes it worse, where the best model is an earlier one."""
    assert context.run_dir is not None
    transformers.utils.logging.set_verbosity_error()
    trainer = trainer_of(Trainer, context.run_dir, 2, save_strategy="steps", save_steps=STEPS)
    trainer.train()
    exchange(trainer.accelerator, context.rank)
    other = trainer_of(
        Trainer,
        context.run_dir / "best",
        2,
        save_strategy="best",
        save_only_model=True,
        load_best_model_at_end=True,
        learning_rate=0.05,
        lr_scheduler_type="constant",
    )
    let_rank_1_look_first(other, context)
    other.train()
    best = Best(other.state.best_global_step, other.state.best_model_checkpoint, rayzero.full_state_dict(other.model))
    return rayzero.full_state_dict(trainer.model), history(trainer), best


def exchange(accelerator: Any, rank: int) -> None:
    """Small tensors of both ranks come through the lead; what cannot is refused."""
    own = {"one": torch.tensor(rank), "row": torch.tensor([0.1 + rank, 5.0])}
    both = {"one": torch.tensor([0, 1]), "row": torch.tensor([0.1, 5.0, 1.1, 5.0])}
    for call in (accelerator.gather, accelerator.gather_for_metrics):
        assert all(torch.equal(got, both[name]) for name, got in call(own).items())
    reduced = [accelerator.reduce(own["row"], how)[0].item() for how in ("sum", "mean", "max")]
    assert reduced == pytest.approx([1.2, 0.6, 1.1])
    if rank == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    with pytest.raises(UnsupportedError, match=r"gather_for_metrics\(\) needs objects of the other ranks"):
        accelerator.gather_for_metrics(["text"])
    with pytest.raises(UnsupportedError, match=r"pad_across_processes\(\) needs the other ranks' shapes"):
        accelerator.pad_across_processes(own["row"])


def let_rank_1_look_first(trainer: Any, context: RankContext) -> None:
    """Rank 0 makes each checkpoint's folder after rank 1, which writes none, has gone on to look for it."""
    assert context.run_dir is not None
    save, looked = trainer.save_model, context.run_dir

    def save_in_turn(directory: str, **settings: Any) -> None:
        passed = looked / f"rank 1 passed {Path(directory).name}"
        while context.rank == 0 and not passed.exists():
            time.sleep(0.01)
        save(directory, **settings)
        if context.rank == 1:
            passed.touch()

    trainer.save_model = save_in_turn


def metrics(entries: list[dict[str, Any]], key: str) -> list[float]:
    return [entry[key] for entry in entries if key in entry]


@pytest.mark.thorough
@pytest.mark.usefixtures("forked_with_trainers")
def test_two_ranks_learn_what_one_learns_from_batches_of_twice_the_size(tmp_path: Path) -> None:
    plain = trainer_of(transformers.Trainer, tmp_path / "plain", 4)
    plain.train()
    expected, logged = plain.model.state_dict(), history(plain)
    ranks = run_ranks(train, 2, 2, "grpc", processes=True, run_dir=tmp_path)
    for state, entries, _ in ranks:
        assert relative_difference(state, expected) <= 1e-5
        for key in ("loss", "learning_rate", "grad_norm", "eval_loss", "epoch", "num_input_tokens_seen", "total_flos"):
            assert metrics(entries, key) == pytest.approx(metrics(logged, key), rel=1e-5), key

    one, other = (best for _, _, best in ranks)
    assert (one.step, one.folder) == (other.step, other.folder)
    assert 0 < one.step < STEPS
    for best in (one, other):
        assert same_bits(type(plain.model).from_pretrained(one.folder).state_dict(), best.state)

    saved = tmp_path / f"checkpoint-{STEPS}"
    assert same_bits(type(plain.model).from_pretrained(saved).state_dict(), ranks[0][0])
    with running_in(RankContext()):  # one rank goes on with what two have saved, and finds nothing left to do
        again = trainer_of(Trainer, tmp_path, 4)
        again.train(resume_from_checkpoint=str(saved))
        assert same_bits(rayzero.full_state_dict(again.model), ranks[0][0])


class Gathering(Trainer):
    """As TRL's GRPOTrainer: its module has Accelerate's function, which without a group gives a rank its own values."""


def test_a_trainer_that_gathers_by_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(context: RankContext) -> None:
        if context.rank == 0:
            Gathering(model=build(llama), args=arguments(tmp_path), train_dataset=dataset())

    monkeypatch.setitem(globals(), "all_ranks", accelerate.utils.gather_object)
    with pytest.raises(
        UnsupportedError, match=r"Gathering calls accelerate.utils.gather_object\(\), .*init_process_group"
    ):
        run_ranks(loop, 2, 1)
