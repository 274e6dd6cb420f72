#!/usr/bin/env bash
# pytorch-optimizer 4.1.0 and heavyball 3.2.1: a weight that is thawed late is moved by up to 27 learning rates.
#
# Expected: Adam and its kin move a weight by about one learning rate at its first gradient, whenever that comes: torch
#   counts steps for each parameter, so that the bias corrections fit the moments, which begin at zero.
# Seen: many optimizers of pytorch-optimizer, and those of heavyball, count steps for the group. A weight of the group
#   that gets its first gradient after 1,000 steps of the others (a backbone that is thawed, an expert that no token had
#   chosen, a head of a later stage) has fresh moments but no correction left. AdamP, AdaBelief and AdEMAMix move it 2.5
#   rates instead of 1. LaProp divides by the uncorrected second moment before its first moment smooths: 25 rates of that
#   one package, and heavyball's LaProp makes 1. heavyball's RMSprop makes 10, its NAdam 27. pytorch-optimizer's own
#   AdamW and NAdam are right, as they are torch's, so a trial with those shows nothing. A group of its own
#   (add_param_group) for what is thawed avoids it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 pytorch-optimizer==4.1.0 \
  heavyball==3.2.1
"$folder/venv/bin/python" -W ignore - <<'PY'
import sys
from importlib.metadata import version

import heavyball
import heavyball.utils
import pytorch_optimizer
import torch

heavyball.utils.compile_mode = None  # its steps without torch.compile
RATE = 1e-3


def first_move(make, late: int) -> float:
    """How far a weight moves at its first gradient, in learning rates, when another one has made ``late`` steps."""
    torch.manual_seed(0)
    early, thawed = (torch.nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    optimizer = make([early, thawed], lr=RATE, weight_decay=0.0)
    for _ in range(late):
        early.grad = torch.randn(8, 8)
        optimizer.step()
    early.grad, thawed.grad = torch.randn(8, 8), torch.randn(8, 8)
    optimizer.step()
    return float((thawed.detach() - 1).abs().mean()) / RATE


makers = {"torch AdamW": torch.optim.AdamW} | {
    f"{package.__name__} {name}": getattr(package, name)
    for package, names in ((pytorch_optimizer, ("AdamW", "AdamP", "AdaBelief", "AdEMAMix", "LaProp")),
                           (heavyball, ("LaProp", "NAdam", "RMSprop")))
    for name in names
}
moves = {name: (first_move(make, 0), first_move(make, 1000)) for name, make in makers.items()}
print(f"torch {torch.__version__}, pytorch-optimizer {version('pytorch-optimizer')}, heavyball {version('heavyball')}:")
for name, (at_once, late) in moves.items():
    print(f"  {name}: the first move is {at_once:.2f} rates at the start, {late:.2f} after 1,000 steps of another weight")
ratio = {name: late / at_once for name, (at_once, late) in moves.items()}
right = [ratio[name] for name in ("torch AdamW", "pytorch_optimizer AdamW", "heavyball LaProp")]
too_far = [ratio[f"pytorch_optimizer {name}"] for name in ("AdamP", "AdaBelief", "AdEMAMix")]
far_too_far = [ratio[name] for name in ("pytorch_optimizer LaProp", "heavyball NAdam", "heavyball RMSprop")]
sys.exit(not (max(right) < 1.1 and min(too_far) > 2.0 and min(far_too_far) > 9.0))
PY
