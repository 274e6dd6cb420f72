"""TensorBoard: an event file in the run's folder ``tensorboard/`` for each time that the run starts.

[Note: steps that come again] An event file can begin with the mark of a session's start, which carries a step:
TensorBoard then drops what earlier files have from that step on. So a resumed run shows each step once.
"""

from __future__ import annotations

import time as clock
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rayzero.cluster.files.metrics_log import Value
from rayzero.cluster.loggers.reporter import LoggedRun

FOLDER = "tensorboard"


class TensorBoardReporter:
    """Numbers become scalars under their own names; text is left out."""

    def __init__(self, run: LoggedRun, first_step: int) -> None:
        self.where = str(run.directory / FOLDER)
        self._writer = EventFileWriter(self.where)
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=clock.time(), step=first_step, session_log=start))

    def log(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        numbers = {name: float(value) for name, value in values.items() if not isinstance(value, str)}
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=scalars)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, state: str) -> None:
        self._writer.close()
