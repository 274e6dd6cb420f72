"""Model FLOP/s: what is counted, what it is divided by, and where no MFU is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rayzero.cluster.processes.program_memory import imported_memory
from rayzero.recipes.lm import STEP_FLOPS, report_flops, train_loop
from rayzero.recipes.planning import recipe_work
from rayzero.recipes.recipe import RecipeConfig
from rayzero.telemetry.names import MFU_RATIO, MODEL_FLOPS, STEP_SECONDS
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.testing import run_ranks

DIM, LAYERS, SEQ, BATCH, VOCAB = 64, 2, 32, 2, 256


@pytest.fixture
def recipe(tmp_path: Path) -> RecipeConfig:
    (tmp_path / "text.txt").write_bytes(b"to be or not to be. " * 200)
    return RecipeConfig(
        data=str(tmp_path / "text.txt"), dim=DIM, num_layers=LAYERS, num_heads=2, seq_len=SEQ, batch_size=BATCH,
        steps=3, eval_batches=1, gradient_accumulation_steps=2,
    )  # fmt: skip


def test_a_steps_operations_are_the_models_matrix_products_attention_included(recipe: RecipeConfig) -> None:
    tokens = SEQ * BATCH
    products = 2 * tokens * (LAYERS * 12 * DIM * DIM + VOCAB * DIM)  # the embedding is looked up, not multiplied
    scores = 2 * tokens * SEQ * DIM  # one product of a layer with its whole square of scores; forward has 2, backward 5
    expected = 3 * products + LAYERS * 7 * scores
    assert recipe_work(recipe, VOCAB, imported_memory(), on_gpu=False).step_flops == 2 * expected


def test_each_rank_tells_its_operations_over_its_last_step_and_on_a_cpu_no_mfu(recipe: RecipeConfig) -> None:
    settings = recipe.model_dump(mode="json") | {STEP_FLOPS: 10**9}

    def loop(ctx):
        train_loop(settings)
        return ctx.recorder.gauges(), ctx.reports, ctx.recorder.timing(STEP_SECONDS).count

    for gauges, reports, steps in run_ranks(loop, world_size=2):
        assert steps == recipe.steps
        assert gauges[MODEL_FLOPS] == {(): pytest.approx(10**9 / reports[-1]["step_seconds"])}
        assert MFU_RATIO not in gauges


def test_what_could_not_be_counted_is_not_told(recipe: RecipeConfig) -> None:
    def loop(ctx):
        train_loop(recipe.model_dump(mode="json"))
        return ctx.recorder.gauges()

    (gauges,) = run_ranks(loop, world_size=1)
    assert MODEL_FLOPS not in gauges


def test_mfu_is_a_share_of_a_peak_that_is_known_and_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, precision, ratio in (
        ("NVIDIA H200", "bf16", 0.5),
        ("NVIDIA H200", "fp32", None),  # tensor cores or not: nobody has said
        ("Some other GPU", "bf16", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        recorder = MemoryRecorder()
        report_flops(recorder, 494.5e12, torch.device("cuda", 0), precision)
        assert recorder.gauge(MODEL_FLOPS) == 494.5e12
        assert recorder.gauges().get(MFU_RATIO) == (None if ratio is None else {(): ratio})
