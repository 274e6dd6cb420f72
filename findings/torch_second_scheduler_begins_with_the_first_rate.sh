#!/usr/bin/env bash
# torch 2.13.0: a second LambdaLR on an optimizer forgets the learning rate that was set, and goes back to the first's.
#
# Expected: set group["lr"] to a thousandth for a second phase, make a scheduler for it, and the phase runs at the rate that
#   was set: a scheduler takes the optimizer as it is.
# Seen: the first scheduler of an optimizer leaves "initial_lr" in its groups, and each later one keeps that for its base
#   (it is set by setdefault) and never looks at "lr". LambdaLR, of which all of transformers' schedules are made, and
#   CosineAnnealingWarmRestarts multiply that base, so the phase trains at 1.0 instead of 0.001, from the moment they are
#   made. StepLR, ExponentialLR and CosineAnnealingLR go on from "lr" and are right, so whether the set rate counts
#   depends on the class. state_dict() carries "initial_lr", so a checkpoint takes the old rate along to a run that never
#   had a first scheduler. A group without "initial_lr" (or one that sets it, too) is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.23.0
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import sys

import torch
import transformers
from torch.optim import lr_scheduler

FIRST, SECOND, STEPS = 1.0, 0.001, 100
KINDS = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    "transformers' cosine": lambda optimizer: transformers.get_cosine_schedule_with_warmup(optimizer, 0, STEPS),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, STEPS),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 1.0),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, STEPS),
}


def rate_of_phase(make, first: bool, reloaded: bool) -> float:
    """The rate of a phase's second step; ``first``: after a phase with a scheduler, ``reloaded``: from its checkpoint."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=FIRST)
    if first:
        lr_scheduler.ConstantLR(optimizer, factor=1.0)
    if reloaded:
        state = optimizer.state_dict()
        optimizer = torch.optim.SGD([weight], lr=SECOND)
        optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = SECOND
    scheduler = make(optimizer)
    optimizer.step()
    scheduler.step()
    return round(optimizer.param_groups[0]["lr"], 3)


print(f"torch {torch.__version__}, transformers {transformers.__version__}: a phase whose rate was set to {SECOND} runs at")
rates = {name: [rate_of_phase(make, *how) for how in ((False, False), (True, False), (True, True))]
         for name, make in KINDS.items()}
for name, (alone, second, reloaded) in rates.items():
    print(f"  {name}: {alone} if it is the first, {second} if it is the second, {reloaded} from a checkpoint")
wrong = list(rates)[:3]
sys.exit(any(values != [SECOND] + [FIRST if name in wrong else SECOND] * 2 for name, values in rates.items()))
PY
