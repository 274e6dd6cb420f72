#!/usr/bin/env bash
# Lightning 2.6.6: with EMAWeightAveraging, test(ckpt_path="best") and predict() measure weights that no one has chosen.
#
# Expected: validation during fit runs on the averaged weights, ModelCheckpoint chooses its best by that, and the
#   checkpoint's state_dict is the averaged weights. So trainer.test(ckpt_path="best") tests those.
# Seen: it tests the weights of that step that are not averaged. When the callback meets a checkpoint, it puts its
#   "current_model_state" into the model, which is right for training on; only validation swaps the average in again.
#   trainer.validate() of that file agrees with fit; test() and predict() of the same file, with the same trainer, do not,
#   and neither warns. test() without a path, after fit, is of averaged weights again. So is one by a new Trainer
#   without the callback: which numbers are reported depends on whether the test runs in the script that trained.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lightning==2.6.6 torch==2.13.0 numpy==2.4.6
cat >"$folder/best.py" <<'PY'
import sys

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint


class OneWeight(lightning.LightningModule):
    """A weight that goes from 0 towards 10; what each stage saw of it is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: float | None = None

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return (self.weight - 10.0).square().sum() / 2

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.seen = round(self.weight.item(), 3)
        self.log("away", (self.weight - 10.0).abs())

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.seen = round(self.weight.item(), 3)

    def predict_step(self, batch: torch.Tensor, index: int) -> None:
        self.seen = round(self.weight.item(), 3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(*callbacks: lightning.Callback) -> lightning.Trainer:
    return lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
                             enable_model_summary=False, default_root_dir=sys.argv[1], callbacks=list(callbacks))


model = OneWeight()
five, one = (torch.utils.data.DataLoader(torch.zeros(batches, 1)) for batches in (5, 1))
keeper = ModelCheckpoint(dirpath=sys.argv[1], monitor="away")
training = trainer(EMAWeightAveraging(decay=0.9), keeper)
training.fit(model, five, one)
seen = {"fit's validation": model.seen}
training.test(model, one, verbose=False)
seen["test"] = model.seen
for name in ("validate", "test", "predict"):
    verbose = {} if name == "predict" else {"verbose": False}
    getattr(training, name)(model, one, ckpt_path=keeper.best_model_path, weights_only=False, **verbose)
    seen[f"{name} of best"] = model.seen
plain = trainer(ModelCheckpoint(dirpath=sys.argv[1]))
plain.test(model, one, ckpt_path=keeper.best_model_path, weights_only=False, verbose=False)
seen["a new Trainer's test of best"] = model.seen
print(f"lightning {lightning.__version__}, torch {torch.__version__}: the weight that each saw: {seen}")
raw = {"test of best", "predict of best"}
averaged = {value for name, value in seen.items() if name not in raw}
sys.exit(not (len(averaged) == 1 and {seen[name] for name in raw} == {6.513} and averaged != {6.513}))
PY
cd "$folder" && "$folder/venv/bin/python" best.py "$folder/out" 2>"$folder/log" | grep "^lightning " || {
  tail -n 20 "$folder/log"
  exit 1
}
