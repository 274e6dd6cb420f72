"""The loop on real ranks and owners: it learns, reports what it measured, and goes on from a checkpoint bit by bit."""

from __future__ import annotations

import json
import math
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rayzero.checkpoint import CheckpointReader
from rayzero.checkpoint.state_values import from_bytes, to_bytes
from rayzero.concurrency.futures import settled
from rayzero.convert.conversion import export_full
from rayzero.engine import begin_checkpoint, get_context, save_checkpoint
from rayzero.engine.context import RankContext
from rayzero.protocol.messages import CheckpointInfo
from rayzero.recipes.data import recipe_corpus, tokens_of
from rayzero.recipes.data.text import batch_seed, make_tokenizer, train_batch
from rayzero.recipes.lm import (
    LanguageModelRun,
    LateRow,
    StepReport,
    Unreported,
    lr_factor,
    next_token_loss,
    optimizers,
    train_loop,
)
from rayzero.recipes.model import build_model
from rayzero.recipes.recipe import RecipeConfig
from rayzero.recipes.run_log import merge_reports
from rayzero.recipes.training import export_model
from rayzero.telemetry.names import STEP_SECONDS
from rayzero.testing import run_ranks

VERSE = b"the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs.\n"


@pytest.fixture
def recipe(tmp_path: Path) -> RecipeConfig:
    (tmp_path / "verse.txt").write_bytes(VERSE * 200)
    return RecipeConfig(
        data=str(tmp_path / "verse.txt"), dim=32, num_layers=2, num_heads=2, seq_len=32, batch_size=4, steps=6,
        lr=1e-2, eval_every=4, eval_batches=2, sample_tokens=0, scaling={"num_workers": 2, "num_optimizers": 2},
    )  # fmt: skip


def train(recipe: RecipeConfig, run_dir: Path | None = None, **options: Any) -> list[list[dict[str, Any]]]:
    """Each rank's reports."""

    def loop(ctx):
        train_loop(recipe.model_dump(mode="json"))
        return ctx.reports

    scaling = {"world_size": recipe.scaling.num_workers, "num_optimizers": recipe.scaling.num_optimizers}
    return run_ranks(loop, **scaling | {"run_dir": run_dir} | options)


def digest(run_dir: Path, step: int) -> str:
    return CheckpointReader(run_dir / "checkpoints" / f"step-{step:06d}").digest


def test_only_the_step_of_a_save_is_told_after_it(recipe, tmp_path, monkeypatch):
    """A run that is stopped right after a save must not lack rows of steps before."""
    told = []

    def noted(save, optimizer, directory, **kept):
        told.append((get_context().step, len(get_context().reports)))
        return save(optimizer, directory, **kept)

    for save in (begin_checkpoint, save_checkpoint):
        monkeypatch.setattr(f"rayzero.recipes.lm.{save.__name__}", partial(noted, save))
    train(recipe.replace(run={"checkpoint_every": 2}), tmp_path / "run")
    assert sorted(told) == [(step, step - 1) for step in (2, 2, 4, 4, 6, 6)]


def test_the_step_of_a_save_is_told_before_the_next_one(recipe, tmp_path, monkeypatch):
    """A run that starts again from that checkpoint does not make its row."""
    told = []
    train_step = LanguageModelRun._train_step

    def noted(run, step):
        told.append((step, len(get_context().reports)))
        train_step(run, step)

    monkeypatch.setattr(LanguageModelRun, "_train_step", noted)
    reports = train(recipe.replace(run={"checkpoint_every": 3}), tmp_path / "run")
    assert sorted(set(told)) == [(0, 0), (1, 0), (2, 1), (3, 3), (4, 3), (5, 4)]
    assert [[one["step"] for one in rank] for rank in reports] == [[1, 2, 3, 4, 5, 6]] * 2


def test_a_reported_step_took_as_long_as_prometheus_is_told(recipe, tmp_path):
    """Also where a validation or a checkpoint comes between two steps: one stopwatch, one meaning."""

    def loop(ctx):
        told = []
        observe = ctx.recorder.observe
        ctx.recorder.observe = lambda metric, value, **labels: (
            told.append(value) if metric is STEP_SECONDS else None,
            observe(metric, value, **labels),
        )
        train_loop(recipe.model_dump(mode="json"))
        return told, [report["step_seconds"] for report in ctx.reports]

    recipe = recipe.replace(eval_every=2, run={"checkpoint_every": 3})
    for told, reported in run_ranks(loop, world_size=2, num_optimizers=2, run_dir=tmp_path):
        assert len(reported) == 6
        assert reported == pytest.approx(told, rel=1e-9)


def test_every_rank_reports_every_step_and_validates_its_share(recipe):
    ranks = train(recipe)
    for reports in ranks:
        assert [report["step"] for report in reports] == [1, 2, 3, 4, 5, 6]
        assert all(report.keys() == set(StepReport.__dataclass_fields__) for report in reports)
        assert all(report["tokens"] == 4 * 32 for report in reports)
        assert [report["total_tokens"] for report in reports] == [2 * 4 * 32 * step for step in range(1, 7)]
        assert all(report["step_seconds"] > 0 and report["memory_bytes"] > 1 << 20 for report in reports)
        assert [report["step"] for report in reports if report["validation_loss"] is not None] == [4, 6]
        assert [report["validation_batches"] for report in reports] == [0, 0, 0, 1, 0, 1]
    assert [r["grad_norm"] for r in ranks[0]] == [r["grad_norm"] for r in ranks[1]]
    assert [r["loss"] for r in ranks[0]] != [r["loss"] for r in ranks[1]]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_losses_are_those_of_the_plain_loop(recipe, optimizer):
    recipe = recipe.replace(
        scaling={"num_workers": 1, "num_optimizers": 2}, gradient_accumulation_steps=2, optimizer=optimizer
    )
    (reports,) = train(recipe)
    losses, norms = plain_training(recipe)
    assert [report["loss"] for report in reports] == pytest.approx(losses, rel=1e-4)
    assert [report["grad_norm"] for report in reports] == pytest.approx(norms, rel=1e-3)


def plain_training(recipe: RecipeConfig) -> tuple[list[float], list[float]]:
    """The same training in plain PyTorch."""
    text = tokens_of(recipe, make_tokenizer(recipe.tokenizer))
    model = build_model(recipe, text.vocab_size)
    given = optimizers(recipe, model)
    losses, norms = [], []
    for step in range(recipe.steps):
        total = 0.0
        for micro_batch in range(2):
            seed = batch_seed(recipe.seed, step, 0, micro_batch)
            batch = train_batch(text.train, size=recipe.batch_size, seq_len=recipe.seq_len, seed=seed)
            loss = next_token_loss(model, *batch) / 2
            loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for each in given:
            for group in each.param_groups:
                group["lr"] = recipe.lr * lr_factor(recipe, step)
            each.step()
            each.zero_grad()
        losses.append(total)
    return losses, norms


@pytest.mark.spread(2)
@pytest.mark.parametrize("num_optimizers", [2, 3])
@pytest.mark.parametrize(("optimizer", "precision"), [("adamw", "fp32"), ("adamw", "fp16"), ("muon", "bf16")])
def test_a_resumed_run_ends_with_the_same_hash_as_one_that_never_stopped(
    recipe, tmp_path, num_optimizers, optimizer, precision, monkeypatch
):
    recipe = recipe.replace(optimizer=optimizer)
    monkeypatch.setattr(torch.amp.GradScaler.__init__, "__defaults__", ("cuda", 2.0**20, 2.0, 0.5, 2, True))
    recipe = recipe.replace(run={"checkpoint_every": 3}, precision=precision)
    whole = train(recipe, tmp_path / "whole")
    resumed = train(
        recipe, tmp_path / "resumed", resume=tmp_path / "whole" / "checkpoints" / "step-000003",
        num_optimizers=num_optimizers,
    )  # fmt: skip
    assert [report["step"] for report in resumed[0]] == [4, 5, 6]
    skips = [math.isinf(report["grad_norm"]) for report in whole[0]]
    assert any(skips) == (precision == "fp16"), "the loss scale must be at work"
    assert not all(skips)
    assert digest(tmp_path / "resumed", 6) == digest(tmp_path / "whole", 6)
    assert digest(tmp_path / "whole", 6) != digest(tmp_path / "whole", 3)


def test_a_run_resumes_with_another_number_of_ranks(recipe, tmp_path):
    recipe = recipe.replace(run={"checkpoint_every": 3})
    train(recipe, tmp_path / "two")
    start = tmp_path / "two" / "checkpoints" / "step-000003"
    one = recipe.replace(scaling={"num_workers": 1, "num_optimizers": 1})
    reports = train(one, tmp_path / "one", resume=start)
    assert [report["step"] for report in reports[0]] == [4, 5, 6]
    tokens = 4 * 32  # of a rank's step; two ranks made the first three
    assert [report["total_tokens"] for report in reports[0]] == [(6 + own) * tokens for own in (1, 2, 3)]
    assert CheckpointReader(tmp_path / "one" / "checkpoints" / "step-000006").world_size == 1


def test_what_is_exported_is_what_was_trained(recipe, tmp_path):
    recipe = recipe.replace(tie_embeddings=True)
    reports = train(recipe, tmp_path / "run")
    out = export_full(tmp_path / "run" / "checkpoints" / "step-000006", tmp_path)
    model = build_model(recipe, 256)
    model.load_state_dict(load_file(out), strict=True)
    last = merge_reports({rank: ranks[-1] for rank, ranks in enumerate(reports)})
    assert plain_validation(recipe, model) == pytest.approx(last.validation_loss, rel=1e-4)


@torch.no_grad()
def plain_validation(recipe: RecipeConfig, model: torch.nn.Module) -> float:
    corpus = recipe_corpus(recipe)
    batches = [corpus.eval_batch(index) for index in range(recipe.eval_batches)]
    losses = [float(next_token_loss(model, batch.inputs, batch.targets)) for batch in batches]
    return sum(losses) / len(losses)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_learn_too(recipe, precision):
    reports = train(recipe.replace(precision=precision, steps=30))
    assert reports[0][-1]["validation_loss"] < 0.7 * math.log(256)


def test_a_pretrained_directory_is_what_training_starts_from(recipe, tmp_path):
    """The first loss is that of the model as transformers loads it; a resumed run does not look for it again."""
    transformers = pytest.importorskip("transformers")
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=64, vocab_size=256, **dropout)
    torch.manual_seed(7)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "pretrained", max_shard_size="50KB")
    model = f"hf:{tmp_path / 'pretrained' / 'config.json'}"
    recipe = recipe.replace(model=model, init_from=str(tmp_path / "pretrained"), run={"checkpoint_every": 3})
    reports = train(recipe, tmp_path / "run")[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained").eval()
    text = tokens_of(recipe, make_tokenizer(recipe.tokenizer))
    batch = train_batch(text.train, size=4, seq_len=32, seed=batch_seed(recipe.seed, 0, 0, 0))
    with torch.no_grad():
        assert reports[0]["loss"] == pytest.approx(float(next_token_loss(loaded, *batch)), rel=1e-5)
    resumed = tmp_path / "run" / "checkpoints" / "step-000003"
    gone = recipe.replace(init_from=str(tmp_path / "gone"))
    again = [report["loss"] for report in train(gone, resume=resumed)[0]]
    assert again == pytest.approx([report["loss"] for report in reports[3:]], rel=1e-4)


class Decided:
    """An optimizer whose last decision has this norm."""

    def __init__(self, norm: float) -> None:
        self.norm = norm

    def last_decision(self) -> Future[Any]:
        return settled(SimpleNamespace(norm=self.norm))


def unreported(decision: Future[Any]) -> Unreported:
    report = StepReport(
        step=7, loss=2.5, lr=0.1, tokens=8, total_tokens=56, step_seconds=1.0, fetch_wait_seconds=0.0,
        optimizer_exposed_seconds=0.0, memory_bytes=9, validation_loss=1.5, validation_batches=2,
    )  # fmt: skip
    checkpoint = CheckpointInfo(path="step-7", step=7, digest="d")
    return Unreported(report=report, decision=decision, checkpoint=checkpoint)


@pytest.mark.parametrize(("known", "norm"), [(True, 0.25), (False, 0.75)], ids=["decided", "not decided"])
def test_the_row_that_a_dead_rank_owes_is_sent_by_its_next_life(known: bool, norm: float) -> None:
    """With the norm of its own step, which is the last one if it was not decided when the state was kept."""
    row = LateRow(Decided(0.0))  # type: ignore[arg-type]
    row.loss, row.before = torch.tensor(1.25), unreported(settled(SimpleNamespace(norm=0.25)) if known else Future())
    again = LateRow(Decided(0.75))  # type: ignore[arg-type]
    again.load_state_dict(from_bytes(to_bytes(row.state_dict())))
    assert again.loss == 1.25
    context = RankContext()
    again.send(context)
    again.send(context)
    (sent,) = context.reports
    assert (sent["step"], sent["loss"], sent["grad_norm"], sent["validation_loss"]) == (7, 2.5, norm, 1.5)


# ---- other data than text -------------------------------------------------------------------------------------------


def test_a_model_learns_the_answers_of_chats_and_shows_it(recipe, tmp_path):
    """After a question that it has not seen it writes the answer, and ends there."""
    chats = [
        {"messages": [{"role": "user", "content": f"hi {at}"}, {"role": "assistant", "content": "hello!"}]}
        for at in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    recipe = recipe.replace(
        data=str(tmp_path / "chats.jsonl"), seq_len=64, steps=60, sample_tokens=32, sample_temperature=0.0,
        eval_every=60,
    )  # fmt: skip
    reports = train(recipe, tmp_path / "run")
    assert reports[0][-1]["validation_loss"] < 0.2 < reports[0][0]["loss"]
    said = (tmp_path / "run" / "samples.txt").read_text()
    assert said.startswith("after step 60\n--- prompt\nhi ")
    assert said.count("--- the model writes\nhello!\n--- the data has\nhello!\n") == 2


def test_a_run_on_a_stream_goes_on_where_its_ranks_were(recipe, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    rows = "".join(json.dumps({"text": f"{at:03d} {VERSE.decode()}"}) + "\n" for at in range(60))
    (tmp_path / "set" / "train.jsonl").write_text(rows)
    recipe = recipe.replace(data=f"datasets:{tmp_path / 'set'}", run={"checkpoint_every": 3})
    whole = train(recipe, tmp_path / "whole")
    stopped = tmp_path / "whole" / "checkpoints" / "step-000003"
    resumed = train(recipe, tmp_path / "resumed", resume=stopped)
    assert [report["loss"] for report in resumed[1]] == [report["loss"] for report in whole[1][3:]]
    assert digest(tmp_path / "resumed", 6) == digest(tmp_path / "whole", 6)


def test_what_is_exported_at_the_end_is_read_by_transformers(recipe, tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "tie_word_embeddings": True, **small}))
    recipe = recipe.replace(model=f"hf:{tmp_path / 'config.json'}", steps=2)
    train(recipe, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    folder = export_model(recipe, checkpoint, tmp_path / "run")
    read = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    trained = load_file(export_full(checkpoint, tmp_path / "flat.safetensors"))
    assert read.keys() == trained.keys()
    assert all(read[name].equal(trained[name]) for name in trained)
