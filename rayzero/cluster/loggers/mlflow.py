"""MLflow: one MLflow run for the whole run, however often it is resumed. Its own variables count: MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME and those for its server's password."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from rayzero.cluster.files.metrics_log import Value
from rayzero.cluster.loggers.reporter import LoggedRun

_RUN = "run_id"
_STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_MOST_PARAMS = 100  # in one call
_MOST_TEXT = 6000  # of one parameter


class MlflowReporter:
    """MLflow keeps every value of a step, so each is sent once, and steps that come again stay as they were."""

    def __init__(self, run: LoggedRun, first_step: int) -> None:
        self._client = MlflowClient()
        if _RUN not in run.memory:
            run.memory[_RUN] = self._made(run)
        self._id = run.memory[_RUN]
        self._client.update_run(self._id, status="RUNNING")
        experiment = self._client.get_run(self._id).info.experiment_id
        self.where = f"{self._client.tracking_uri} (experiment {experiment}, run {self._id})"

    def _made(self, run: LoggedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rayzero")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        made: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(_allowed(key), str(value)[:_MOST_TEXT]) for key, value in run.settings.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(made, params=params[first : first + _MOST_PARAMS])
        return made

    def log(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        moment = round(time * 1000)
        numbers = {_allowed(name): float(value) for name, value in values.items() if not isinstance(value, str)}
        self._client.log_batch(self._id, metrics=[Metric(name, n, moment, step) for name, n in numbers.items()])

    def flush(self) -> None:
        """Each call has been answered."""

    def close(self, state: str) -> None:
        if state in _STATES:
            self._client.set_terminated(self._id, _STATES[state])


def _allowed(name: str) -> str:
    """The name, without the characters that MLflow refuses."""
    return re.sub(r"[^\w\-. :/]", "_", name)
