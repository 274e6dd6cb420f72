#!/usr/bin/env bash
# torchdata 0.11.0 with torch 2.13.0: StatefulDataLoader continues another shuffle if torch's RandomSampler was passed.
#
# Expected: sampler=RandomSampler(data), with torch's, is what shuffle=True makes, and torchdata's tutorial for 0.8 says
#   that its import patches torch's RandomSampler and BatchSampler, so that they need no state of one's own. A process that
#   loads the state in the middle of an epoch gives the samples that are left.
# Seen: in 0.11 nothing is patched. shuffle=True makes torchdata's own RandomSampler and resumes right. With
#   sampler=RandomSampler(data) or batch_sampler=BatchSampler(RandomSampler(data), ...) the new process shuffles anew and
#   skips as many samples as were given before: interrupted in the middle, a quarter of the epoch is seen twice and a
#   quarter never, without a warning, and the count of batches is right. The class of the same name in
#   torchdata.stateful_dataloader.sampler resumes right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torchdata==0.11.0
cat >"$folder/epoch.py" <<'PY'
import sys
from importlib.metadata import version

import torch
from torch.utils.data import BatchSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as own

DATA, SIZE, BEFORE = list(range(400)), 4, 50


def loader(kind: str, seed: int) -> StatefulDataLoader:
    """A new loader in a process that has drawn other random numbers."""
    torch.manual_seed(seed)
    if kind == "shuffle=True":
        return StatefulDataLoader(DATA, SIZE, shuffle=True)
    if kind == "sampler":
        return StatefulDataLoader(DATA, SIZE, sampler=RandomSampler(DATA))
    if kind == "batch_sampler":
        return StatefulDataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), SIZE, False))
    return StatefulDataLoader(DATA, SIZE, sampler=own.RandomSampler(DATA))


def missed(kind: str) -> int:
    """How many samples of an epoch are never seen if it is interrupted and resumed in the middle."""
    first = loader(kind, 1)
    batches = iter(first)
    seen = [int(sample) for _ in range(BEFORE) for sample in next(batches)]
    second = loader(kind, 2)
    second.load_state_dict(first.state_dict())
    seen += [int(sample) for batch in second for sample in batch]
    assert len(seen) == len(DATA), len(seen)
    return len(set(DATA) - set(seen))


found = {kind: missed(kind) for kind in ("shuffle=True", "sampler", "batch_sampler", "torchdata's sampler")}
print(f"torchdata {version('torchdata')}, torch {torch.__version__}, never seen of {len(DATA)} samples: {found}")
right = found["shuffle=True"] == found["torchdata's sampler"] == 0
sys.exit(not (right and min(found["sampler"], found["batch_sampler"]) > 50))
PY
"$folder/venv/bin/python" -W ignore "$folder/epoch.py"
