"""The memory of a real run: its ledger adds up to what the kernel reports, and its plan comes true, within 5 %."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from telemetry.exposed import get, series_of
from torch import nn

import rayzero.engine as engine
from rayzero.cluster.driver import ZeroTrainer
from rayzero.cluster.files.run_record import read_record
from rayzero.cluster.run import Report
from rayzero.config import RunConfig, ScalingConfig, ZeroConfig
from rayzero.engine.context import report
from rayzero.engine.prepare import plan_units
from rayzero.plan.hardware import Hosts
from rayzero.plan.tiers import Programs, RunBytes, plan_bytes
from rayzero.plan.work import measure_work
from rayzero.recipes.plan_check import compare_bytes
from rayzero.telemetry.names import MEMORY_BYTES, PROCESS_MEMORY_BYTES
from rayzero.telemetry.scrape import Scrape, Target, scrape

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.thorough]

WIDTH, LAYERS, STEPS = 2560, 8, 3
MODEL = 4 * LAYERS * WIDTH * (WIDTH + 1)  # bytes, fp32: 200 MiB
PROCESSES = ("optimizer 0", "rank 0")


BATCH = 256
SAVED = 4 * BATCH * WIDTH * (LAYERS - 1)  # bytes of what layers keep for their backward: 17 MiB
ZERO = ZeroConfig(stall_timeout=60.0)
SCALING = ScalingConfig(num_workers=1, num_optimizers=1, threads_per_worker=1, threads_per_optimizer=1)


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


def train(config: Mapping[str, Any]) -> None:
    """A few steps, then as it is until it has been looked at."""
    torch.manual_seed(0)
    model = build()
    model, optimizer = engine.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    for _ in range(STEPS):
        loss(model, torch.randn(BATCH, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    report({"done": 1})
    while not Path(config["looked"]).exists():
        time.sleep(0.05)


@dataclass
class Seen:
    """One process: its ledger, and what the kernel counts, both in bytes."""

    kinds: dict[tuple[str, str], float]  # (kind, tier)
    pss: int
    pss_shm: int  # of it, shared memory

    def told(self, *tiers: str) -> float:
        return sum(size for (_, tier), size in self.kinds.items() if tier in tiers)


def counted(address: str, pid: int) -> Seen:
    """What an exporter says, and what the kernel counts at that time. An exporter counts pages at most every five
    seconds: what it counted while the last step still ran is left out."""
    deadline = time.monotonic() + 60
    while True:
        series = series_of(get(f"http://{address}/metrics"))
        kernel, pss = psutil.Process(pid).memory_full_info().pss, series[PROCESS_MEMORY_BYTES.name, (("kind", "pss"),)]
        begun = pss != series[MEMORY_BYTES.name, (("kind", "process"), ("tier", "ram"))]
        if begun and abs(pss - kernel) < 0.01 * kernel:
            break
        assert time.monotonic() < deadline, (begun, pss, kernel)
        time.sleep(0.2)
    told = [(dict(pairs), value) for (name, pairs), value in series.items() if name == MEMORY_BYTES.name]
    kinds = {(of["kind"], of["tier"]): value for of, value in told}
    return Seen(kinds, pss=kernel, pss_shm=rollup(pid, "Pss_Shmem"))


def look(storage: Path) -> dict[str, Seen]:
    record = read_record(storage / "demo")
    pids = {member["who"]: member["pid"] for member in record["members"]}
    found = {}
    for target in record["telemetry"]["targets"]:
        labels = target["labels"]
        who = " ".join(labels[name] for name in ("role", "rank", "actor") if name in labels)
        if who in pids:  # no record has the coordinator's pid, and it has no model
            found[who] = counted(target["address"], pids[who])
    return found


def rollup(pid: int, name: str) -> int:
    """A field of the kernel's sums over a process's mappings, in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"the kernel does not tell {name}")


def asked(storage: Path) -> Scrape:
    """What the run's exporters say, all asked at once."""
    targets = read_record(storage / "demo")["telemetry"]["targets"]
    return scrape([Target.of(one["address"], one["labels"]) for one in targets], timeout_s=30)


@dataclass
class Watched:
    """What was seen of the run while it stood still."""

    processes: dict[str, Seen]
    told: Scrape | None = None


@pytest.fixture(scope="module")
def watched(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    storage = tmp_path_factory.mktemp("runs")
    found = Watched({})

    def watch(_: Report) -> None:
        found.processes.update(look(storage))
        found.told = asked(storage)
        (storage / "looked").touch()

    ZeroTrainer(
        train,
        train_loop_config={"looked": str(storage / "looked")},
        zero_config=ZERO,
        scaling_config=SCALING,
        run_config=RunConfig(name="demo", storage_path=str(storage)),
        on_report=watch,
    ).fit()
    return found


@pytest.fixture(scope="module")
def seen(watched: Watched) -> dict[str, Seen]:
    return watched.processes


NOTHING = Programs(rank=0, owner=0, coordinator=0, files=0)


def planned() -> RunBytes:
    """By a plan that knows shapes alone."""
    with torch.device("meta"):
        layout = plan_units(build(), ZERO).layout
    work = measure_work(build, lambda model: loss(model, torch.zeros(BATCH, WIDTH)), layout)
    return plan_bytes(
        layout,
        work,
        ZERO,
        SCALING,
        Hosts(),
        state_bytes=8,
        splits=False,
        programs=NOTHING,
        measures_norms=True,
    )


def test_the_host_bytes_are_those_that_were_planned(watched) -> None:
    """Of memory in use, at the height of a step; a run that shares the machine takes no more."""
    plan = planned()
    rows = {row.what: row for row in compare_bytes(plan, watched.told)}
    host, rank = rows["host memory beyond the programs"], rows["rank 0 computing"]
    assert host.planned > 4 * MODEL + SAVED
    assert host.ratio == pytest.approx(1, abs=0.05), rows
    assert rank.planned - rank.waiting > SAVED + MODEL // LAYERS, (
        "a layer's gradients come while the others' activations wait"
    )
    assert host.waiting == 2 * MODEL // LAYERS, "gradients that wait for their copies, where the machine is busy"
    assert 0.75 < rank.ratio < 1.25, rows  # some MiB stay after the first step, others pass unseen


def test_each_process_adds_up_to_what_the_kernel_counts_for_it_alone(seen) -> None:
    """Heaps and code; shared memory below, because the kernel gives each process that maps it a part."""
    for who in PROCESSES:
        assert seen[who].told("ram") == pytest.approx(seen[who].pss - seen[who].pss_shm, rel=0.05), (who, seen[who])


def test_shared_memory_adds_up_over_the_processes_of_a_node(seen) -> None:
    kernel = sum(one.pss_shm for one in seen.values())
    assert sum(one.told("shm") for one in seen.values()) == pytest.approx(kernel, rel=0.05)
    assert kernel > 4 * MODEL * 0.95, "parameters with their two moments, and gradients"


def test_what_has_a_purpose_is_told_by_it_and_little_is_left_to_the_heap(seen) -> None:
    """The heap's rest is measured as what nobody told: were a purpose missing, the sum would still be right."""
    owner, rank = seen["optimizer 0"], seen["rank 0"]
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert owner.kinds[kind, "shm"] == pytest.approx(MODEL, rel=0.01)
    assert rank.kinds["grad", "shm"] == pytest.approx(MODEL, rel=0.01)
    for one in (owner, rank):
        assert one.kinds["other", "ram"] < 0.4 * MODEL
        assert 0 < one.kinds["process", "ram"] < 2 * MODEL
