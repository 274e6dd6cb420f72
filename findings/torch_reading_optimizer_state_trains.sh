#!/usr/bin/env bash
# torch 2.13.0: get_optimizer_state_dict() before the first step changes training: Rprop then steps 1e-6, not its rate.
#
# Expected: a checkpoint that is written before the first step (a test of the storage, a preemption during start-up) reads
#   states. The model trains on as if it had not been written, and optimizer.state_dict() does just that.
# Seen: torch.distributed.checkpoint's getter finds no states, and makes them by a real step of the live optimizer with
#   zero gradients and a learning rate of 0. It puts the rate back, and nothing else. What each class makes of that step
#   stays: Rprop takes the rate of 0 for its first step size, so weights begin with its least step, 1e-6, and need 65
#   steps in one direction to reach a rate of 0.125; ASGD loses its first step; RAdam's first step is half as long, and
#   Adam's three quarters, as they have counted a step; a step hook runs. SGD's weights and Adagrad's are as
#   before. One process and no sharding are enough. An open issue says it of AdamW (pytorch/pytorch#164929); the
#   function's own documentation does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PY'
import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

KINDS = (torch.optim.Rprop, torch.optim.ASGD, torch.optim.RAdam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)
RATE = 0.125


def trained(kind: type[torch.optim.Optimizer], read) -> tuple[float, float, int]:
    """(how far weights have moved after one and after ten steps, calls of a step hook in between)"""
    torch.manual_seed(0)
    model, calls = torch.nn.Linear(8, 8, bias=False), []
    optimizer = kind(model.parameters(), lr=RATE)
    optimizer.register_step_post_hook(lambda *given: calls.append(given))
    before, moved = model.weight.detach().clone(), []
    read(model, optimizer)
    for _ in range(10):
        optimizer.zero_grad()
        (model(torch.ones(1, 8)) - 100).square().sum().backward()  # far away: the gradient keeps its sign
        optimizer.step()
        moved.append((model.weight.detach() - before).abs().mean().item())
    return moved[0], moved[-1], len(calls)


readers = {"optimizer.state_dict": lambda model, optimizer: optimizer.state_dict(),
           "get_optimizer_state_dict": get_optimizer_state_dict}
print(f"torch {torch.__version__}: how far weights have moved after 1 and 10 steps, and calls of a step hook")
found = {}
for kind in KINDS:
    found[kind.__name__] = [trained(kind, read) for read in readers.values()]
    print(f"  {kind.__name__}: " + ", ".join(f"{first:.2g}, {last:.2g} and {calls} after {name}"
          for name, (first, last, calls) in zip(readers, found[kind.__name__], strict=True)))
ratio = {name: (read[0] / plain[0], read[1] / plain[1]) for name, (plain, read) in found.items()}
hooks = all((plain[2], read[2]) == (10, 10 if name == "Adagrad" else 11) for name, (plain, read) in found.items())
changed = max(ratio["Rprop"]) < 0.001 and ratio["ASGD"][0] == 0 and ratio["RAdam"][0] < 0.6 and ratio["AdamW"][0] < 0.8
sys.exit(not (hooks and changed and ratio["SGD"] == ratio["Adagrad"] == (1.0, 1.0)))
PY
