"""Saving and resuming from a rank's side: a resumed run goes on as if it had not stopped, bit for bit."""

from __future__ import annotations

import errno
import random
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.checkpoint import CheckpointReader, rank_file_name
from rayzero.checkpoint import writer as checkpoint_writer
from rayzero.engine import checkpoint as snapshot
from rayzero.engine.context import RankContext, get_context, running_in
from rayzero.errors import CheckpointError
from rayzero.owner import checkpoint as owner_snapshot
from rayzero.protocol.messages import FileEntry
from rayzero.testing import run_ranks

from .models import Net, fit, prepared_copy, same_bits, seeded, tight


class Noisy(Net):
    """With dropout, and a batch norm whose statistics are buffers, of each rank its own."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout, self.bn = dropout, nn.BatchNorm1d(64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), self.dropout)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(self.bn(x.transpose(1, 2)).transpose(1, 2)))


def prepared(config: ZeroConfig | None = None) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    return prepared_copy(seeded(Noisy, seed=get_context().rank), torch.optim.AdamW, config, lr=1e-3)


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), float(numpy.random.rand())]


@pytest.mark.promise("exact", "checkpoints")
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    with running_in(RankContext()):
        model, optimizer = prepared()
        fit(model, optimizer, range(0, 3), max_norm=0.5)
        info = rayzero.save_checkpoint(optimizer, tmp_path / "step-000003", {"step": 3, "seen": [1, 2]})
        expected_draws = draws()
        fit(model, optimizer, range(3, 6), max_norm=0.5)
        expected = rayzero.full_state_dict(model)
        last = rayzero.save_checkpoint(optimizer, tmp_path / "step-000006", {"step": 6})
    assert (info.step, last.step) == (3, 6)
    with running_in(RankContext(resume=tmp_path / "step-000003")) as context:
        random.seed(99)
        numpy.random.seed(99)
        model, optimizer = prepared(tight(Noisy(), prefetch_buffer_size=1))
        assert context.loop_state == {"step": 3, "seen": [1, 2]}
        assert draws() == expected_draws
        fit(model, optimizer, range(3, 6), max_norm=0.5)
        assert same_bits(rayzero.full_state_dict(model), expected)
        again = rayzero.save_checkpoint(optimizer, tmp_path / "again" / "step-000006", {"step": 6})
    assert again.digest == last.digest


@pytest.mark.promise("scalable", "checkpoints")
def test_ranks_resume_with_their_own_state_and_another_number_of_owners(tmp_path: Path) -> None:
    base = seeded(lambda: Noisy(dropout=0.0))

    def start(context: RankContext) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
        return prepared_copy(base, torch.optim.AdamW, lr=1e-3)

    def whole(context: RankContext) -> Any:
        model, optimizer = start(context)
        fit(model, optimizer, range(0, 2), context.rank, max_norm=0.5)
        info = rayzero.save_checkpoint(optimizer, tmp_path / "step-000002", {"rank": context.rank})
        fit(model, optimizer, range(2, 4), context.rank, max_norm=0.5)
        return info, rayzero.full_state_dict(model)

    def second_half(context: RankContext) -> Any:
        model, optimizer = start(context)
        fit(model, optimizer, range(2, 4), context.rank, max_norm=0.5)
        return context.loop_state, rayzero.full_state_dict(model)

    results = run_ranks(whole, 2, 2)
    assert results[0][0] == results[1][0]
    assert not torch.equal(results[0][1]["bn.running_mean"], results[1][1]["bn.running_mean"])
    resumed = run_ranks(second_half, 2, 3, "grpc", resume=tmp_path / "step-000002")
    for rank, ((_, expected), (loop_state, state)) in enumerate(zip(results, resumed, strict=True)):
        assert loop_state == {"rank": rank}
        assert same_bits(state, expected)


def test_the_file_holds_tied_names_buffers_and_no_pickle(tmp_path: Path) -> None:
    with running_in(RankContext()):
        _, optimizer = prepared()
        rayzero.save_checkpoint(optimizer, tmp_path / "step-000000", {})
    with CheckpointReader(tmp_path / "step-000000") as reader:
        assert reader.tied() == {"head.weight": "embed.weight"}
        assert set(reader.buffers()) == {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    assert {path.suffix for path in (tmp_path / "step-000000").iterdir()} == {".safetensors", ".json"}


# ---- a save that failed


def fail_once(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """The first call of a module's function finds the disk full."""
    usual, first = getattr(module, name), iter([True])

    def call(*args: Any, **named: Any) -> Any:
        if next(first, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(*args, **named)

    monkeypatch.setattr(module, name, call)


def withdraw_late(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """Rank ``slow`` looks after its failed save when the other rank has staged its file for the next try."""
    write, withdraw, times, again = snapshot.write_rank_state, snapshot.withdraw, [0, 0], threading.Event()

    def write_and_tell(staging: Path, rank: int, *args: Any, **options: Any) -> FileEntry:
        entry = write(staging, rank, *args, **options)
        times[rank] += 1
        if rank != slow and times[rank] == 2:
            again.set()
        return entry

    def wait_and_withdraw(path: Path) -> None:
        if path.name == rank_file_name(slow):
            assert again.wait(60)
        withdraw(path)

    monkeypatch.setattr(snapshot, "write_rank_state", write_and_tell)
    monkeypatch.setattr(snapshot, "withdraw", wait_and_withdraw)


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize(
    ("module", "name"), [(checkpoint_writer, "_rename_into_place"), (owner_snapshot, "write_tensors")]
)
def test_a_rank_that_hears_late_of_a_failed_save_leaves_the_others_next_try_alone(
    module: Any, name: str, slow: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, module, name)
    withdraw_late(monkeypatch, slow)
    base = nn.Linear(8, 8)

    def loop(context: RankContext) -> str:
        _, optimizer = prepared_copy(base, torch.optim.AdamW)
        with pytest.raises((OSError, CheckpointError), match="No space left on device"):
            rayzero.save_checkpoint(optimizer, tmp_path / "best", {"try": 1})
        return rayzero.save_checkpoint(optimizer, tmp_path / "best", {"try": 2}).path

    assert run_ranks(loop, 2) == [str(tmp_path / "best")] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    with CheckpointReader(tmp_path / "best") as reader:
        reader.verify()
        assert [reader.rank_state(rank)[0]["loop_state"] for rank in range(2)] == [{"try": 2}] * 2
