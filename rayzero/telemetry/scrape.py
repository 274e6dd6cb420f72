"""Lists the exporters of a run in the format of Prometheus' http_sd and file_sd, and reads them as Prometheus does:
fetches their pages concurrently with one deadline, and parses them with Prometheus' own parser."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from rayzero.telemetry.metric import METRICS_PATH, Metric, Role
from rayzero.telemetry.pages import load_pair
from rayzero.telemetry.recorder import Labels

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


_MOST_BYTES = 32 << 20  # of one page


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """What opens protected exporters (``telemetry/pages.py``) to the run's own tools, and tells them from others."""

    token: str | None = field(default=None, repr=False)  # None: nothing is shown
    trusted: str = ""  # PEM: the certificates that exporters show
    client: str | None = field(default=None, repr=False)  # PEM: a certificate to show, and its key; None: none
    in_clear: bool = False  # whether the token may go over a connection without TLS, as users' passwords do

    def context(self) -> ssl.SSLContext:
        """For a client's connections. The server's certificate must be one of ``trusted``, whatever its address."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # they are certificates of servers, not of authorities
        if self.trusted:
            context.load_verify_locations(cadata=self.trusted)
        if self.client is not None:
            load_pair(context, self.client.encode())
        return context

    def header(self, scheme: str) -> str:
        shows = self.token is not None and (scheme == "https" or self.in_clear)
        return f"Authorization: Bearer {self.token}\r\n" if shows else ""


_NOBODY = Viewer()


@dataclass(frozen=True, slots=True)
class Series:
    """One page's values, by the names Prometheus gives them (``..._sum`` and ``..._count`` of histograms)."""

    values: Mapping[tuple[str, Labels], float]

    def get(self, metric: Metric, suffix: str = "", **labels: str) -> float | None:
        """Sum over every series of this name that has all these labels; None if there is none."""
        found = [value for of, value in self._of(metric, suffix) if labels.items() <= dict(of).items()]
        return sum(found) if found else None

    def by_label(self, metric: Metric, label: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for labels, value in self._of(metric):
            of = dict(labels).get(label, "")
            sums[of] = sums.get(of, 0.0) + value
        return sums

    def _of(self, metric: Metric, suffix: str = "") -> Iterator[tuple[Labels, float]]:
        return ((labels, value) for (name, labels), value in self.values.items() if name == metric.name + suffix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scraped:
    """One process's answer to a scrape, or why there is none."""

    target: Target
    series: Series | None
    error: str | None = None  # a short reason; None if it answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """The answers of all processes of a run, scraped at one moment."""

    at: float  # seconds since 1970
    processes: tuple[Scraped, ...]


def scrape(targets: Iterable[Target], *, timeout_s: float, viewer: Viewer = _NOBODY) -> Scrape:
    """Scrape every exporter at the same time; gives up on one that has not answered after ``timeout_s``."""
    asked, at = tuple(targets), time.time()
    pages = read_pages([target.url(METRICS_PATH) for target in asked], timeout_s=timeout_s, viewer=viewer)
    return Scrape(at=at, processes=tuple(map(_scraped, asked, pages)))


def discover(url: str, *, timeout_s: float, viewer: Viewer = _NOBODY) -> tuple[Target, ...]:
    """The targets that an http_sd address lists. Raises OSError if it cannot be read, ValueError for other answers."""
    (page,) = read_pages([url], timeout_s=timeout_s, viewer=viewer)
    if isinstance(page, str):
        raise OSError(page)
    return read_discovery(page)


def read_pages(urls: Sequence[str], *, timeout_s: float, viewer: Viewer = _NOBODY) -> list[bytes | str]:
    """The body of each page, or a short reason why there is none; takes at most ``timeout_s`` in all."""
    return asyncio.run(_all(urls, timeout_s, viewer))


def parse_series(text: str) -> Series:
    """Parse a page in Prometheus' text format. Raises ValueError if it is something else."""
    from prometheus_client.parser import (
        text_string_to_metric_families,  # only here: followers, which read keys, need none
    )

    families = text_string_to_metric_families(text)
    try:
        samples = [sample for family in families for sample in family.samples]
    except (ValueError, IndexError) as error:  # its parser raises either
        raise ValueError(f"no page of metrics: {error}") from error
    return Series({(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples})


async def _all(urls: Sequence[str], timeout_s: float, viewer: Viewer) -> list[bytes | str]:
    places = [urlsplit(url) for url in urls]
    tls = viewer.context() if any(place.scheme == "https" for place in places) else None
    asked = zip(urls, places, strict=True)
    return await asyncio.gather(*(_page(url, place, timeout_s, viewer, tls) for url, place in asked))


async def _page(
    url: str, place: SplitResult, timeout_s: float, viewer: Viewer, tls: ssl.SSLContext | None
) -> bytes | str:
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _ask(place, viewer.header(place.scheme), tls if place.scheme == "https" else None)
        head, _, body = answer.partition(b"\r\n\r\n")
        status = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")[2]
        return body if status == "200 OK" else f"{url} answered {status or 'nothing that is HTTP'!r}"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except ssl.SSLError as error:  # its number is none of the kernel's
        return f"TLS: {getattr(error, 'verify_message', None) or error.reason or error}"
    except OSError as error:  # asyncio's own text for one that refuses names the call, not what went wrong
        return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    except ValueError as error:
        return str(error)


def _scraped(target: Target, page: bytes | str) -> Scraped:
    if isinstance(page, str):
        return Scraped(target=target, series=None, error=page)
    try:
        return Scraped(target=target, series=parse_series(page.decode()))
    except ValueError as error:
        return Scraped(target=target, series=None, error=str(error))


async def _ask(place: SplitResult, authorization: str, tls: ssl.SSLContext | None) -> bytes:
    """All that is answered to a request. The caller has a deadline, even if bytes keep arriving slowly."""
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=64 << 10, ssl=tls)
    try:
        head = f"GET {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\n{authorization}Connection: close\r\n\r\n"
        writer.write(head.encode())
        found = bytearray()
        while part := await reader.read(1 << 20):
            found += part
            if len(found) > _MOST_BYTES:
                raise ValueError(f"a page of more than {_MOST_BYTES:,} bytes")
        return bytes(found)
    finally:
        writer.transport.abort()
