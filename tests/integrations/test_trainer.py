"""``Trainer`` with one changed import learns what transformers' own learns."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine.models import relative_difference, same_bits, tight
from torch import Tensor, nn
from transformers import TrainingArguments

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.integrations.transformers import Seq2SeqTrainer, Trainer, save_pretrained
from rayzero.kernels.optimizer_class import Optimizers

from .training import build
from .zoo import VOCAB, gpt2, llama, t5

LENGTH, EXAMPLES = 8, 24


def dataset(size: int = EXAMPLES, seed: int = 0) -> list[dict[str, Tensor]]:
    """Examples of token ids that are their own labels."""
    ids = torch.randint(2, VOCAB, (size, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(directory: Path, **settings: Any) -> TrainingArguments:
    """An epoch of clipped AdamW with a schedule, logged in every step."""
    defaults: dict[str, Any] = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(directory), **defaults | settings)


def trained(kind: type, model: nn.Module, directory: Path, **settings: Any) -> Any:
    """A trainer after train()."""
    extra = {"zero_config": settings.pop("zero_config", None)} if kind is not transformers.Trainer else {}
    settings.pop("zero_config", None)
    trainer = kind(
        model=copy.deepcopy(model),
        args=arguments(directory, **settings),
        train_dataset=dataset(),
        eval_dataset=dataset(6, seed=1),
        **extra,
    )
    trainer.train()
    return trainer


TIMES = ("runtime", "per_second")


def history(trainer: Any) -> list[dict[str, Any]]:
    """What was logged, without times."""
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in TIMES)}
        for entry in trainer.state.log_history
    ]


def assert_same_training(ours: Any, plain: Any) -> None:
    """The same bits without clipping (its scale is computed in fp64 here); weights and all that is logged to 1e-5."""
    state = rayzero.full_state_dict(ours.model)
    assert relative_difference(state, plain.model.state_dict()) <= 1e-5
    assert ours.args.max_grad_norm or same_bits(state, dict(plain.model.state_dict()))
    assert len(history(ours)) == len(history(plain))
    for got, want in zip(history(ours), history(plain), strict=True):
        assert got == pytest.approx(want, rel=1e-5)


SETTINGS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "not clipped": {"max_grad_norm": 0.0},
    "accumulation, with a remainder": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 5},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 3},
    "bf16 autocast, not clipped": {"bf16": True, "max_grad_norm": 0.0},
    "activation checkpointing": {"activation_checkpointing": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "sgd, plateau": {"optim": "sgd", "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
}


@pytest.mark.promise("exact", "integrations")
@pytest.mark.spread(5)
@pytest.mark.parametrize("case", SETTINGS)
def test_trains_as_transformers_trainer(case: str, alone: RankContext, tmp_path: Path) -> None:
    base = build(llama, attention_dropout=0.1)
    config = tight(base, prefetch_buffer_size=1, spare=0)
    plain = trained(transformers.Trainer, base, tmp_path, **SETTINGS[case])
    ours = trained(Trainer, base, tmp_path, zero_config=config, **SETTINGS[case])
    assert_same_training(ours, plain)
    assert ours.zero_optimizer.engine.version == ours.state.global_step


def test_a_list_of_optimizers_trains_as_its_parts_would(alone: RankContext, tmp_path: Path) -> None:
    """Plain transformers gets the same two as one object, and makes its schedule over both."""

    def made(kind: type, optimizers: Any, resume: Path | None = None, **settings: Any) -> Any:
        model = copy.deepcopy(base)
        matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
        known = set(map(id, matrices))
        others = [p for p in model.parameters() if id(p) not in known]
        given = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]
        args = arguments(tmp_path / kind.__module__, max_grad_norm=0.0, save_strategy="steps", save_steps=2)
        trainer = kind(
            model=model, args=args, train_dataset=dataset(), optimizers=(optimizers(given), None), **settings
        )
        trainer.train(resume_from_checkpoint=resume and str(resume))
        return trainer

    base = build(llama)
    config = tight(base, prefetch_buffer_size=1, spare=0)
    plain = made(transformers.Trainer, lambda given: Optimizers.of(given, {}))
    ours = made(Trainer, list, zero_config=config)
    expected = dict(plain.model.state_dict())
    assert same_bits(rayzero.full_state_dict(ours.model), expected)
    assert [entry.get("learning_rate") for entry in history(ours)] == [
        entry.get("learning_rate") for entry in history(plain)
    ]
    with running_in(RankContext()):
        saved = tmp_path / Trainer.__module__ / "checkpoint-2"
        again = made(Trainer, list, saved, zero_config=config)
        assert same_bits(rayzero.full_state_dict(again.model), expected)


def test_seq2seq_trainer_evaluates_by_generating(alone: RankContext, tmp_path: Path) -> None:
    base = build(t5)
    args = transformers.Seq2SeqTrainingArguments(
        **{
            **arguments(tmp_path, max_steps=3).to_dict(),
            "predict_with_generate": True,
            "generation_max_length": 6,
            "eval_strategy": "steps",
            "eval_steps": 2,
        }
    )
    settings: dict[str, Any] = {"args": args, "train_dataset": dataset(), "eval_dataset": dataset(6, seed=1)}
    plain = transformers.Seq2SeqTrainer(model=copy.deepcopy(base), **settings)
    ours = Seq2SeqTrainer(model=copy.deepcopy(base), zero_config=tight(base, spare=0), **settings)
    plain.train()
    ours.train()
    assert_same_training(ours, plain)
    want = plain.predict(dataset(6, seed=1)).predictions
    assert (ours.predict(dataset(6, seed=1)).predictions == want).all()


def test_a_checkpoint_holds_masters_that_from_pretrained_reads(alone: RankContext, tmp_path: Path) -> None:
    base = build(gpt2)
    ours = trained(
        Trainer,
        base,
        tmp_path,
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
        zero_config=ZeroConfig(precision="bf16"),
    )
    save_pretrained(ours.model, tmp_path / "by hand")
    expected = rayzero.full_state_dict(ours.model)
    for directory in (tmp_path / "checkpoint-2", tmp_path / "by hand"):
        again = type(base).from_pretrained(directory)
        assert json.loads((directory / "config.json").read_text())["dtype"] == "float32"
        assert same_bits(again.state_dict(), expected)


BEST: dict[str, Any] = {  # a rate that makes it worse in the end: the best model is an earlier one
    "max_grad_norm": 0.0,
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
}


@pytest.mark.spread(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_best_model_is_loaded_at_the_end(precision: str, alone: RankContext, tmp_path: Path) -> None:
    base = build(llama)
    config = tight(base, prefetch_buffer_size=1, spare=0, precision=precision)
    ours = trained(Trainer, base, tmp_path / "ours", zero_config=config, **BEST)
    assert 0 < ours.state.best_global_step < ours.state.global_step
    best = type(base).from_pretrained(ours.state.best_model_checkpoint)
    assert same_bits(rayzero.full_state_dict(ours.model), dict(best.state_dict()))
    if precision == "fp32":
        assert_same_training(ours, trained(transformers.Trainer, base, tmp_path / "plain", **BEST))
    assert ours.evaluate()["eval_loss"] == pytest.approx(ours.state.best_metric, rel=1e-6)
    ours.train()  # it goes on from there as any Trainer


# ---- refused ----------------------------------------------------------------------------------------------------


def make(directory: Path, **settings: Any) -> Trainer:
    return Trainer(model=build(gpt2), args=arguments(directory, **settings), train_dataset=dataset())


def test_a_run_that_resumes_needs_a_trainer_that_does(tmp_path: Path) -> None:
    with running_in(RankContext(resume=tmp_path)), pytest.raises(ConfigError, match=r"resumes from .* steps from 0"):
        make(tmp_path).train()


def test_going_back_to_a_checkpoint_needs_a_new_trainer(alone: RankContext, tmp_path: Path) -> None:
    ours = trained(Trainer, build(gpt2), tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    with pytest.raises(UnsupportedError, match=r"has trained already and cannot go back to .*checkpoint-1"):
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_no_optimizer_before_training(alone: RankContext, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no prepared optimizer before train"):
        _ = make(tmp_path).zero_optimizer
