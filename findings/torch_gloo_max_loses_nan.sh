#!/usr/bin/env bash
# torch 2.13.0 with gloo: all_reduce with MAX keeps a NaN or loses it, by the rank that has it and by its place.
#
# Expected: a maximum with a NaN is NaN, as torch.maximum() and amax() say. So a flag, a loss or a gradient norm that is
#   reduced with MAX warns every rank of one rank's NaN.
# Seen: of one number, only rank 0's NaN arrives; from any other rank the result is the largest of the finite ones, with
#   nothing to see. Of many numbers, each place has another rank whose NaN arrives, since gloo cuts a tensor in as many
#   parts as there are ranks and each part's comparison begins at another one: with N ranks, a rank that is all NaN
#   makes 1/N of the result NaN. The same code says "NaN" if the rank that diverges has that luck. MIN does the same; SUM
#   keeps every NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/nan.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, LARGE = 4, 4096


def reduced(rank: int, address: str) -> None:
    """Write, for an operation and a size, which share of the result is NaN when rank 0, 1, ... has nothing but NaN."""
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=RANKS)
    shares = {}
    for operation in ("MAX", "MIN", "SUM"):
        for size in (1, LARGE):
            for broken in range(RANKS):
                values = torch.full((size,), float("nan") if rank == broken else 1.0)
                dist.all_reduce(values, getattr(dist.ReduceOp, operation))
                shares.setdefault(f"{operation} of {size}", []).append(values.isnan().float().mean().item())
    torch.save(shares, f"{address}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(reduced, (sys.argv[1],), nprocs=RANKS)
    shares, *others = [torch.load(f"{sys.argv[1]}.{rank}") for rank in range(RANKS)]
    local = torch.stack([torch.tensor(1.0), torch.tensor(float("nan"))]).amax().isnan().item()
    print(f"torch {torch.__version__}: amax() keeps NaN: {local}; share of NaN after gloo's all_reduce when rank 0, 1, 2 or 3 "
          f"has nothing but NaN: {shares}")
    first, every, part = [1.0, 0.0, 0.0, 0.0], [1.0] * RANKS, [1 / RANKS] * RANKS
    seen = {f"{operation} of {size}": first if size == 1 else part for operation in ("MAX", "MIN") for size in (1, LARGE)}
    seen |= {f"SUM of {size}": every for size in (1, LARGE)}
    sys.exit(not (local and shares == seen and all(other == shares for other in others)))
PY
"$folder/venv/bin/python" "$folder/nan.py" "$folder/ranks" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
