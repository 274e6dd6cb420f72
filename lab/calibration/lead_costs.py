"""What a message costs the lead among hundreds of others: fitted to what ``campaigns/many_ranks.py`` measures.

With one rank, a message costs several times as much as with hundreds, because the lead's event loop then takes many at
each turn. So what the simulation of many ranks needs is fitted to runs with many, in which each rank asks itself and in
which the door of a host asks for its ranks::

    a finish, a commit    2 messages a door or rank, 2 an owner, 2 questions a rank where there are doors
    notices               one of the lead's own shards to each rank, or a few
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.calibration.machine import MESSAGES
from lab.simulation.machines import Costs
from rayzero.errors import ConfigError

__all__ = ["LeadCosts", "read_runs"]

_FINISH = ("finish of all but one", "last finish to last answer")
_COMMIT = ("commit to last decision", "notices")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadRun:
    """CPU seconds of the lead in a step of one run, and what it did."""

    ranks: int
    messages: int  # of all finishes and their answers, collects and theirs; as many of commits, decisions, applies
    questions: int  # of ranks, in the calls of doors; and their answers
    notices: float  # to each rank
    finish_s: float
    commit_s: float  # notices included

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> LeadRun:
        """From a line of the benchmark. Raises KeyError for another one."""
        ranks, together = row["ranks"], row["door_of"]
        seconds = {name: phase["cpu_s"] for name, phase in row["phases"].items()}
        return cls(
            ranks=ranks,
            messages=2 * (-(-ranks // together) + row["owners"] - 1),
            questions=2 * ranks if together > 1 else 0,
            notices=row["notices"],
            finish_s=sum(seconds[name] for name in _FINISH),
            commit_s=sum(seconds[name] for name in _COMMIT),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadCosts:
    """CPU seconds of the lead."""

    message_s: float  # for each message that it takes or sends
    question_s: float  # for each rank in a call of a door
    notice_s: float  # for each notice to a rank

    @classmethod
    def fit(cls, runs: Sequence[LeadRun]) -> LeadCosts:
        """The costs whose sums are closest, by least squares of what each run took a rank. Raises ConfigError unless
        some of the runs had doors and some had none."""
        if len({run.questions > 0 for run in runs}) < 2:
            raise ConfigError("there must be runs with and without doors; run many_ranks.py --door-of 1 8 --json")
        sums = np.array([(run.messages / run.ranks, run.questions / run.ranks) for run in runs])
        took = np.array([run.finish_s / run.ranks for run in runs])
        (message_s, question_s), *_ = np.linalg.lstsq(sums, took, rcond=None)
        told = [(run.commit_s - run.finish_s) / run.ranks / run.notices for run in runs]
        found = cls(message_s=float(message_s), question_s=float(question_s), notice_s=float(np.median(told)))
        if min(found.message_s, found.question_s, found.notice_s) <= 0:
            raise ConfigError(f"{found} cannot be: a busy machine has disturbed the runs; measure them again")
        return found

    def seconds(self, run: LeadRun) -> tuple[float, float]:
        """What these costs say that a run took: (finishes, commits with notices)."""
        finish = run.messages * self.message_s + run.questions * self.question_s
        return finish, finish + run.ranks * run.notices * self.notice_s

    def put_into(self, costs: Costs) -> Costs:
        """The costs of a transport, which were measured with one rank. What a step of that one took the lead stays."""
        alone = costs.round_s + MESSAGES * costs.message_s
        return replace(
            costs,
            message_s=self.message_s,
            question_s=self.question_s,
            notice_s=self.notice_s,
            round_s=max(0.0, alone - MESSAGES * self.message_s),
        )


def read_runs(path: Path) -> list[LeadRun]:
    """Read the lines that ``many_ranks.py --json`` prints. Raises ConfigError, with the file's name, for others."""
    try:
        return [LeadRun.of(row) for row in _rows(path.read_text(encoding="utf-8").splitlines())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        raise ConfigError(f"{path} has no lines of python -m lab many_ranks --json: {reason}") from error


def _rows(lines: Iterable[str]) -> Iterable[Mapping[str, Any]]:
    return (json.loads(line) for line in lines if line.strip())
