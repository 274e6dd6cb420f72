#!/usr/bin/env bash
# peft 0.21.2: unload() of a LoRA with modules_to_save or bias does not give the base model back.
#
# Expected: unload() removes the adapter without merging it and returns the base model, as merge_and_unload() returns the
#   merged one. disable_adapter() shows what that is: with modules_to_save=["head"] it computes what the base model did.
# Seen: unload() puts the trained copy of a module of modules_to_save in the original one's place, as if it merged, so
#   the "base" model has a trained head, and the original head is gone. With bias="all" or "lora_only" the base's own
#   biases are trained in place: neither unload() nor disable_adapter() gives the base's outputs, and peft warns of it for
#   disable_adapter() only. A reference model that is made so, or the base of a next adapter, is another model. Loading
#   the base anew is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 torch==2.13.0 numpy==2.4.6
cat >"$folder/unload.py" <<'PY'
import copy
import sys

import peft
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())


@torch.no_grad()
def far(model: nn.Module, base: nn.Module) -> bool:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return not torch.allclose(model(x), base(x), atol=1e-6)


def after_training(**more: object) -> dict[str, bool]:
    """Whether a model gives other outputs than the base: with its adapter, without it, and after unload()."""
    torch.manual_seed(0)
    base = Net()
    before = copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(target_modules=["body"], **more))
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (model(torch.ones(3, 4)) - 1).square().sum().backward()
        optimizer.step()
    told = {"trained": far(model, before)}
    with model.disable_adapter():
        told["disabled"] = far(model, before)
    unloaded = model.unload()
    return told | {"unloaded": far(unloaded, before)}


found = {
    "LoRA alone": after_training(),
    "modules_to_save": after_training(modules_to_save=["head"]),
    "bias=all": after_training(bias="all"),
    "bias=lora_only": after_training(bias="lora_only"),
}
print(f"peft {peft.__version__}, torch {torch.__version__}: outputs that are not the base's:")
for how, told in found.items():
    print(f"  {how}: {', '.join(name for name, other in told.items() if other)}")
sys.exit(found != {
    "LoRA alone": {"trained": True, "disabled": False, "unloaded": False},
    "modules_to_save": {"trained": True, "disabled": False, "unloaded": True},
    "bias=all": {"trained": True, "disabled": True, "unloaded": True},
    "bias=lora_only": {"trained": True, "disabled": True, "unloaded": True},
})
PY
"$folder/venv/bin/python" -W always "$folder/unload.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
grep -o "UserWarning: .*" "$folder/log" | sort | uniq -c || true
