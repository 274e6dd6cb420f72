#!/usr/bin/env bash
# torch 2.13.0: SGD with momentum and fused=True begins with old memory when GradScaler skips its first step.
#
# Expected: fused=True is the same arithmetic in one kernel. GradScaler starts with a scale that overflows on purpose and
#   skips such steps, so the first real step is that of an SGD that has seen nothing.
# Seen: step() makes the momentum buffers with empty_like and lets the kernel fill them if this is the first step. With
#   an overflow the kernel does nothing, the buffers stay in the state as they came from the allocator, and the next step
#   takes them for momentum. Often that memory is zeros and all looks well; after a freed tensor of 1000 a weight went
#   from 1 to -61.6 instead of 0.875. With torch.use_deterministic_algorithms(True), which fills new memory with NaN, the
#   weight is NaN each time: so the script shows it. AdamW with fused=True is right. The same question, "is this the first
#   step?", is asked once for all weights: one whose first gradient comes after the others' (an expert, a thawed layer)
#   ends the run with a TypeError that names no weight, where foreach and the plain loop go on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import sys
from math import isnan

import torch

RATE, MOMENTUM = 0.125, 0.5
torch.use_deterministic_algorithms(True)  # new memory holds NaN, where it else holds anything


def after_overflow(kind: type[torch.optim.Optimizer], **settings) -> float:
    """A weight after a step that overflowed and one that did not."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = kind([weight], lr=RATE, **settings), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for slope in (3e38, 1.0):  # times the scale, the first one is inf
        optimizer.zero_grad()
        scaler.scale((weight * slope).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return round(float(weight.detach()[0]), 3)


def with_late_gradient(**settings) -> str:
    """What becomes of a run in which the second weight gets a gradient from the second step on."""
    early, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([early, late], lr=RATE, momentum=MOMENTUM, **settings)
    try:
        for step in range(3):
            early.grad, late.grad = torch.ones(2), torch.ones(2) if step else None
            optimizer.step()
    except TypeError as error:
        return f"TypeError: {error}"
    return f"trained to {float(late.detach()[0])}"


adam = {"kind": torch.optim.AdamW, "weight_decay": 0.0}
sgd = {"kind": torch.optim.SGD, "momentum": MOMENTUM}
moved = {f"{kind['kind'].__name__}, fused={fused}": after_overflow(**kind, fused=fused)
         for kind in (adam, sgd) for fused in (False, True)}
late = {f"fused={fused}": with_late_gradient(fused=fused) for fused in (False, True)}
print(f"torch {torch.__version__}, a weight of 1 after an overflow and one step: {moved}")
print(f"  SGD with a weight whose first gradient is late: {late}")
alike = moved["AdamW, fused=False"] == moved["AdamW, fused=True"] == moved["SGD, fused=False"] == 0.875
raised = late["fused=False"] == "trained to 0.6875" and late["fused=True"].startswith("TypeError")
sys.exit(not (alike and isnan(moved["SGD, fused=True"]) and raised))
PY
