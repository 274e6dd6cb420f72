#!/usr/bin/env bash
# torch 2.13.0: vector_to_parameters() does not copy the vector, as it says; the model trains in it, and so does each other.
#
# Expected: "Copy slices of a vector into an iterable of parameters." The vector and the parameters are apart afterwards, as
#   they are after parameters_to_vector(), and a parameter stays what it was.
# Seen: each parameter's .data becomes a view of the vector. A best model that is kept as a vector and put back is trained
#   away by the next step: the vector holds the last weights, and evaluation of "the best" says what the last ones
#   do. Two models that begin with one vector (a target network, a teacher, a client of a federated round) are one: a
#   step of the first moves the second, so an average of both (EMA) moves by its own share only. A step of the optimizer
#   shows nothing, as requires_grad, names and the Parameter objects stay. The parameters take the vector's dtype, too: a
#   bf16 model goes on in fp32 if the vector was fp32, and an fp32 one in bf16, where its AdamW rounds small steps away.
#   vector_to_parameters(vector.clone().to(dtype), ...) for each model is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/vector.py" <<'PY'
import copy
import sys

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

DATA = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
LOSS = nn.functional.mse_loss


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def train(one: nn.Module, sign: float = 1.0) -> None:
    """Train it to say the first feature, or the opposite of it."""
    optimizer = torch.optim.SGD(one.parameters(), lr=0.05)
    for _ in range(50):
        optimizer.zero_grad()
        LOSS(one(DATA), sign * DATA[:, :1]).backward()
        optimizer.step()


def put_back(one: nn.Module, vector: torch.Tensor) -> None:
    """The reference: copy_ into each parameter."""
    with torch.no_grad():
        for param, values in zip(one.parameters(), vector.split([param.numel() for param in one.parameters()]), strict=True):
            param.copy_(values.view_as(param))


def kept(put) -> tuple[float, float]:
    """(loss of the vector that was kept as the best, the same after its model was trained on for the opposite)"""
    one = model(1)
    train(one)
    best = parameters_to_vector(one.parameters()).detach().clone()

    def loss() -> float:
        other = model(2)
        put_back(other, best)
        return LOSS(other(DATA), DATA[:, :1]).item()

    put(one, best)
    before = loss()
    train(one, sign=-1.0)
    return before, loss()


def moved(put) -> float:
    """How far a target network moves when only the network that began with the same vector is trained."""
    online, target = model(1), model(2)
    begin = parameters_to_vector(model(3).parameters()).detach()
    for one in (online, target):
        put(one, begin)
    still = copy.deepcopy(target)
    train(online)
    return max((param - old).abs().max().item() for param, old in zip(target.parameters(), still.parameters(), strict=True))


def dtype_after(put, dtype: torch.dtype, vector: torch.dtype) -> torch.dtype:
    one = model(1).to(dtype)
    put(one, parameters_to_vector(one.parameters()).detach().to(vector))
    return one[0].weight.dtype


puts = {"copy_": put_back, "vector_to_parameters": lambda one, vector: vector_to_parameters(vector, one.parameters())}
print(f"torch {torch.__version__}:")
found = {}
for name, put in puts.items():
    found[name] = kept(put), moved(put), dtype_after(put, torch.bfloat16, torch.float32)
    (before, after), away, dtype = found[name]
    print(f"  {name}: the kept vector's loss is {before:.4f} and, after more training, {after:.4f}; a target network moves by "
          f"{away:.4f}; a bf16 weight that is given an fp32 vector is {dtype}")
(same, still, half), (spoilt, away, single) = found.values()
right = same[0] == same[1] and still == 0.0 and half == torch.bfloat16
sys.exit(not (right and spoilt[0] == same[0] and spoilt[1] > 2 * spoilt[0] and away > 0.01 and single == torch.float32))
PY
"$folder/venv/bin/python" -W ignore "$folder/vector.py"
