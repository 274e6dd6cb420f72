#!/usr/bin/env bash
# torch 2.13.0: whether a step hook of an optimizer runs once or twice depends on which other optimizers the process has.
#
# Expected: an optimizer class whose step() calls its parent's runs a registered step hook once a step, always.
# Seen: once, until the process has made any instance of the parent class; from then on twice a step. torch wraps the
#   step() of a class when the first instance of exactly that class is made, and hooks are called by the wrapper: once by
#   the subclass's, and once more by the parent's inside it. So a hook that changes a learning rate or a weight changes it
#   twice in a program that also has a plain AdamW (another model's, for example), and once in one that has not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch


class Logged(torch.optim.AdamW):
    """Does something around its parent's step, as many training codes do."""

    def step(self, closure=None):
        return super().step(closure)


def calls_of_one_step() -> int:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer, calls = Logged([param]), []
    optimizer.register_step_pre_hook(lambda *given: calls.append(given))
    param.grad = torch.ones(1)
    optimizer.step()
    return len(calls)


before = calls_of_one_step()
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # never stepped, and gone at once
after = calls_of_one_step()
print(f"torch {torch.__version__}: one step of a subclass runs its hook {before} time(s); once an AdamW was made, {after}")
sys.exit((before, after) != (1, 2))
PY
