"""Lists the processes for Prometheus to scrape, in the format of its http_sd and file_sd."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rayzero.telemetry.metric import Role

_SCHEME = "__scheme__"  # Prometheus' own label for it
_INDEX = {Role.RANK: "rank", Role.OPTIMIZER: "actor"}  # the label that distinguishes processes of a role


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One process's exporter, and the labels of all its series: see ``names.TARGET_LABELS``."""

    address: str  # host:port
    run: str
    role: Role
    node: str  # its host's address
    index: int | None = None  # of a rank or an owner
    scheme: str = "http"  # or "https"

    @property
    def labels(self) -> dict[str, str]:
        own = {_INDEX[self.role]: str(self.index)} if self.role in _INDEX else {}
        return {"run": self.run, "role": str(self.role), "node": self.node} | own

    @property
    def discovered(self) -> dict[str, str]:
        """The labels of its discovery entry: ``labels``, and how Prometheus connects."""
        return self.labels | ({} if self.scheme == "http" else {_SCHEME: self.scheme})

    def url(self, path: str) -> str:
        return f"{self.scheme}://{self.address}{path}"

    @property
    def who(self) -> str:
        """``"rank 0"``, ``"optimizer 1"``, ``"coordinator"``."""
        return str(self.role) if self.index is None else f"{self.role} {self.index}"

    @classmethod
    def of(cls, address: str, labels: Mapping[str, str]) -> Target:
        """The target of a discovery entry. Raises ValueError if labels are missing or wrong."""
        try:
            role = Role(labels["role"])
            index = None if role not in _INDEX else int(labels[_INDEX[role]])
            scheme = labels.get(_SCHEME, "http")
            return cls(address=address, run=labels["run"], role=role, node=labels["node"], index=index, scheme=scheme)
        except KeyError as error:
            raise ValueError(f"the target {address} has no label {error}") from error


def service_discovery(targets: Iterable[Target]) -> bytes:
    """JSON that Prometheus' http_sd and file_sd read: a list of {targets, labels}."""
    groups = [{"targets": [target.address], "labels": target.discovered} for target in targets]
    return json.dumps(groups, indent=1).encode() + b"\n"


def read_discovery(text: bytes) -> tuple[Target, ...]:
    """The targets in the output of ``service_discovery``, in order. Raises ValueError for anything else."""
    try:
        groups = json.loads(text)
        return tuple(Target.of(str(address), group["labels"]) for group in groups for address in group["targets"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"this is not service discovery: {type(error).__name__}: {error}") from error
