"""Weights & Biases: one W&B run for the whole run, however often it is resumed. Its own variables count: WANDB_PROJECT,
WANDB_ENTITY, WANDB_MODE, WANDB_API_KEY."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

import wandb

from rayzero.cluster.files.metrics_log import Value
from rayzero.cluster.loggers.reporter import LoggedRun

_ID = "id"


class WandbReporter:
    """W&B's step is the run's; W&B takes no step that it has had, so steps that come again stay as they were."""

    def __init__(self, run: LoggedRun, first_step: int) -> None:
        run.memory.setdefault(_ID, secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rayzero"),
            name=os.environ.get("WANDB_NAME", run.name),
            id=run.memory[_ID],
            resume="allow",
            dir=str(run.directory),
            config=dict(run.settings),
            allow_val_change=True,
            settings=wandb.Settings(console="off", disable_code=True),
        )
        self.where = self._run.url or self._run.dir.removesuffix("/files")

    def log(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        self._run.log({**values, "time": time}, step=step)

    def flush(self) -> None:
        """W&B's own process has the rows, and writes them to its file."""

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state in ("finished", "restarting") else 1)
