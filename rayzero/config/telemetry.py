"""``TelemetryConfig``: what a run measures and exports, and where Prometheus finds it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from rayzero.config.base import ConfigModel, Count, Flag, Text

Port = Annotated[int, Strict(), Field(ge=0, le=65535)]


class TelemetryConfig(ConfigModel):
    """Says what a run measures and exports, and where Prometheus finds it."""

    enabled: Flag = True
    """True: every process serves its metrics. False: no process opens a port, and nothing is written for Prometheus;
    processes still count, because that costs almost nothing."""

    bind: Literal["auto", "loopback", "node"] = "auto"
    """Address that exporters listen on. "auto": loopback if the whole run is on one node, else each node's address.
    "loopback": always loopback. "node": always the node's address, for a Prometheus in another container; without
    web_config, whoever reaches it may read it. With "auto" on several nodes and without web_config, only the run's own
    tools (rayzero top, rayzero trace) may."""

    web_config: Text | None = None
    """YAML file in the format of Prometheus' exporters, which says who may read metrics: TLS (tls_server_config) and
    passwords (basic_auth_users). It is read where the run is started, and holds for every process; certificates that it
    names may be replaced while the run goes on. null: none."""

    port: Port = 0
    """Port of the coordinator's exporter, which also serves http_sd (``/sd``); 0: any free one."""

    exporter_ports: Port = 0
    """Port of the first exporter: exporter ``i`` listens on this + ``i`` (optimizer actors first, then ranks); 0: any
    free ports."""

    discovery_dir: Text | None = None
    """Directory of file_sd files, one for each running run, which Prometheus watches; null: ``.targets`` in
    storage_path."""

    norms_every: Count | None = 200
    """Steps between measurements of gradient, update and parameter norms by layer group; null: never."""

    measure_bandwidth: Flag = True
    """True: each optimizer actor measures its host's memory bandwidth when it starts (96 MiB, under 0.2 s)."""

    trace_steps: Count | None = None
    """How many of its last steps the run traces: it writes them to trace.json in its folder when it ends, and every
    process keeps spans all the time; null: processes keep spans only while ``rayzero trace`` asks for them."""

    @model_validator(mode="after")
    def _traces_what_it_tells(self) -> Self:
        for name in ("trace_steps", "web_config"):
            if getattr(self, name) is not None and not self.enabled:
                raise ValueError(f"{name} needs enabled: true")
        return self
