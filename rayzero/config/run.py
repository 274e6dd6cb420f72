"""``ScalingConfig`` and ``RunConfig``: how many processes a run has, where it writes its files, what it measures
(``TelemetryConfig``), and how its connections are protected (``SecurityConfig``)."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Unpack

from pydantic import BeforeValidator, Field, Strict, field_validator, model_validator

from rayzero.config.arguments import RunArguments, ScalingArguments
from rayzero.config.base import (
    ConfigModel,
    Count,
    Flag,
    Natural,
    PathText,
    Positive,
    Processes,
    Seconds,
    Share,
    Size,
    Spares,
    Text,
    WholeSeconds,
)
from rayzero.config.choices import CheckpointErrors, LoggerName, named_loggers
from rayzero.config.text import Takes

Port = Annotated[int, Strict(), Field(ge=0, le=65535)]


class TelemetryConfig(ConfigModel):
    """Says what a run measures and exports, and where Prometheus finds it."""

    enabled: Flag = True
    """True: every process serves its metrics. False: no process opens a port, and nothing is written for Prometheus;
    processes still count, because that costs almost nothing."""

    bind: Literal["auto", "loopback", "node"] = "auto"
    """Address that exporters listen on. "auto": loopback if the whole run is on one node, else each node's address.
    "loopback": always loopback. "node": always the node's address, for a Prometheus in another container; without
    web_config, any client may read it. With "auto" on several nodes and without web_config, only the run's own
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


class SecurityConfig(ConfigModel):
    """Says how connections between optimizer actors and ranks are protected. Ray's own are not, and
    metrics have run.telemetry.web_config: see SECURITY.md."""

    tls: Literal["auto", "always", "never"] = "auto"
    """Mutual TLS. "auto": on every connection that is not to a loopback address. "always": on those too. "never":
    gradients, weights and the run's token cross the network in clear."""

    certificate: str | None = None
    """PEM file of the certificate that every process shows, with the DNS names owner.rayzero and rank.rayzero, read
    where the run is started, and again when the file changes; null: the run makes an authority of its own, and for each
    process a certificate that lasts a day and is renewed."""

    key: str | None = None
    """PEM file of the certificate's private key."""

    authority: str | None = None
    """PEM file of the authority whose certificates are accepted. One with the name of a role lets a process join."""

    @model_validator(mode="after")
    def _all_files_or_none(self) -> Self:
        given = [name for name in ("certificate", "key", "authority") if getattr(self, name) is not None]
        if given and len(given) < 3:
            raise ValueError(f"{' and '.join(given)} without the rest; pass certificate, key and authority, or none")
        if given and self.tls == "never":
            raise ValueError('certificate is set but tls is "never"; leave one of them out')
        return self


MAX_NAME_BYTES = 128
"""The most bytes of a run's name in UTF-8: every slab of shared memory has the name in its header, with this room."""


def _network_of(address: str) -> str | None:
    """The network of an address with a prefix, such as 10.0.0.7/24; None if it is none."""
    try:
        return str(ipaddress.ip_interface(address).network)
    except ValueError:
        return None


class ScalingConfig(ConfigModel):
    """Says how many processes a run has and what each may use."""

    num_workers: Processes = 2
    """Rank workers: data-parallel copies of the training loop."""

    num_optimizers: Annotated[Processes, Takes("int | tuple[int, int]")] = 2
    """Optimizer actors that own the shards; independent of num_workers. A pair (fewest, most): the run begins with the
    fewest and changes their number as it goes on; see target_exposed."""

    max_optimizers: Processes | None = None
    """The most optimizer actors that a run gives itself; num_optimizers=(fewest, most) sets it. None: their number
    changes only when somebody asks for it (`rayzero scale`)."""

    target_exposed: Annotated[Share, Field(gt=0, lt=1)] = 0.05
    """The largest share of a step that ranks should wait for updates: above it, a run with max_optimizers takes more
    optimizer actors, unless they do not make updates faster; where they idle, it takes fewer."""

    use_gpu: Flag = False
    """True: every rank worker asks Ray for one GPU."""

    cpus_per_worker: Positive | None = None
    """CPUs that Ray reserves for each rank worker; None: a fair share of the cluster's."""

    cpus_per_optimizer: Positive | None = None
    """CPUs that Ray reserves for each optimizer actor; None: a fair share of the cluster's."""

    threads_per_worker: Count | None = None
    """Compute threads of each rank worker; None: as many as it has CPUs, at least one."""

    threads_per_optimizer: Count | None = None
    """Compute threads of each optimizer actor; None: as many as it has CPUs, at least one."""

    bind_numa: Flag = True
    """True: on hosts with several NUMA nodes, each process is bound to the CPUs of one; a rank with a GPU to the node
    beside that GPU."""

    memory_per_worker: Size | None = None
    """Bytes of host memory that Ray reserves for each rank worker; None: nothing (`rayzero train` reserves its
    plan)."""

    memory_per_optimizer: Size | None = None
    """Bytes of host memory that Ray reserves for each optimizer actor; None: nothing (`rayzero train` reserves its
    plan)."""

    optimizer_labels: dict[str, str] = Field(default_factory=lambda: {"rayzero.io/role": "optimizer"})
    """Labels of the nodes that optimizer actors are placed on with placement="cpu_nodes". Each is a label's name and
    Ray's selector for its value: "x", "!x", "in(a, b)" or "!in(a, b)"."""

    placement_timeout: Seconds = 30.0
    """Seconds to wait for the cluster to place every process before the run fails."""

    rescale_on_failure: Flag = False
    """What a run does that starts again from a checkpoint, because it has lost a host, if the cluster has no place for
    all its processes within placement_timeout. True: it goes on with fewer ranks and optimizers, as many as have a
    place; each step then has fewer batches. False: it fails."""

    @model_validator(mode="before")
    @classmethod
    def _take_pair(cls, settings: Any) -> Any:
        """A pair of optimizer actors sets two fields."""
        pair = settings.get("num_optimizers") if isinstance(settings, Mapping) else None
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return settings
        return {**settings, "num_optimizers": pair[0], "max_optimizers": pair[1]}

    @model_validator(mode="after")
    def _check_optimizers(self) -> Self:
        if self.max_optimizers is not None and self.max_optimizers < self.num_optimizers:
            raise ValueError(
                f"max_optimizers is {self.max_optimizers}, but num_optimizers is {self.num_optimizers}: pass the "
                "fewest first"
            )
        return self

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ScalingArguments]) -> None: ...


class RunConfig(ConfigModel):
    """Says where a run's files go and when it writes checkpoints."""

    name: str = "rayzero"
    """Name of the run's directory; at most 128 bytes."""

    storage_path: PathText = "runs"
    """Directory in which each run has its directory."""

    checkpoint_every: Count | None = None
    """Steps between checkpoints, which are written while training goes on; None: only the last step's, for which the
    run waits before it ends."""

    keep_last: Count | None = None
    """Checkpoints that `rayzero train` keeps: it deletes older ones once a new one is complete; None: all."""

    keep_every: Count | None = None
    """With keep_last: `rayzero train` never deletes a checkpoint of a step that this number divides."""

    upload_to: str | None = None
    """URL of a folder, such as s3://bucket/run, to which `rayzero train` copies each complete checkpoint beside the
    training; None: nowhere. Needs fsspec and the storage's package (rayzero[s3], rayzero[gcs])."""

    on_checkpoint_error: CheckpointErrors = "warn"
    """What save_checkpoint does if the storage does not take a checkpoint (full, read-only). "warn": it returns None
    with a warning, and training goes on. "raise": it raises CheckpointWriteError on every rank."""

    max_failures: Natural = 3
    """Deaths of processes that the run outlives in all: another process takes the dead one's place and repeats what was
    not decided. If it cannot (its host is lost, or its loop tracks nothing), the run starts again from its newest
    checkpoint. 0: a death ends the run."""

    warm_spares: Spares = 0
    """Processes that wait beside the optimizer actors, with everything imported, so that the successor of one that dies
    starts sooner. Each takes host memory (about 0.2 GB of its own) and no CPU. Ranks run your code, and have none."""

    keep_states: WholeSeconds = 600
    """Seconds that a killed run's states stay in this host's shared memory, so that resume=True finds them. 0: a run
    that was killed goes on from a checkpoint."""

    resume: Flag | PathText = False
    """True: continue the run, from the last step that it decided if it was killed and its states are still in this
    host's shared memory, else from its newest checkpoint; a path or URL: from that checkpoint; False: start anew."""

    report_to: Annotated[tuple[LoggerName, ...], BeforeValidator(named_loggers), Takes("str | Sequence[str]")] = ()
    """Loggers that get the rows of metrics.jsonl while the run goes on. A name, a list of them, "all" (those that are
    installed) or "none". docs/loggers.md says where each one writes."""

    network: str | None = None
    """Network of the address at which each optimizer actor listens for other hosts, such as 10.0.0.0/8 or fd00::/8, for
    hosts with several; null: its node's address in Ray, and loopback alone if the run is on one node."""

    telemetry: TelemetryConfig = TelemetryConfig()
    """What the run measures and exports, and where Prometheus finds it."""

    security: SecurityConfig = SecurityConfig()
    """How connections between the run's processes are protected."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[RunArguments]) -> None: ...

    @model_validator(mode="after")
    def _spares_take_places(self) -> Self:
        if self.warm_spares and not self.max_failures:
            raise ValueError(
                f"warm_spares is {self.warm_spares} but max_failures is 0, so nobody is replaced; raise max_failures "
                "or leave warm_spares at 0"
            )
        return self

    @model_validator(mode="after")
    def _something_is_deleted(self) -> Self:
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError(
                f"keep_every is {self.keep_every} but keep_last is null, so nothing is deleted; set keep_last, too"
            )
        return self

    @field_validator("name")
    @classmethod
    def _one_folder(cls, value: str) -> str:
        if not value or value in (".", "..") or "/" in value or "\\" in value or "\0" in value:
            raise ValueError("must be a plain folder name")
        if (size := len(os.fsencode(value))) > MAX_NAME_BYTES:
            raise ValueError(f"takes {size} bytes and may take at most {MAX_NAME_BYTES}; shorten it")
        return value

    @field_validator("network")
    @classmethod
    def _is_network(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                ipaddress.ip_network(value)
            except ValueError as error:
                near = _network_of(value) or "10.0.0.0/8 or fd00::/8"
                raise ValueError(f"must be a network such as {near} ({error})") from None
        return value

    @field_validator("storage_path")
    @classmethod
    def _is_no_url(cls, value: str) -> str:
        if "://" in value:
            raise ValueError("must be a folder that all nodes see; give the URL as upload_to")
        return value

    @field_validator("upload_to")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value:
            raise ValueError("must be a URL such as s3://bucket/run")
        return value

    @property
    def path(self) -> Path:
        """The run's directory."""
        return Path(self.storage_path) / self.name

    @property
    def discovery_dir(self) -> Path:
        """The directory where a Prometheus that was configured once finds this run's targets while it runs."""
        chosen = self.telemetry.discovery_dir
        return Path(self.storage_path) / ".targets" if chosen is None else Path(chosen)
