#!/usr/bin/env bash
# torch 2.13.0: mse_loss of a sharded DTensor has the right value and, with N ranks, N times the gradient.
#
# Expected: operations on DTensors give what they give on the whole tensor, or raise; a DTensor's mean() does.
# Seen: the value of mse_loss, huber_loss, smooth_l1_loss and binary_cross_entropy is right where ranks have equally many
#   rows. Their gradients are not: the backward operation is a pointwise one to DTensor, so it runs on each rank's rows with
#   reduction="mean" and divides by the local count. A learning rate is N times what it says, a clip hides it, and Adam
#   hides it but for its eps. l1_loss, binary_cross_entropy_with_logits and the same mean written out are right, so a
#   check with those finds nothing. With rows that ranks do not share equally (5 on 2) the values are wrong too, each a mean
#   of means (that of binary_cross_entropy_with_logits as well), where cross_entropy raises an error that says why.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/losses.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

LOSSES = {
    "mean written out": lambda rows, target: (rows - target).square().mean(),
    "l1_loss": F.l1_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "mse_loss": F.mse_loss,
    "huber_loss": F.huber_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
}


def ratios(rank: int, ranks: int, address: str, rows: int) -> None:
    """Write, for each loss, its value and its gradient on a sharded tensor over those on the whole one."""
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    found = {}
    for name, loss in LOSSES.items():
        whole = torch.linspace(0.1, 0.9, rows).requires_grad_()
        target = torch.full((rows,), 0.25)
        sharded = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
        right, value = loss(whole, target), loss(sharded, distribute_tensor(target, mesh, [Shard(0)]))
        right.backward()
        value.backward()
        gradient = sharded.grad.full_tensor()
        found[name] = (round(float(value.full_tensor() / right), 3), round(float(gradient.norm() / whole.grad.norm()), 3))
    if rank == 0:
        torch.save(found, f"{address}.found")
    dist.destroy_process_group()


if __name__ == "__main__":
    results = {}
    for ranks, rows in ((2, 8), (4, 8), (2, 5)):
        address = f"{sys.argv[1]}/{ranks}-{rows}"
        mp.spawn(ratios, (ranks, address, rows), nprocs=ranks)
        results[ranks, rows] = torch.load(f"{address}.found")
    print(f"torch {torch.__version__}, (value, gradient's norm) of a sharded tensor over those of the whole one:")
    for name in LOSSES:
        print(f"  {name}: " + ", ".join(f"{rows} rows on {ranks} ranks {results[ranks, rows][name]}" for ranks, rows in results))
    right, wrong = list(LOSSES)[:3], list(LOSSES)[3:]
    evenly = all(results[ranks, 8][name] == (1.0, ranks if name in wrong else 1.0) for ranks in (2, 4) for name in LOSSES)
    uneven = all(results[2, 5][name][0] != 1.0 for name in wrong) and all(results[2, 5][name][0] == 1.0 for name in right[:2])
    sys.exit(not (evenly and uneven))
PY
"$folder/venv/bin/python" "$folder/losses.py" "$folder" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
