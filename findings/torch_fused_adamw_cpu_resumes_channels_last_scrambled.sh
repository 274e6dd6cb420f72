#!/usr/bin/env bash
# torch 2.13.0, AdamW(fused=True) on CPU: a checkpoint that goes on in channels_last pairs weights with other weights' moments.
#
# Expected: a memory format is a matter of speed. A model of convolutions that was trained in the contiguous format may be
#   resumed with model.to(memory_format=torch.channels_last): load_state_dict() of model and optimizer, and on. So it is
#   with fused=False: the weights are those of a run that stays contiguous, but for rounding.
# Seen: the model's load_state_dict() copies into the channels_last weights, but the optimizer's keeps the strides of the
#   moments as they were saved. The fused kernel of the CPU walks weight, gradient and moments in the order of memory and
#   does not ask whether their strides agree (on CUDA the same call raises, torch's issue 106951): each weight is updated
#   by the moments of another one, silently. Three steps after the resume, the largest difference is more than three
#   steps. The same happens to a gradient that is assigned with other strides. Moments that are brought into the weights'
#   format after loading, or fused=False, are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/resume.py" <<'PY'
import copy
import sys

import torch
from torch import nn

RATE, BEFORE, AFTER = 1e-2, 5, 3
torch.set_num_threads(1)


def made(fused: bool, form: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=form)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, images: list[torch.Tensor], form: torch.memory_format) -> None:
    for image in images:
        optimizer.zero_grad()
        model(image.contiguous(memory_format=form)).square().mean().backward()
        optimizer.step()


def resumed(fused: bool, form: torch.memory_format, *, moments_too: bool = False) -> torch.Tensor:
    """The weights of a run that began in the contiguous format and went on in ``form``."""
    images = list(torch.randn(BEFORE + AFTER, 2, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    model, optimizer = made(fused, torch.contiguous_format)
    train(model, optimizer, images[:BEFORE], torch.contiguous_format)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = made(fused, form)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    if moments_too:
        for weight, state in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.empty_like(weight).copy_(state[name])
    train(model, optimizer, images[BEFORE:], form)
    return torch.cat([weight.detach().contiguous().flatten() for weight in model.parameters()])


def difference(fused: bool, **more: bool) -> float:
    there = resumed(fused, torch.channels_last, **more)
    return (there - resumed(fused, torch.contiguous_format)).abs().max().item()


found = {"fused=False": difference(False), "fused=True": difference(True)}
found["fused=True, moments in the weights' format"] = difference(True, moments_too=True)
print(f"torch {torch.__version__}: largest difference of a weight {AFTER} steps of rate {RATE} after the resume: {found}")
plain, fused, mended = found.values()
sys.exit(not (plain < 1e-6 and mended < 1e-6 and fused > RATE))
PY
"$folder/venv/bin/python" -W ignore "$folder/resume.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
