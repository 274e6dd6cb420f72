"""What telemetry costs: a step with recorder and exporter beside one that records nothing, and with scrapers at work.

    python -m lab telemetry [--width 128] [--rows 64] [--rounds 250] [--steps 1] [--scrapes 100] [--apart]

The model of hooks.py (2,000 parameters in 100 units: a step with more events than most), one rank, the in-process
store. Four contestants take turns A B C D D C B A A B ... in one process; a turn is a step that is not timed and
``--steps`` that are. Turns are short and many, because a virtual machine's speed changes from second to second:

- null: what is measured goes to a ``NullRecorder``.
- on: to a ``MemoryRecorder``, whose exporter nobody asks.
- scraped: the same, asked for ``/metrics`` ``--scrapes`` times a second by a process of its own.
- hanging: the same, with 64 connections that have asked and never read.

All take steps of one model, so that nothing but the recorder differs. Ratios within a round (what scrapes cost:
beside the same, not scraped), medians over rounds with their standard error (outer twentieths left out) and the
quarters' range: wall time; processor time of the whole process, exporter and owner included, which a loaded machine
disturbs less; and that of the training thread. The scraper's own processor time is another process's; where the
training uses all cores, wall time has it. ``--apart``: the training process, exporter included, keeps to the first
core and the scraper to the last one, as if Prometheus were on another machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import rayzero
from lab.costs.hooks import PARAMETERS, UNITS, Net, Step, Times, turn
from rayzero.cluster.processes.process_exporter import ExporterSettings, ProcessExporter
from rayzero.engine.context import RankContext, running_in
from rayzero.telemetry.metric import Role
from rayzero.telemetry.recorder import MemoryRecorder, NullRecorder
from rayzero.telemetry.spans import Over, Spans

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
HANGING = 64
LEAST_ROUNDS = 3  # the spread leaves out a round at the top
PAIRS = (("on", "null"), ("scraped", "on"), ("hanging", "on"))

Round = dict[str, Times]  # by contestant
Contestants = Mapping[str, tuple[MemoryRecorder | NullRecorder, Callable[[], AbstractContextManager[None]]]]


def stepper(width: int, rows: int) -> Step:
    """One training step of a model of its own, in the context at hand."""
    torch.manual_seed(0)
    model, x = Net(width), torch.randn(rows, width)
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Turned:
    """A recorder that tells another what it is told, and may be turned to a third; at no further call. So do its spans,
    which the caller keeps. Sources are the kept one's: they are asked when somebody looks."""

    def __init__(self, kept: MemoryRecorder) -> None:
        self.watch, self.spans = kept.watch, TurnedSpans()
        self.turn(kept)

    def turn(self, to: MemoryRecorder | NullRecorder) -> None:
        """Tell ``to`` from now on."""
        self.add, self.observe, self.set = to.add, to.observe, to.set
        self.spans.to, self.spans.add, self.spans.begin = to.spans, to.spans.add, to.spans.begin


class TurnedSpans(Spans):
    """See ``Turned``."""

    to: Spans
    add: Callable[[str, str, float, float, int], None]
    begin: Callable[[str, str, int], Over]

    @property
    def wanted(self) -> bool:
        """Whether spans are kept now."""
        return self.to.wanted


def exposed(recorder: MemoryRecorder) -> ProcessExporter:
    """An exporter as a rank has it."""
    settings = ExporterSettings(
        run="benchmark",
        role=Role.RANK,
        who="rank 0",
        index=0,
        node="localhost",
        host="127.0.0.1",
        port=0,
        slab_dir=Path("/dev/shm"),
        trace=False,
    )
    return ProcessExporter(settings, recorder)


# ---- scrapers ---------------------------------------------------------------------------------------------------


def connect(address: str) -> socket.socket:
    """A connection to an exporter."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def scrape(address: str, per_second: float, core: int | None, at_work: Any, counts: Any) -> None:
    """A process's life: ask while ``at_work.value``, on one connection. ``counts``: answers, errors, late ones."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    while True:
        while not at_work.value:
            time.sleep(0.01)
        with connect(address) as connection:
            due = time.perf_counter()
            while at_work.value:
                connection.sendall(REQUEST)
                counts[0 if answered(connection) else 1] += 1
                due += 1 / per_second
                counts[2] += due < time.perf_counter()
                time.sleep(max(0.0, due - time.perf_counter()))


def answered(connection: socket.socket) -> bool:
    """Read one answer; whether it is a whole page. In few calls: what it costs is not the exporter's."""
    found = connection.recv(1 << 16)
    head, _, body = found.partition(b"\r\n\r\n")
    size = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0] or 0)
    left = size - len(body)
    while left > 0 and (more := connection.recv(left)):
        left -= len(more)
    return head.startswith(b"HTTP/1.1 200 OK\r\n") and left == 0 < size


class Scraper:
    """A process that scrapes while it is told to."""

    def __init__(self, address: str, per_second: float, core: int | None) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._at_work, self.counts = spawn.RawValue("b", 0), spawn.RawArray("q", 3)  # one writer each: no locks
        args = (address, per_second, core, self._at_work, self.counts)
        self._process = spawn.Process(target=scrape, args=args, daemon=True)
        self._process.start()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Scrape inside the context."""
        self._at_work.value = 1
        try:
            yield
        finally:
            self._at_work.value = 0

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


@contextmanager
def hanging(address: str) -> Iterator[None]:
    """Connections that have asked ten times and never read."""
    connections = [connect(address) for _ in range(HANGING)]
    try:
        for connection in connections:
            connection.sendall(REQUEST * 10)
        yield
    finally:
        for connection in connections:
            connection.close()


# ---- the contest ------------------------------------------------------------------------------------------------


def main() -> None:
    """Hold the contest and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=250)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--scrapes", type=float, default=100.0, help="a second")
    parser.add_argument("--apart", action="store_true", help="training on the first core, scraper on the last")
    options = parser.parse_args()
    if options.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds {options.rounds}: give at least {LEAST_ROUNDS}; fewer rounds have no spread to print")
    cores = sorted(os.sched_getaffinity(0))
    if options.apart:
        os.sched_setaffinity(0, cores[:1])
        torch.set_num_threads(1)
    recorder, null = MemoryRecorder(), NullRecorder()
    turned = Turned(recorder)
    with ExitStack() as stack:
        stack.enter_context(running_in(RankContext(recorder=turned)))
        step = stepper(options.width, options.rows)
        exposure = exposed(recorder)
        stack.callback(exposure.close)
        address = exposure.target.address
        scraper = Scraper(address, options.scrapes, cores[-1] if options.apart else None)
        stack.callback(scraper.close)
        contestants: Contestants = {
            "null": (null, nullcontext),
            "on": (recorder, nullcontext),
            "scraped": (recorder, scraper.at_work),
            "hanging": (recorder, lambda: hanging(address)),
        }
        there, back = dict(contestants), dict(reversed(list(contestants.items())))
        for _ in range(3):
            step()
        rounds = [play(back if i % 2 else there, turned, step, options.steps) for i in range(options.rounds)]
    tell(rounds)
    answers, errors, late = scraper.counts
    print(f"scraper: {answers:,} answers, {errors} errors, {late:,} late for {options.scrapes:g} a second")


def play(contestants: Contestants, turned: Turned, step: Step, steps: int) -> Round:
    """One turn each."""
    found = {}
    for name, (recorder, meanwhile) in contestants.items():
        turned.turn(recorder)
        with meanwhile():
            found[name] = turn(step, steps)
    return found


def tell(rounds: Sequence[Round]) -> None:
    """Print a table."""
    print(f"{UNITS} units, {PARAMETERS:,} parameters, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    for i, what in enumerate(("wall", "process", "thread")):
        base = statistics.median(one["null"][i] for one in rounds)
        print(f"{what:8s} null {base * 1e3:7.1f} ms", end="")
        for name, beside in PAIRS:
            ratios = [one[name][i] / one[beside][i] for one in rounds]
            low, middle, high = statistics.quantiles(ratios, n=4)
            error = 1.25 * statistics.stdev(sorted(ratios)[len(ratios) // 20 : -len(ratios) // 20]) / len(ratios) ** 0.5
            print(f"   {name} / {beside} {middle:.3f} +- {error:.3f} ({low:.3f}-{high:.3f})", end="")
        print()
