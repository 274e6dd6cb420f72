#!/usr/bin/env bash
# torchao 0.18.0: beside an element with a larger gradient, AdamWFp8 steps 30 learning rates, and AdamW4bit stands still.
#
# Expected: Adam's step is about one learning rate whatever the size of the gradient. States of fewer bits make it noisy.
# Seen: so it is while the gradients of a block (256 or 128 elements in a row) are alike. Where one column has gradients
#   1,000 times those of the rest, the rest steps 10 rates with AdamWFp8 after 100 steps and 30 after 2,000, each step: a
#   second moment of a millionth of the block's largest is below what fp8 keeps and becomes 0, the first moment of a
#   thousandth is kept, and a step divides by what this one gradient adds, a thousandth of its square. AdamW8bit has the
#   same at 1:10,000. AdamW4bit errs the other way, and far earlier: its map has no 0 for second moments, so at 1:10 a
#   step is a third of a rate and at 1:100 a fiftieth. Nothing is NaN or warns. A block runs along the rows, so one
#   hot input feature does it to the weights of its neighbours. Tensors of less than 4,096 elements have full states and
#   are right, so a small trial shows nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torchao==0.18.0
cat >"$folder/steps.py" <<'PY'
import sys
from importlib.metadata import version

import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

torch.compile = lambda function, **options: function  # the same arithmetic, with no compiler to wait for
torch.set_num_threads(1)
RATE = 1e-3


def last_step(kind: type[torch.optim.Optimizer], ratio: float, rows: int = 64, steps: int = 100) -> float:
    """The last step in learning rates, in the mean, of all columns but the first, whose gradients are about 1."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(rows, 64))
    optimizer = kind([weight], lr=RATE, weight_decay=0.0)
    gradient = torch.full((rows, 64), ratio)
    gradient[:, 0] = 1.0
    for _ in range(steps):
        before = weight.detach().clone()
        weight.grad = gradient * (1 + 0.1 * torch.randn(rows, 64))
        optimizer.step()
    return round(((weight.detach() - before).abs() / RATE)[:, 1:].mean().item(), 2)


KINDS = (torch.optim.AdamW, AdamW8bit, AdamWFp8, AdamW4bit)
print(f"torch {torch.__version__}, torchao {version('torchao')}: a step in learning rates, by the gradient's ratio")
found = {}
for kind in KINDS:
    found[kind] = {ratio: last_step(kind, ratio) for ratio in (1.0, 0.1, 0.01, 0.001, 0.0001)}
    print(f"  {kind.__name__}: {found[kind]}, and {last_step(kind, 0.001, rows=63)} at 0.001 if the tensor is small")
late = last_step(AdamWFp8, 0.001, steps=2000)
print(f"  AdamWFp8 after 2,000 steps: {late} at 0.001")
alike = all(0.9 < steps[1.0] < 1.1 for steps in found.values())
right = all(0.9 < step < 1.1 for step in found[torch.optim.AdamW].values())
far = late > 25 and found[AdamWFp8][0.001] > 8 and found[AdamW8bit][0.0001] > 4
still = found[AdamW4bit][0.1] < 0.5 and found[AdamW4bit][0.01] < 0.05
sys.exit(not (alike and right and far and still))
PY
"$folder/venv/bin/python" -W ignore "$folder/steps.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
