#!/usr/bin/env bash
# Lightning 2.6.6: with two optimizers, EMAWeightAveraging(update_every_n_steps=10) never averages, and fit() returns the
#   weights from before training.
#
# Expected: every n steps the average takes a share of the weights, and is what validation, checkpoints and the end of fit()
#   have. A module with two optimizers (a GAN, an actor and its critic) has more steps a batch, so it does so more often.
# Seen: the callback looks once a batch, at the number of steps of all optimizers together, less 1, and asks whether n
#   divides it. Two steps a batch make that number 1, 3, 5, ...: no even n divides it, so with n = 2 or 10 the average is the
#   weights before training for the whole run. Validation measures those in each epoch, the checkpoint's state_dict is
#   those, and at the end fit() copies them over the trained weights. Five steps of a critic to one of a generator make it
#   5, 11, 17, ...: no n with a factor of 2 or 3 divides it. With one optimizer, or with n = 1, the default, it is right, so
#   a trial with those shows nothing; nothing warns, and the losses of training fall. A should_update() that counts its
#   own calls is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lightning==2.6.6 torch==2.13.0 numpy==2.4.6
cat >"$folder/average.py" <<'PY'
import logging
import sys

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader

BATCHES, EPOCHS, GOAL = 60, 3, 1.0
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Two(lightning.LightningModule):
    """Two weights that begin at 0 and are drawn to ``GOAL``, each by an optimizer, or both by one."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = steps
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(())) for _ in range(2))
        self.validated: list[float] = []

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        shares = [list(self.weights)] if len(self.steps) == 1 else [[weight] for weight in self.weights]
        return [torch.optim.SGD(share, lr=0.1) for share in shares]

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        optimizers = self.optimizers()
        for optimizer, steps in zip(optimizers if len(self.steps) > 1 else [optimizers], self.steps):
            for _ in range(steps):
                optimizer.zero_grad()
                self.manual_backward(sum((weight - GOAL).square() for weight in self.weights))
                optimizer.step()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.validated.append(round(self.weights[0].item(), 3))


def fitted(steps: tuple[int, ...], every: int) -> tuple[list[float], float, float, float]:
    """The first weight in each validation, in the checkpoint (averaged, and as it was trained), and after fit()."""
    saved = ModelCheckpoint(f"{sys.argv[1]}/{steps}/{every}", save_last=True)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[EMAWeightAveraging(decay=0.5, update_every_n_steps=every), saved])
    module = Two(steps)
    trainer.fit(module, DataLoader(torch.zeros(BATCHES, 1)), DataLoader(torch.zeros(1, 1)))
    file = torch.load(saved.last_model_path, weights_only=False)
    averaged, trained = (round(file[key]["weights.0"].item(), 3) for key in ("state_dict", "current_model_state"))
    return module.validated, averaged, trained, round(module.weights[0].item(), 3)


print(f"lightning {lightning.__version__}, torch {torch.__version__}: a weight that is trained from 0 to {GOAL:.0f}, "
      f"{BATCHES} batches an epoch")
is_as_seen = True
for steps, every, is_averaged in [((1,), 1, True), ((1,), 2, True), ((1,), 10, True), ((1, 1), 1, True), ((1, 1), 3, True),
                                  ((1, 1), 2, False), ((1, 1), 10, False), ((5, 1), 3, False), ((5, 1), 5, True)]:
    validated, averaged, trained, final = fitted(steps, every)
    print(f"  steps of each optimizer a batch {steps}, update_every_n_steps={every}: validated {validated}; checkpoint "
          f"{averaged}, trained {trained}; after fit() {final}")
    is_as_seen &= abs(trained - GOAL) < 0.01
    if is_averaged:
        is_as_seen &= min(validated[-1], averaged, final) > 0.95 * GOAL
    else:
        is_as_seen &= validated == [0.0] * EPOCHS and averaged == final == 0.0
sys.exit(not is_as_seen)
PY
"$folder/venv/bin/python" -W ignore "$folder/average.py" "$folder/checkpoints" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
