"""Which processes Prometheus is to scrape, in the form that its http_sd and file_sd take."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from rayzero.telemetry.metric import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One process's exporter, and what is said of all its series: see ``names.TARGET_LABELS``."""

    address: str  # host:port
    run: str
    role: Role
    node: str  # its host's address
    index: int | None = None  # of a rank or an owner

    @property
    def labels(self) -> dict[str, str]:
        """What Prometheus adds to every series of this process."""
        index = {Role.RANK: "rank", Role.OPTIMIZER: "actor"}.get(self.role)
        own = {} if index is None else {index: str(self.index)}
        return {"run": self.run, "role": str(self.role), "node": self.node} | own


def service_discovery(targets: Iterable[Target]) -> bytes:
    """JSON that Prometheus' http_sd and file_sd read: a list of {targets, labels}."""
    groups = [{"targets": [target.address], "labels": target.labels} for target in targets]
    return json.dumps(groups, indent=1).encode() + b"\n"
