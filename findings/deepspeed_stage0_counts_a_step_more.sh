#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO stage 0, bf16 or fp16, with torch's AdamW: Adam has counted a step before the first one.
#
# Expected: after n steps the optimizer's states say step n, as with torch alone, and as the same DeepSpeed says in fp32.
# Seen: n + 1 in 16 bits. The engine steps the optimizer once with zero gradients to make its states. With a weight decay
#   of 0 the weights stay as they are, but Adam's bias correction begins with step 2: the first update is smaller than
#   torch's by the factor that the printed line says, and a checkpoint has the count for good.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 setuptools==80.9.0
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-build-isolation deepspeed==0.19.8
cat >"$folder/count.py" <<'PY'
import os
import sys

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1],
               "DS_ACCELERATOR": "cpu"}
import deepspeed
import torch

deepspeed.init_distributed("gloo")


def trained(precision: str) -> tuple[int, float]:
    """(steps that the states say after one step, how far the first weight has moved over the learning rate)"""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, bias=False)
    before = model.weight.detach().clone()
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 0}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 8, dtype=model.weight.dtype)).float().sum())
    engine.step()
    (state,) = engine.optimizer.state_dict().get("optimizer_state_dict", engine.optimizer.state_dict())["state"].values()
    return int(state["step"]), float((model.weight.detach().float() - before).abs().mean()) / 0.125


plain, half = trained("fp32"), trained("bf16")
print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}: after one step fp32 says {plain[0]} and moved weights "
      f"by {plain[1]:.3f} of the rate, bf16 says {half[0]} and moved them by {half[1]:.3f}")
sys.exit((plain[0], half[0]) != (1, 2))
PY
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
cd "$folder" && "$folder/venv/bin/python" count.py "$port" 2>/dev/null | grep "^deepspeed "
exit "${PIPESTATUS[0]}"
