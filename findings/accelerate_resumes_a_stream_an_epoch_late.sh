#!/usr/bin/env bash
# datasets 5.2.0 with accelerate 1.15.0: a stream that is resumed in its second epoch gives the cut epoch whole, and cuts
#   the next one.
#
# Expected: data.load_state_dict(state) before the loader is made goes on behind the sample of the state, in whichever epoch
#   that was taken: the state has the epoch in it, and a plain DataLoader with set_epoch() on the data does so.
# Seen: the data heed the state only while their epoch is that of the state, and a loader that accelerate has prepared sets
#   the data's epoch itself, to the number of passes that it has made in this process, from 0. So in a state of epoch 1 (from
#   0), the resumed epoch is all of epoch 0 once more, in its order. The pass after it is number 1: there the state is heeded
#   at last, and that epoch begins in the middle. Of three epochs, samples are trained on twice and others left out, and
#   with a state of epoch 5 it is the sixth pass of the new process that is cut. In epoch 0 it fits, so a trial that stops
#   early finds nothing but one sample that is lost: the loader reads one batch ahead, and the state counts it. Nothing warns.
#   loader.set_epoch(epoch) before each pass is right. (accelerate's issue 3996 says of load_state() that a sampler's shuffles
#   begin anew; here a state of the data that was loaded is passed over, and is taken up in another epoch.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 accelerate==1.15.0 torch==2.13.0 \
  numpy==2.4.6
cat >"$folder/resume.py" <<'PY'
import json
import sys

import accelerate
import datasets
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader

SAMPLES, EPOCHS, STOP = 40, 4, 15
KINDS = ("plain", "prepared", "prepared, set_epoch")


class Run:
    """A process that trains on a stream; ``state`` is what it resumes from."""

    def __init__(self, kind: str, state: str | None = None) -> None:
        self.kind = kind
        data = Dataset.from_dict({"sample": list(range(SAMPLES))}).to_iterable_dataset(num_shards=8).with_format("torch")
        if state is not None:
            data.load_state_dict(json.loads(state))
        self.loader = DataLoader(data, batch_size=1)
        if kind != "plain":
            self.loader = Accelerator(cpu=True).prepare(self.loader)

    def epoch(self, number: int):
        """One pass, sample by sample."""
        if self.kind == "plain":
            self.loader.dataset.set_epoch(number)
        elif self.kind == "prepared, set_epoch":
            self.loader.set_epoch(number)
        for batch in self.loader:
            yield int(batch["sample"])


def resumed(kind: str, epoch: int) -> list[tuple[int, int, int]]:
    """For each epoch from the one that was cut on: (samples of the new process, seen twice in the epoch, never seen in it)."""
    first = Run(kind)
    for number in range(epoch):
        assert sorted(first.epoch(number)) == list(range(SAMPLES))
    passing, before = first.epoch(epoch), []
    while len(before) < STOP:
        before.append(next(passing))
    state = json.dumps(first.loader.dataset.state_dict())
    second, found = Run(kind, state), []
    for number in range(epoch, EPOCHS):
        given = list(second.epoch(number))
        seen = (before if number == epoch else []) + given
        found.append((len(given), len(seen) - len(set(seen)), SAMPLES - len(set(seen))))
    return found


found = {(kind, epoch): resumed(kind, epoch) for kind in KINDS for epoch in (0, 1)}
print(f"datasets {datasets.__version__}, accelerate {accelerate.__version__}: stopped after {STOP} of {SAMPLES} samples; by "
      "epoch from that one on: (samples given, twice, never):")
for (kind, epoch), counts in found.items():
    print(f"  {kind}, stopped in epoch {epoch}: {counts}")
whole = (SAMPLES, 0, 0)
right = [(SAMPLES - STOP, 0, 0), whole, whole, whole]
ahead = [(SAMPLES - STOP - 1, 0, 1), whole, whole, whole]
sys.exit(not (found["plain", 0] == right and found["plain", 1] == right[:3]
              and found["prepared", 0] == found["prepared, set_epoch", 0] == ahead
              and found["prepared, set_epoch", 1] == ahead[:3]
              and found["prepared", 1] == [(SAMPLES, STOP, 0), (SAMPLES - STOP - 1, 0, STOP + 1), whole]))
PY
HF_HOME="$folder/cache" "$folder/venv/bin/python" "$folder/resume.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
