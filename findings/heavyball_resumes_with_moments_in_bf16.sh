#!/usr/bin/env bash
# heavyball 3.2.1 with torch 2.13.0: moments that were fp32 are bf16 from the first resume on, while storage_dtype says fp32.
#
# Expected: with bf16 weights, heavyball keeps its moments in fp32 (storage_dtype="float32", the default, which is in each
#   group of the checkpoint), and a run that loads the checkpoint trains on as if it had not been interrupted.
# Seen: the checkpoint has them in fp32. torch's Optimizer.load_state_dict() casts every state but "step" to the dtype of its
#   weight, since torch's own moments have that dtype from the start, and heavyball does not cast them back. All later steps
#   round the moments to bf16, for the rest of the run and in its checkpoints, and the group still says float32. bf16 resolves
#   0.4 to 0.8 %, and a step with beta2=0.999 changes the second moment by 0.1 %, so it is 3 % off after 400 steps, as is the
#   slow moment of AdEMAMix; without the resume, both have the bits of a run with fp32 weights. SOAP, Muon and PSGD
#   are resumed like that, too. With fp32 weights a resumed run of the three classes here has the bits of the other one, so a test of
#   resuming with those finds nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 heavyball==3.2.1
cat >"$folder/resume.py" <<'PY'
import io
import sys
from importlib.metadata import version

import heavyball
import heavyball.utils
import torch

heavyball.utils.compile_mode = None  # its steps without torch.compile
STEPS, CUT = 400, 20
OPTIONS = {"AdamW": {"betas": (0.9, 0.999)}, "AdEMAMix": {}, "SGD": {}}


def moments(name: str, dtype: torch.dtype, is_resumed: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor, str]:
    """(states by name, the weight, what the group says of its dtype) of a run that has, or has not, loaded a checkpoint."""
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = getattr(heavyball, name)([weight], lr=1e-5, **OPTIONS[name])
    for step in range(STEPS):
        if is_resumed and step == CUT:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = getattr(heavyball, name)([weight], lr=1e-5, **OPTIONS[name])
            optimizer.load_state_dict(torch.load(file))
        torch.manual_seed(step)
        weight.grad = (torch.randn(64, 64) + 0.5).bfloat16().to(dtype)
        optimizer.step()
    (state,) = optimizer.state[weight].values()
    found = {key: value for key, value in state.items() if torch.is_tensor(value) and value.shape == weight.shape}
    return found, weight.detach(), optimizer.param_groups[0]["storage_dtype"]


def error(left: torch.Tensor, right: torch.Tensor) -> float:
    return ((left.float() - right.float()).norm() / right.float().norm()).item()


print(f"heavyball {version('heavyball')}, torch {torch.__version__}, after {STEPS} steps, error against fp32 weights' states:")
is_as_seen, worst = True, 0.0
for name in OPTIONS:
    exact, exact_weight, _ = moments(name, torch.float32, False)
    exact_resumed, exact_resumed_weight, _ = moments(name, torch.float32, True)
    is_as_seen &= torch.equal(exact_weight, exact_resumed_weight)
    is_as_seen &= bool(exact) and all(torch.equal(exact[key], exact_resumed[key]) for key in exact)
    straight, _, straight_says = moments(name, torch.bfloat16, False)
    resumed, _, resumed_says = moments(name, torch.bfloat16, True)
    is_as_seen &= straight_says == resumed_says == "float32" and straight.keys() == resumed.keys() == exact.keys()
    for key, reference in exact.items():
        before, after = error(straight[key], reference), error(resumed[key], reference)
        print(f"  {name} {key}: {straight[key].dtype}, {before:.1e}; resumed {resumed[key].dtype}, {after:.1e}; "
              f"the group says {resumed_says}")
        is_as_seen &= straight[key].dtype == torch.float32 and before < 1e-5
        is_as_seen &= resumed[key].dtype == torch.bfloat16 and after > 1e-3
        worst = max(worst, after)
sys.exit(not (is_as_seen and worst > 0.02))
PY
"$folder/venv/bin/python" "$folder/resume.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
