#!/usr/bin/env bash
# peft 0.21.2 with torch 2.13.0: LoRA on a nn.TransformerEncoder trains, and is gone as soon as eval() is called.
#
# Expected: an adapter that train() applies, eval() applies, as it is with LoRA on any other Linear.
# Seen: in eval() the encoder's output has the bits of the model without adapters, whether linear1 and linear2 or
#   self_attn are the targets, under no_grad or not; merge_and_unload() brings what was trained back. In eval()
#   TransformerEncoderLayer takes its fast path, one operator that is handed the weights instead of calling the layers; an
#   adapter's layer answers for .weight with its base's. The fast path is left when a weight that it is handed wants a
#   gradient, but those are LoRA's frozen ones, so it is taken even in a forward that backward() follows. So the training
#   loss falls and validation does not move. out_proj of self_attn is read like that in train() as well: an adapter there
#   is listed as trainable and never gets a gradient. Neither package warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 transformers==5.23.0 torch==2.13.0 \
  numpy==2.4.6
cat >"$folder/encoder.py" <<'PY'
import sys

import peft
import torch
from torch.nn import TransformerEncoder, TransformerEncoderLayer

KINDS = (("linear1", "linear2"), ("self_attn",), ("out_proj",))
BATCH = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def found(targets: tuple[str, ...]) -> dict[str, bool]:
    """What holds of an encoder whose adapters are not zero."""
    torch.manual_seed(0)
    base = TransformerEncoder(TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 2)
    plain = base(BATCH).detach()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False))
    trained = model.train()(BATCH)
    if trained.requires_grad:
        trained.square().sum().backward()
    outputs = {"train()": trained, "eval()": model.eval()(BATCH)}
    with torch.no_grad():
        outputs["eval() under no_grad"] = model(BATCH)
    has_gradient = any(param.grad is not None for param in model.parameters() if param.requires_grad)
    outputs["eval() when merged"] = model.merge_and_unload().eval()(BATCH)
    applied = {f"applied in {name}": not torch.allclose(output, plain, atol=1e-4) for name, output in outputs.items()}
    return {"has a gradient": has_gradient} | applied


print(f"peft {peft.__version__}, torch {torch.__version__}: adapters of")
seen = {targets: found(targets) for targets in KINDS}
for targets, facts in seen.items():
    print(f"  {' and '.join(targets)}: {facts}")
in_training = [list(facts.values()) for facts in seen.values()]
sys.exit(in_training != [[True, True, False, False, True], [True, True, False, False, True],
                         [False, False, False, False, True]])
PY
"$folder/venv/bin/python" "$folder/encoder.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
