#!/usr/bin/env bash
# datasets 5.2.0: a stream whose position was restored begins again once anything is chained to it.
#
# Expected: stream.load_state_dict(state) moves a stream to where it was. What is chained to it afterwards (with_format(),
#   map(), shuffle(), take(), ...) transforms what is left of it, as it does with skip().
# Seen: the position belongs to that one object, and each method returns another one, which has none: it gives every
#   sample from the start, silently. So a recipe that restores its stream and then adds with_format("torch"), as one does
#   right before a DataLoader, trains the first samples again. with_format(None) and skip(0), which change nothing, do it,
#   too. Restored as the last call, behind every transform, the same state is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/stream.py" <<'PY'
import sys
from collections.abc import Callable

import datasets
from datasets import Dataset, IterableDataset

SAMPLES, READ = 20, 5
CHAINED: dict[str, Callable[[IterableDataset], IterableDataset]] = {
    "with_format(torch)": lambda stream: stream.with_format("torch"),
    "with_format(None)": lambda stream: stream.with_format(None),
    "skip(0)": lambda stream: stream.skip(0),
    "map": lambda stream: stream.map(lambda sample: sample),
    "filter": lambda stream: stream.filter(lambda sample: True),
    "shuffle": lambda stream: stream.shuffle(seed=1),
    "take": lambda stream: stream.take(SAMPLES),
}


def stream() -> IterableDataset:
    return Dataset.from_dict({"number": list(range(SAMPLES))}).to_iterable_dataset(num_shards=2)


def position(of: IterableDataset) -> dict:
    samples = iter(of)
    for _ in range(READ):
        next(samples)
    return of.state_dict()


def restored(of: IterableDataset, state: dict) -> IterableDataset:
    of.load_state_dict(state)
    return of


def left(of: IterableDataset) -> int:
    return len([int(sample["number"]) for sample in of])


state = position(stream())
alone = left(restored(stream(), state))
skipped = {name: left(chained(stream().skip(READ))) for name, chained in CHAINED.items()}
before = {name: left(chained(restored(stream(), state))) for name, chained in CHAINED.items()}
behind = {name: left(restored(chained(stream()), position(chained(stream())))) for name, chained in CHAINED.items()}
print(f"datasets {datasets.__version__}, {SAMPLES} samples of which {READ} were read: restored alone, {alone} are left")
print(f"  skip({READ}), then chained: {skipped}\n  restored, then chained: {before}\n  chained, then restored: {behind}")
there = SAMPLES - READ
sys.exit(not (alone == there and set(before.values()) == {SAMPLES} and set(skipped.values()) == {there}
              and behind["with_format(torch)"] == behind["take"] == there))
PY
HF_HOME="$folder/hf" "$folder/venv/bin/python" -W ignore "$folder/stream.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
