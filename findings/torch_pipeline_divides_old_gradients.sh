#!/usr/bin/env bash
# torch 2.13.0: a pipeline schedule divides the gradients that were there before its step by its microbatches as well.
#
# Expected: schedule.step() adds the batch's mean gradient to .grad, as loss.backward() does, so that two batches can be
#   accumulated before an optimizer's step. With scale_grads=True (the default) its n microbatches' gradients are divided
#   by n, as the loss is a mean.
# Seen: after the last microbatch it divides all of .grad, with what earlier steps have left there. Of k accumulated batches
#   the last one counts 1, the one before it 1/n, the first 1/n**(k-1): with 8 microbatches, accumulation is a learning
#   rate of 1.14/k of the last batch. Losses are right, nothing warns. A gradient of one's own (a penalty that was
#   backpropagated before the step) shrinks too. All schedules do so. scale_grads=False and a loss that is divided by n
#   is right. The mean of microbatches of different sizes (17 rows in 8) is a mean of means besides, so a row in a short
#   one counts more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/accumulate.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

PARTS, STEPS = 8, 3


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).mean()


def mean_of_parts(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mean(output, target) / PARTS


def gradients(kind: type, loss=mean, rows: torch.Tensor | None = None, **settings: bool) -> list[float]:
    """The weight's gradient after each of three batches whose gradient is 1 each, or after that of ``rows``."""
    model = torch.nn.Linear(1, 1, bias=False)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = kind([stage] if kind is ScheduleInterleaved1F1B else stage, PARTS, loss_fn=loss, **settings)
    found = []
    for _ in range(STEPS if rows is None else 1):
        batch = torch.ones(2 * PARTS, 1) if rows is None else rows
        schedule.step(batch, target=torch.zeros_like(batch))
        found.append(round(model.weight.grad.item(), 4))
    return found


dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
kinds = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)
plain = {kind.__name__: gradients(kind) for kind in kinds}
unscaled = {kind.__name__: gradients(kind, mean_of_parts, scale_grads=False) for kind in kinds}
rows = torch.cat([torch.zeros(16, 1), torch.full((1, 1), 17.0)])
uneven = gradients(ScheduleGPipe, rows=rows)
dist.destroy_process_group()
print(f"torch {torch.__version__}, gradient after 1, 2 and 3 batches of gradient 1, in {PARTS} microbatches: {plain}; with "
      f"scale_grads=False and a divided loss: {unscaled}; of 17 rows with a mean of {rows.mean().item()}: {uneven}")
shrunk = [1.0, round(1 + 1 / PARTS, 4), round(1 + 1 / PARTS + 1 / PARTS**2, 4)]
sys.exit(not (all(values == shrunk for values in plain.values()) and uneven[0] != 1.0
              and all(values == [1.0, 2.0, 3.0] for values in unscaled.values())))
PY
"$folder/venv/bin/python" -W ignore "$folder/accumulate.py" "$folder/group" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
