#!/usr/bin/env bash
# timm 1.0.31 with torch 2.14.1: ModelEmaV3 averages a weight as often a step as the state_dict() has names for it, so tied
#   ones twice.
#
# Expected: with decay=0.999 each weight of the average forgets at that rate: after 100 updates toward a new model it has
#   gone 10 % of the way. torch's AveragedModel does so.
# Seen: the update walks the values of both state_dicts in pairs, and a tied weight is in them once for each of its names,
#   while in the copy that is averaged it is one memory, too. So an embedding that is also the head goes two steps: 0.999
#   is 0.998 for it. A block that stands in a list 12 times (layers that share their weights) goes 12 steps: where the average
#   of the last 1,000 updates was asked for, it is one of the last 83, beside norms and biases that are averaged as asked.
#   Nothing warns, and without ties all is right. ModelEma and ModelEmaV2 do the same, ModelEmaV3 with foreach=False as well.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check timm==1.0.31 torch==2.14.1 torchvision==0.29.1 numpy==2.4.6
cat >"$folder/average.py" <<'PY'
import sys
from collections.abc import Callable

import timm
import torch
from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DECAY, UPDATES, LAYERS = 0.999, 100, 12


class Language(nn.Module):
    """An embedding, ``LAYERS`` blocks, a norm and a head."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        block = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(block if is_tied else nn.Linear(4, 4) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def fill(self, value: float) -> "Language":
        for weight in self.parameters():
            nn.init.constant_(weight, value)
        return self


def with_torch(model: Language) -> tuple[Callable[[Language], None], nn.Module]:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)  # its first update is a copy
    return average.update_parameters, average.module


def with_timm(kind: type, **options: bool) -> Callable[[Language], tuple[Callable[[Language], None], nn.Module]]:
    def made(model: Language) -> tuple[Callable[[Language], None], nn.Module]:
        average = kind(model, decay=DECAY, **options)
        return average.update, average.ema if kind is ModelEma else average.module

    return made


def way(made: Callable[[Language], tuple[Callable[[Language], None], nn.Module]], is_tied: bool) -> dict[str, float]:
    """How far each weight of the average is on the way from a model of zeros to one of ones, after ``UPDATES``."""
    model = Language(is_tied).fill(0)
    update, averaged = made(model)
    model.fill(1)
    for _ in range(UPDATES):
        update(model)
    return {name: getattr(averaged, name).weight.mean().item() for name in ("embedding", "head", "norm")} | {
        "block": averaged.blocks[0].weight.mean().item()}


def gone(steps: int) -> float:
    return 1 - DECAY**steps


asked = dict.fromkeys(("embedding", "head", "norm", "block"), gone(UPDATES))
counted = asked | {"embedding": gone(2 * UPDATES), "head": gone(2 * UPDATES), "block": gone(LAYERS * UPDATES)}
kinds = {"torch's AveragedModel": with_torch, "ModelEma": with_timm(ModelEma), "ModelEmaV2": with_timm(ModelEmaV2),
         "ModelEmaV3": with_timm(ModelEmaV3), "ModelEmaV3, foreach=False": with_timm(ModelEmaV3, foreach=False)}
print(f"timm {timm.__version__}, torch {torch.__version__}: {UPDATES} updates with decay={DECAY} go {gone(UPDATES):.3f} of the way")
is_as_seen = True
for name, made in kinds.items():
    for is_tied in (False, True):
        found = way(made, is_tied)
        print(f"  {name}, {'tied' if is_tied else 'not tied'}: { {key: round(value, 3) for key, value in found.items()} }")
        expected = counted if is_tied and made is not with_torch else asked
        is_as_seen &= all(abs(found[key] - expected[key]) < 1e-3 for key in expected)
sys.exit(not is_as_seen)
PY
"$folder/venv/bin/python" -W ignore "$folder/average.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
