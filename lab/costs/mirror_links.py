"""Measures how long a version takes to reach a rank whose owners are on another host, over links of 1 and 10 Gbit/s.
Only as root.

    python -m lab mirror_links [--gbit 1 10] [--rates 1e-6 1e-5 1e-4 1e-3] [--mib 8] [--units 8] [--steps 6]

One rank without computing has bf16 units; two owners share no memory with it, so the door of its host copies what they
publish. All calls go over the loopback device of a network namespace, which the kernel's token bucket holds to the rate
of a link. Milliseconds are from the rank's finish, once its pushes are there, until the first unit of the next version
is in the copy, and until all are; with the owners' update in them. Steps at a rate come after three others at it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.bench.figures import Spread, at_least_one
from lab.bench.store import HYPER, spec_of
from lab.costs.follow_links import hold, in_namespace
from rayzero.engine.context import RankContext
from rayzero.protocol.messages import Contribution, FinishReport, StepInputs
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.testing import run_ranks

_WARM = 3  # steps at a rate that are not measured
Figures = dict[float, list[tuple[float, float, int]]]  # by rate: first, all, bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4, 1e-3])
    for name, default in (("mib", 8), ("units", 8), ("steps", 6)):
        parser.add_argument(f"--{name}", type=at_least_one, default=default)
    args = parser.parse_args()
    if (code := in_namespace("mirror_links")) is not None:
        return code
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="owners-") as other_host:
        hosts = {f"optimizer {owner}": Path(other_host) for owner in range(2)}
        for gbit in args.gbit:
            hold(gbit)
            found: Figures = run_ranks(partial(rank, args), 1, 2, "shm", processes=True, hosts=hosts)[0]
            for rate, steps in found.items():
                first, whole, came = zip(*steps, strict=True)
                spreads = f"first {Spread.of(first).text(1e3, 0):>14}, all {Spread.of(whole).text(1e3, 0):>14}"
                print(f"  {gbit:g} Gbit/s  {rate:<6g} {spreads} ms   {sorted(came)[len(came) // 2] / 1e6:.1f} MB")
    return 0


def rank(args: argparse.Namespace, context: RankContext) -> Figures:
    """Train without computing."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    spec = replace(spec_of([args.mib << 20] * args.units), run=context.run)
    assert context.connect is not None
    store: Any = context.connect(0)
    store.attach(spec)
    units = spec.layout.units
    for unit in units:
        store.load(unit.index, 0.02 * torch.randn(unit.numel, device="cpu")).result()
    grads = [[(0.01 * torch.randn(unit.numel, device="cpu")).to(unit.dtype) for unit in units] for _ in range(2)]
    step, found = 0, Figures()
    for rate in args.rates:
        hyper, steps = tuple({**each, "lr": rate} for each in HYPER), []
        for _ in range(_WARM + args.steps):
            pushes = []
            for unit in reversed(units):
                header = Contribution(step=step, attempt=0, rank=0, unit=unit.index, seq=0, presence=b"\1")
                pushes.append(store.push(header, grads[step % 2][unit.index]))
            for push in pushes:
                push.result()
            before, began = received(), time.monotonic()
            report = FinishReport(step=step, attempt=0, rank=0, counts=(1,) * len(units))
            store.finish(report, StepInputs(edits=(), hyper=hyper)).result()
            step += 1
            seconds = []
            for unit in units:
                store.published(unit.index, step).result()
                seconds.append(time.monotonic() - began)
            steps.append((seconds[0], seconds[-1], received() - before))
        found[rate] = steps[_WARM:]
    store.close()
    return found


def received() -> int:
    """All bytes that have passed the loopback device."""
    [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.partition(":")[2].split()[0])


if __name__ == "__main__":
    sys.exit(main())
