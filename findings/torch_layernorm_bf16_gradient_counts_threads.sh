#!/usr/bin/env bash
# torch 2.13.0 on a CPU, bf16: LayerNorm's bias gets a gradient that ends at 256 rows a thread; so does Embedding's weight.
#
# Expected: a sum over the rows of a batch is made in fp32 and rounded once, as Linear, RMSNorm and GroupNorm do it: with
#   4,096 rows that each say 1, all of these have the gradient 4,096.
# Seen: LayerNorm's backward has one bf16 buffer a thread. bf16 has no number between 256 and 258, so 256 + 1 stays 256 and
#   each thread's share ends there: 256 with one thread, 512 with two. The number of threads scales the gradient, and
#   more rows do not change it. An Embedding adds a token's rows in bf16 too, always in one thread: a frequent token
#   (padding, a space) gets 256 instead of 4,096. There is no warning, the loss is right, and gradients that differ in
#   sign hide it. Training on CPUs from a checkpoint that was loaded in its own bf16 meets it; with fp32 weights under
#   autocast an Embedding's sum is fp32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch

ROWS, WIDTH = 4096, 64


def gradients(threads: int, dtype: torch.dtype) -> dict[str, int]:
    """The first element of each gradient when each of the rows adds 1 to it."""
    torch.set_num_threads(threads)
    layers = {"LayerNorm": torch.nn.LayerNorm(WIDTH), "GroupNorm": torch.nn.GroupNorm(1, WIDTH)}
    layers["Linear"] = torch.nn.Linear(WIDTH, WIDTH)
    found = {}
    for name, layer in layers.items():
        layer.to(dtype)(torch.randn(ROWS, WIDTH, dtype=dtype)).backward(torch.ones(ROWS, WIDTH, dtype=dtype))
        found[name] = int(layer.bias.grad[0])
    table = torch.nn.Embedding(2, WIDTH, dtype=dtype)
    table(torch.zeros(ROWS, dtype=torch.long)).backward(torch.ones(ROWS, WIDTH, dtype=dtype))
    return found | {"Embedding": int(table.weight.grad[0, 0])}


right = {"LayerNorm": ROWS, "GroupNorm": ROWS, "Linear": ROWS, "Embedding": ROWS}
single, one, two = gradients(1, torch.float32), gradients(1, torch.bfloat16), gradients(2, torch.bfloat16)
print(f"torch {torch.__version__}, {ROWS} rows of 1: fp32 {single}; bf16 with one thread {one}, with two {two}")
saturated = [right | {"LayerNorm": 256 * threads, "Embedding": 256} for threads in (1, 2)]
sys.exit([single, one, two] != [right, *saturated])
PY
