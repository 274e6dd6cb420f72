"""``rayzero.track`` in a loop of Hugging Face Accelerate: a rank that dies repeats its step."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import pytest
import torch
from engine.models import VOCAB, Net, same_bits, seeded
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rayzero
from rayzero.engine.context import RankContext
from rayzero.integrations.accelerate import ZeroAccelerator
from rayzero.testing import run_ranks

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_with_trainers"), pytest.mark.thorough]
EPOCHS = 2


def loop(context: RankContext, at: tuple[tuple[int, int], ...] = ()) -> Any:
    """Two epochs; rank 1 dies at each of ``at``: (step, micro-batch), or (step, 2) after its optimizer.step()."""
    torch.set_num_threads(1)
    fatal = at[context.life] if context.rank == 1 and context.life < len(at) else None

    def reach(step: int, point: int) -> None:
        if (step, point) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    accelerator = ZeroAccelerator(cpu=True, gradient_accumulation_steps=2)
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=12)
    both = torch.randint(0, VOCAB, (2, 24, 8), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(both[0], both[1]), batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rayzero.track(scheduler=scheduler)
    step, per_epoch = context.step, len(loader) // 2
    rates = []
    for epoch in range(step // per_epoch, EPOCHS):
        loader.set_epoch(epoch)
        for batch, (inputs, targets) in enumerate(accelerator.skip_first_batches(loader, 2 * (step % per_epoch))):
            with accelerator.accumulate(model):
                outputs = F.dropout(model(inputs), 0.2)
                accelerator.backward(F.cross_entropy(outputs.flatten(0, 1), targets.flatten()))
                reach(step, batch % 2)
                optimizer.step()
                if accelerator.sync_gradients:
                    reach(step, 2)
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                rates.append(scheduler.get_last_lr()[0])
    return context.life, rayzero.full_state_dict(model), rates[-1], step


@pytest.mark.parametrize("at", [((0, 1), (0, 2), (1, 0)), ((2, 2), (3, 0), (5, 1), (5, 2))])
def test_a_rank_that_is_killed_repeats_its_step(at: tuple[tuple[int, int], ...]) -> None:
    plain = run_ranks(loop, 2, 2, "grpc", True)
    again = run_ranks(functools.partial(loop, at=at), 2, 2, "grpc", True, stall_timeout=60.0, max_failures=len(at))
    assert [life for life, *_ in again] == [0, len(at)]
    for (_, mine, *rest), (_, other, *others) in zip(again, plain, strict=True):
        assert same_bits(mine, other)
        assert rest == others
    assert plain[0][-1] == 2 * 3
