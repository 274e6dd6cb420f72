"""``TelemetryConfig``: what a run measures and exports, and where Prometheus finds it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, field_validator, model_validator

from rayzero.config.base import ConfigModel, Count, Flag

Port = Annotated[int, Strict(), Field(ge=0, le=65535)]


class TelemetryConfig(ConfigModel):
    """What a run tells of itself, and where Prometheus finds it."""

    enabled: Flag = True
    """False: no process opens a port, and nothing is written for Prometheus. Counting costs so little that it stays."""

    bind: Literal["auto", "loopback", "node"] = "auto"
    """What exporters listen on. "auto": loopback where the whole run is on one node, else each node's address; "node":
    always that, for a Prometheus in another container. Nothing is encrypted or asked for a password."""

    port: Port = 0
    """Port of the coordinator's exporter, which also serves http_sd (``/sd``); 0: any free one."""

    exporter_ports: Port = 0
    """Exporter ``i`` listens on this + ``i`` (optimizer actors first, then ranks); 0: any free ones."""

    discovery_dir: str | None = None
    """Directory of file_sd files, one a running run, which a Prometheus that was configured once watches; null:
    ``.targets`` in storage_path."""

    norms_every: Count | None = 200
    """Steps between measurements of gradient, update and parameter norms by layer group; null: never."""

    measure_bandwidth: Flag = True
    """True: each optimizer actor measures its host's memory bandwidth when it starts (96 MiB, under 0.2 s)."""

    trace_steps: Count | None = None
    """Keep what happened when, in every process, and write the last so many steps to trace.json in the run's folder
    when it ends; null: only while ``rayzero trace`` asks for it."""

    @field_validator("discovery_dir")
    @classmethod
    def _some_directory(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("must not be empty")
        return value

    @model_validator(mode="after")
    def _traces_what_it_tells(self) -> Self:
        if self.trace_steps is not None and not self.enabled:
            raise ValueError("trace_steps needs enabled: true")
        return self
