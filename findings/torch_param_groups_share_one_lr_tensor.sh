#!/usr/bin/env bash
# torch 2.13.0: with lr=torch.tensor(...), param groups have one learning rate together, and schedulers multiply by group.
#
# Expected: a group's rate is its own, as with lr=0.1. A tensor is what torch's recipe for compiled optimizers with a
#   scheduler asks for, so that a new rate does not compile again.
# Seen: groups that name no lr of their own all hold the same tensor, which schedulers fill in place. LambdaLR with one
#   function a group and OneCycleLR with one max_lr a group give every group the rate of the last one: a body that should
#   stand still at 0 trains at the head's rate. ReduceLROnPlateau with a factor of 0.5 and three groups divides all rates
#   by 8, not by 2. A scheduler that computes all rates first and has one rule for all (StepLR) looks right, so a check
#   with that one finds nothing. get_last_lr() agrees with the wrong rates, and state_dict() and load_state_dict() keep
#   the tensor common.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch
from torch.optim import lr_scheduler


def rates(kind: str, rate) -> list[float]:
    """The rates of three groups after two steps of a scheduler."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(3)]
    optimizer = torch.optim.AdamW(groups, lr=rate, fused=True)
    if kind == "LambdaLR":
        scheduler = lr_scheduler.LambdaLR(optimizer, [lambda _: 0.0, lambda _: 1.0, lambda _: 0.5])
    elif kind == "OneCycleLR":
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.25, 0.5, 1.0], total_steps=8, pct_start=0.5)
    elif kind == "ReduceLROnPlateau":
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    else:
        scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        optimizer.step()
        scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
    return [round(float(group["lr"]), 4) for group in optimizer.param_groups]


wrong = []
print(f"torch {torch.__version__}, rates of three groups with lr=0.125 and with lr=torch.tensor(0.125):")
for kind in ("LambdaLR", "OneCycleLR", "ReduceLROnPlateau", "StepLR"):
    number, tensor = rates(kind, 0.125), rates(kind, torch.tensor(0.125))
    print(f"  {kind}: {number} and {tensor}")
    if kind == "ReduceLROnPlateau":
        wrong.append((number, tensor) == ([0.0625] * 3, [0.0156] * 3))
    elif kind == "StepLR":
        wrong.append(number == tensor)
    else:
        wrong.append(len(set(number)) == 3 and tensor == [number[-1]] * 3)
sys.exit(not all(wrong))
PY
