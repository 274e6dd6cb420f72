"""What is simulated on: hosts, and what RayZero's code costs on them. The user describes or measures every figure.

``python -m lab simulation`` measures those of this host; JSON holds them between commands."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from rayzero.errors import ConfigError

__all__ = ["Costs", "Machine", "Measured", "Moving", "MovingCosts", "Options", "Stream", "Transport"]

Transport = Literal["inproc", "shm", "grpc"]
Moving = Literal["plain", "encrypted"]
"""How bytes travel between processes, on connections for transfers; see [Note: beside gRPC] in
store/wire/tensor_stream.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A host, all alike. Speeds are bytes per second."""

    cores: float
    memory: float  # read plus written, by all cores together
    network: float = math.inf  # each way
    link: float = math.inf  # between host memory and one GPU, each way
    adam_core: float  # bytes that one thread reads and writes in an update
    norm_core: float  # bytes that one thread reads while it sums squares
    sum_core: float  # bytes of several ranks' gradients that one thread of an owner adds up
    host_sum_core: float  # the same of a rank's thread that adds up 8 of its host
    copy_core: float  # bytes that one thread copies
    owner_threads: int
    gpus: bool = False  # ranks compute on GPUs, so not on the host's cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Bytes that travel one way between a rank and an owner; seconds are of one core, for each byte."""

    speed: float  # bytes per second of one stream, alone
    rank_byte_s: float
    owner_byte_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingCosts:
    """Both directions."""

    fetch: Stream
    push: Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What RayZero's own code takes over one transport; seconds of one core unless said otherwise."""

    unit_s: float  # a rank's computing thread, for each unit of a step: hooks, schedule, a push
    aside_s: float  # its other threads, for the same: requests, notices, answers
    step_s: float  # a rank, for each step
    shard_s: float  # an owner, for each shard of a step
    message_s: float  # the lead, for each message that it takes or sends
    latency_s: float  # of a message; nobody computes
    moving: Mapping[Moving, MovingCosts]  # empty where nothing travels between processes
    touches: float = 3.0  # bytes of host memory for each byte sent or received: a copy in the kernel, and the card's
    round_s: float = 0.0  # the lead, for each step beside its messages
    question_s: float | None = None  # the lead, for each rank in a call of a host's door; None: as for its own message
    notice_s: float | None = None  # an owner, for each notice to a remote rank or a door; None: as for another message

    @property
    def asked_s(self) -> float:
        """Seconds of the lead for each rank in a call of a host's door."""
        return self.message_s if self.question_s is None else self.question_s

    @property
    def told_s(self) -> float:
        """Seconds of an owner for each notice to a remote rank or a door."""
        return self.message_s if self.notice_s is None else self.notice_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a run is set up, where its ZeroConfig does not say it."""

    transport: Transport
    fetch_once_per_host: bool = False  # the door of a host fetches each part for all of its ranks
    push_once_per_host: bool = False  # ranks of a host add up their gradients, in fp32, before they send them
    ask_once_per_host: bool = False  # a host's door asks the lead, and hears owners, for all of its ranks
    fan_out: int = 0  # of a tree of owners through which the lead asks them; 0: it asks each of them itself
    encrypted: bool = False  # what travels beside gRPC's calls, as between hosts by default
    most_streams: int = 8  # of one rank in each direction; see TransferThreads (store/host/transfer_calls.py)
    compute_threads: float = 1.0  # of a rank on CPUs
    compute_memory: float = 0.0  # bytes of host memory per second that a rank's computing takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of a machine, as ``python -m lab simulation --save`` writes it."""

    machine: Machine
    costs: dict[Transport, Costs]
    part_s: float  # seconds of the lead for each part of a norm

    def to_json(self) -> dict[str, Any]:
        """As plain values; ``from_json`` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> Measured:
        """Raises ConfigError for a missing or an unknown field."""
        for name in ("machine", "costs", "part_s"):
            if name not in described:
                raise ConfigError(f"{name} is missing; write the file with python -m lab simulation --save")
        return cls(
            machine=machine_from(described["machine"]),
            costs={transport: costs_from(costs) for transport, costs in described["costs"].items()},
            part_s=float(described["part_s"]),
        )

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Read a file of figures. Raises ConfigError, with its name, if it is none."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, AttributeError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{path} has no figures of python -m lab simulation --save: {reason}") from error


def machine_from(described: Mapping[str, Any]) -> Machine:
    """The inverse of ``asdict``. Raises ConfigError for a missing or an unknown field."""
    return Machine(**_checked(Machine, described))


def costs_from(described: Mapping[str, Any]) -> Costs:
    """The inverse of ``asdict``. Raises ConfigError for a missing or an unknown field."""
    checked = _checked(Costs, described)
    moving = {kind: _moving_from(kind, costs) for kind, costs in checked["moving"].items()}
    return Costs(**{**checked, "moving": moving})


def _moving_from(kind: str, described: Mapping[str, Any]) -> MovingCosts:
    if kind not in get_args(Moving):
        raise ConfigError(f"Costs.moving has {kind!r}, but must have some of {', '.join(get_args(Moving))}")
    checked = _checked(MovingCosts, described)
    return MovingCosts(**{way: Stream(**_checked(Stream, stream)) for way, stream in checked.items()})


def _checked(kind: type[Machine | Costs | MovingCosts | Stream], described: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(kind)}
    if unknown := sorted(described.keys() - known):
        raise ConfigError(f"{kind.__name__} has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    missing = [f.name for f in fields(kind) if f.name not in described and f.default is f.default_factory]
    if missing:
        raise ConfigError(f"{kind.__name__} lacks {', '.join(missing)}; measure it with python -m lab simulation")
    for name, value in described.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and (math.isnan(value) or value < 0):
            raise ConfigError(f"{kind.__name__}.{name} is {value} but must be a number from 0 on")
    return dict(described)
