#!/usr/bin/env bash
# datasets 5.2.0 with accelerate 1.15.0: a stream that was shuffled and split is shuffled and split anew in each epoch.
#
# Expected: data.shuffle(seed=42) and then take(n) for evaluation and skip(n) for training, the order in which datasets
#   advises to do it, are two disjoint sets for the whole run, as train_test_split makes them of a dataset in memory.
# Seen: in the first epoch they are. take() and skip() are lazy and count in a shuffle that comes before them, and this
#   one is seeded by seed + epoch. A DataLoader that accelerate has prepared (Trainer's are) calls set_epoch() by itself
#   at each pass, so from the second epoch on another n samples are held out. Both loaders move on together, so a look at
#   one epoch finds nothing in common: but most of what is evaluated has been trained on in an epoch before, and
#   if evaluation runs more or less often than an epoch ends, samples are trained on and evaluated in the same one. The
#   loop itself never names an epoch, and a plain torch DataLoader over the same two streams keeps them apart.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 accelerate==1.15.0 torch==2.13.0 \
  numpy==2.4.6
cat >"$folder/split.py" <<'PY'
import sys

import accelerate
import datasets
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader

SAMPLES, HELD_OUT, EPOCHS = 1000, 100, 3


def trained_before(is_prepared: bool) -> list[int]:
    """For each epoch: how many of the samples that are evaluated at its end have been trained on."""
    stream = Dataset.from_dict({"sample": list(range(SAMPLES))}).to_iterable_dataset(num_shards=4)
    shuffled = stream.shuffle(seed=42, buffer_size=SAMPLES)
    training = DataLoader(shuffled.skip(HELD_OUT).with_format("torch"), batch_size=10)
    evaluation = DataLoader(shuffled.take(HELD_OUT).with_format("torch"), batch_size=10)
    if is_prepared:
        training, evaluation = Accelerator(cpu=True).prepare(training, evaluation)
    trained, counts = set(), []
    for _ in range(EPOCHS):
        trained.update(sample for batch in training for sample in batch["sample"].tolist())
        evaluated = [sample for batch in evaluation for sample in batch["sample"].tolist()]
        assert len(set(evaluated)) == HELD_OUT
        counts.append(len(trained.intersection(evaluated)))
    return counts


plain, prepared = trained_before(False), trained_before(True)
print(f"datasets {datasets.__version__}, accelerate {accelerate.__version__}: of {HELD_OUT} evaluated samples, had been "
      f"trained on by the end of each epoch: {plain} with plain loaders, {prepared} with prepared ones")
sys.exit(not (plain == [0] * EPOCHS and prepared[0] == 0 and min(prepared[1:]) > HELD_OUT // 2))
PY
HF_HOME="$folder/cache" "$folder/venv/bin/python" "$folder/split.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
