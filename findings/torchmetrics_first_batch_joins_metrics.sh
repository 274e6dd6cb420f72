#!/usr/bin/env bash
# torchmetrics 1.9.0: metrics with other thresholds or another ignore_index become one for good if a first batch has them equal.
#
# Expected: a MetricCollection shares one state among metrics that count alike (precision, recall and F1 of the same task, as
#   its documentation says), which it can tell from their classes and arguments. Metrics of one class with other arguments
#   count apart.
# Seen: it looks at the numbers that the first update() has left. Where they are equal, the metrics are one group from then
#   on, and only the first of the group is updated. A first batch whose scores are all near 0 or 1 makes precision at
#   a threshold of 0.9 that at 0.5; a first batch without the ignored label makes an accuracy with ignore_index one without.
#   reset() keeps the groups, so a check of two batches before training (Lightning's, for example) decides for all epochs
#   of the run. The small batch and the confident model are the likely ones. Which number is wrong depends on the order of
#   names. forward() before any update() does not group, and compute_groups=False is right. (That users' own
#   classes, BLEUScore and MinMaxMetric are joined so has been reported, #2596, #2916 and #1890; these are of one class, with
#   arguments that it could compare.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/groups.py" <<'PY'
import sys

import torch
import torchmetrics
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryPrecision, MulticlassAccuracy

IGNORED = 0
Batch = tuple[torch.Tensor, torch.Tensor]


def precisions() -> dict[str, Metric]:
    return {"at_50": BinaryPrecision(threshold=0.5), "at_90": BinaryPrecision(threshold=0.9)}


def accuracies() -> dict[str, Metric]:
    return {"all": MulticlassAccuracy(4, average="micro"),
            "but_ignored": MulticlassAccuracy(4, average="micro", ignore_index=IGNORED)}


def measured(metrics: dict[str, Metric], groups: bool, first: Batch, batches: list[Batch]) -> dict[str, float]:
    """What a collection says of ``batches`` after it has seen ``first`` and was reset."""
    collection = MetricCollection(metrics, compute_groups=groups)
    collection.update(*first)
    collection.reset()
    for batch in batches:
        collection.update(*batch)
    return {name: round(value.item(), 4) for name, value in collection.compute().items()}


torch.manual_seed(0)
targets = torch.randint(0, 2, (20, 32))
scores = torch.sigmoid(2 * targets - 1 + 2 * torch.randn(20, 32))
sure = (torch.tensor([0.99, 0.97, 0.02, 0.95]), torch.tensor([1, 1, 0, 0]))
precise = list(zip(scores, targets))

labels = torch.randint(0, 4, (20, 32))
guesses = torch.where((labels == IGNORED) | (torch.rand(20, 32) < 0.5), labels, torch.randint(0, 4, (20, 32)))
without_ignored = (torch.tensor([1, 2, 3, 1]), torch.tensor([1, 2, 3, 3]))
accurate = list(zip(guesses, labels))

kept = labels != IGNORED
by_hand = {
    "precisions": {"at_50": (targets[scores > 0.5] == 1).float().mean().item(),
                   "at_90": (targets[scores > 0.9] == 1).float().mean().item()},
    "accuracies": {"all": (guesses == labels).float().mean().item(),
                   "but_ignored": (guesses == labels)[kept].float().mean().item()},
}
by_hand = {kind: {name: round(value, 4) for name, value in values.items()} for kind, values in by_hand.items()}
makers = {"precisions": (precisions, sure, precise), "accuracies": (accuracies, without_ignored, accurate)}
print(f"torchmetrics {torchmetrics.__version__}, torch {torch.__version__}:")
is_as_seen = True
for kind, (make, first, batches) in makers.items():
    usual, joined = (measured(make(), True, batch, batches) for batch in (batches[0], first))
    apart = measured(make(), False, first, batches)
    print(f"  {kind}: by hand {by_hand[kind]}, after another first batch {usual}, after one where both are equal {joined}, "
          f"with compute_groups=False {apart}")
    is_as_seen &= usual == apart == by_hand[kind] != joined and len(set(joined.values())) == 1
sys.exit(not is_as_seen)
PY
"$folder/venv/bin/python" "$folder/groups.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
