"""Measures how fast parameters and gradients move through each transport, against memcpy and a bare gRPC stream.

    python -m lab store [--mib 256] [--rounds 5] [--steps 3] [--transports inproc grpc] [--owners 1] [--tls] [--json]

One rank has its owners in another process (with ``inproc`` in its own), one bf16 unit of ``--mib`` and two small ones.
A step fetches every unit (after a fetch that is not timed), pushes it, and copies the same bytes from one tensor to
another in the same process (``memcpy``, ``--threads`` torch threads); then the step is decided, which is not timed.
``bare`` streams ready bytes between two processes, down from a server and up from a client: over gRPC, and drops them
or copies them into a tensor, and over a TCP socket, from a tensor into a tensor. All take turns. CPU s/GB are of both
ends together.
With ``--tls`` gRPC also takes part as between hosts, over mutual TLS, and so does the bare stream.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from lab.bench.contestants import OursOptions, host_ranks, one_process_a_rank
from lab.bench.figures import Cost, Spread, about, at_least_one
from lab.bench.figures import plain as as_plain
from lab.bench.turns import Entry, Player, Program, Seat, Turn, contest
from rayzero.engine.context import get_context
from rayzero.layout.model_layout import ModelLayout, UnitLayout, lay_out_unit
from rayzero.protocol.messages import COMPUTE, Contribution, FinishReport, ModelSpec, StepInputs
from rayzero.protocol.store import ParameterStore
from rayzero.testing import Transport

BARE = "bare"
_TLS = "+tls"
CHUNKS = (1 << 20, 4 << 20)  # bytes of a bare stream's messages
SMALL = (1 << 20, 1 << 14)  # bytes of the small units
HYPER = ({"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},)
_SHARD = 2 << 20  # elements


def spec_of(sizes_bytes: Sequence[int]) -> ModelSpec:
    """A model with one bf16 unit of each size in bytes."""
    units = [
        lay_out_unit(i, f"u{i}", torch.bfloat16, True, [(f"u{i}.w", (size // 2,))])
        for i, size in enumerate(sizes_bytes)
    ]
    layout = ModelLayout(units=tuple(units), shard_numel=_SHARD)
    groups = tuple((0,) for _ in units)
    return ModelSpec(
        run="bench", layout=layout, world_size=1, optimizer="torch.optim:AdamW", hyper=HYPER, group_of=groups
    )


class StorePlayer:
    """A rank that only moves units through its store."""

    def __init__(self, store: ParameterStore, spec: ModelSpec) -> None:
        self._store, self._units = store, spec.layout.units
        self._step = store.attach(spec).version
        for unit in self._units:
            store.load(unit.index, torch.randn(unit.numel, dtype=torch.float32, device="cpu")).result()
        self._out = [torch.zeros(unit.numel, dtype=unit.dtype, device="cpu") for unit in self._units]
        self._grads = [
            torch.randn(unit.numel, dtype=torch.float32, device="cpu").to(unit.dtype) for unit in self._units
        ]

    def play(self, turn: Turn) -> dict[str, Any]:
        """Returns the cost of every step, by verb and size in bytes; the first step does not count."""
        costs: dict[str, list[Cost]] = {}
        for step in range(turn.steps + 1):
            for unit in self._units:
                for verb, cost in self._move(unit, self._out[unit.index], self._grads[unit.index], turn.pids).items():
                    if step:
                        costs.setdefault(f"{verb} {unit.size_bytes}", []).append(cost)
            self._commit()
        return {"costs": costs}

    def _move(self, unit: UnitLayout, out: Tensor, grads: Tensor, owners: Sequence[int]) -> dict[str, Cost]:
        self._fetch(unit, out)  # waits until the last step's update is published
        return {  # memcpy last: after it, torch's threads spin for milliseconds on cores that a push needs
            "fetch": Cost.of(partial(self._fetch, unit, out), owners),
            "push": Cost.of(partial(self._push, unit, grads), owners),
            "memcpy": Cost.of(partial(out.copy_, grads), ()),
        }

    def _fetch(self, unit: UnitLayout, out: Tensor) -> None:
        self._store.fetch(unit.index, self._step, COMPUTE, out).result()

    def _push(self, unit: UnitLayout, grads: Tensor) -> None:
        header = Contribution(step=self._step, attempt=0, rank=0, unit=unit.index, seq=0, presence=b"\1")
        self._store.push(header, grads).result()

    def _commit(self) -> None:
        report = FinishReport(step=self._step, attempt=0, rank=0, counts=(1,) * len(self._units))
        self._store.finish(report, StepInputs(edits=(), hyper=HYPER)).result()
        self._store.decision(self._step).result()
        self._step += 1


def build_store(sizes: tuple[int, ...], seat: Seat) -> Player:
    """Build the player of the calling rank's store."""
    torch.set_num_threads(seat.threads)
    connect = get_context().connect
    assert connect is not None
    return StorePlayer(connect(0), spec_of(sizes))


def _store_programs(sizes: tuple[int, ...], options: OursOptions, seats: Sequence[Seat]) -> list[Program]:
    return [partial(host_ranks, partial(build_store, sizes), options, tuple(seats))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one way to move bytes."""

    who: str
    what: str
    bytes: int
    gb_per_s: Spread
    milliseconds: Spread
    of_memcpy: Spread | None  # over memcpy in the same process, turn by turn; None for memcpy itself and bare streams
    cpu_s_per_gb: float  # of both ends together, over all turns


def entries_of(
    transports: Sequence[Transport], sizes: tuple[int, ...], owners: int, *, tls: bool = False
) -> list[Entry]:
    """The entries of all transports, and of the bare stream. ``tls``: also of gRPC and of a bare stream over TLS."""
    # imported here: only the bare stream needs grpc, no other benchmark
    from lab.bench.raw_stream import build_raw

    found = [
        Entry(name=t, programs=partial(_store_programs, sizes, OursOptions(transport=t, owners=owners)))
        for t in transports
    ]
    for protected in (False, True)[: 1 + tls]:
        if protected and "grpc" in transports:
            options = OursOptions(transport="grpc", owners=owners, tls=True)
            found.append(Entry(name="grpc" + _TLS, programs=partial(_store_programs, sizes, options)))
        raw = partial(build_raw, sizes[0], CHUNKS, protected)
        found.append(Entry(name=BARE + _TLS * protected, programs=partial(one_process_a_rank, raw)))
    return found


def measure(entries: Sequence[Entry], size: int, rounds: int, steps: int, threads: int) -> list[Row]:
    """Let all entries play in turn, ``rounds`` times after a round that does not count. ``size``: bytes of the large
    unit, and of a bare stream."""
    costs: dict[str, list[dict[str, list[Cost]]]] = {}
    with tempfile.TemporaryDirectory() as folder, contest(entries, 1, threads, folder=folder) as (there, absent):
        for round_ in range(rounds + 1):
            for contestant in there:
                account = contestant.play(Turn(first=0, steps=steps))[0]["costs"]
                if round_:
                    costs.setdefault(contestant.name, []).append(account)
    for name, why in absent.items():
        print(f"{name} cannot take part: {why}")
    return [row for who, turns in costs.items() for row in rows_of(who, turns, size)]


def rows_of(who: str, turns: Sequence[dict[str, list[Cost]]], size: int) -> list[Row]:
    """A contestant's rows. ``turns``: what everything cost, by what was done, of each turn."""
    rows = []
    for key in turns[0]:
        what, moved = (key, size) if who.startswith(BARE) else (key.partition(" ")[0], int(key.partition(" ")[2]))
        medians = [_median_seconds(turn[key]) for turn in turns]
        copies = [_median_seconds(turn.get(f"memcpy {moved}", turn[key])) for turn in turns]
        used = [cost.cpu_seconds for turn in turns for cost in turn[key]]
        compared = not who.startswith(BARE) and what != "memcpy"
        rows.append(
            Row(
                who=who,
                what=what,
                bytes=moved,
                gb_per_s=Spread.of(moved / s / 1e9 for s in medians),
                milliseconds=Spread.of(s * 1e3 for s in medians),
                of_memcpy=Spread.of(c / s for c, s in zip(copies, medians, strict=True)) if compared else None,
                cpu_s_per_gb=sum(used) / (len(used) * moved / 1e9),
            )
        )
    return rows


def _median_seconds(costs: Sequence[Cost]) -> float:
    return Spread.of(cost.seconds for cost in costs).median


def summary_of(rows: Sequence[Row], size: int) -> dict[str, float]:
    """The ratios of medians that matter, for the large unit: each way to memcpy, and gRPC to the best bare stream, and
    to the best one that also copies its bytes into a tensor."""
    large = [row for row in rows if row.bytes == size]
    found = {f"{r.who} {r.what} / memcpy": r.of_memcpy.median for r in large if r.of_memcpy is not None}
    for tls in ("", _TLS):
        for verb, way in (("fetch", "down"), ("push", "up")):
            ours = _best(large, "grpc" + tls, verb)
            for kept in ("", " into a tensor"):
                bare = _best(large, BARE + tls, way + kept)
                if ours and bare:
                    found[f"grpc{tls} {verb} / best bare{tls} stream {way}{kept}"] = ours / bare
    return found


def _best(rows: Sequence[Row], who: str, what: str) -> float:
    """The best median in GB/s; 0 if no row has it."""
    return max((row.gb_per_s.median for row in rows if row.who == who and row.what.startswith(what)), default=0.0)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    found = argparse.ArgumentParser(
        prog="python -m lab store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--transports", nargs="+", choices=get_args(Transport), default=list(get_args(Transport)))
    for name, default, text in (
        ("mib", 256, "MiB of the large unit"),
        ("owners", 1, ""),
        ("rounds", 5, ""),
        ("steps", 3, "timed steps of a turn"),
        ("threads", min(2, os.cpu_count() or 1), "torch threads of the rank, and so of memcpy"),
    ):
        found.add_argument(f"--{name}", type=at_least_one, default=default, help=text)
    found.add_argument("--tls", action="store_true", help="also over TLS, as between hosts")
    found.add_argument("--json", action="store_true")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: measure and print."""
    args = parser().parse_args(argv)
    size = args.mib << 20
    facts = about() | {"mib": args.mib, "owners": args.owners, "threads": args.threads, "rounds": args.rounds}
    rows = measure(
        entries_of(args.transports, (size, *SMALL), args.owners, tls=args.tls),
        size,
        args.rounds,
        args.steps,
        args.threads,
    )
    summary = summary_of(rows, size)
    if args.json:
        print(json.dumps(facts | {"rows": as_plain(rows), "summary": summary}, indent=1))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for r in rows:
        against = "" if r.of_memcpy is None else f"   {r.of_memcpy.text()} of memcpy"
        print(
            f"{r.who:8} {r.what:24} {r.bytes >> 10:8} KiB  {r.gb_per_s.text():>20} GB/s  {r.milliseconds.text():>24} ms"
            f"  {r.cpu_s_per_gb:.2f} CPU s/GB{against}"
        )
    for name, ratio in summary.items():
        print(f"{name}: {ratio:.2f}")
