"""When a run's plan is held against what it measured, and how often: once, when everybody has told."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rayzero.cluster.processes.program_memory import imported_memory
from rayzero.memory.planner import OwnerPlan
from rayzero.plan.bound import StepBound
from rayzero.plan.hardware import Hardware, Hosts
from rayzero.plan.tiers import DeviceBytes, HostBytes, RunBytes
from rayzero.recipes import plan_check
from rayzero.recipes.plan_check import (
    PLAN,
    PLAN_STEPS,
    Comparison,
    PlanCheck,
    compare_bytes,
    compare_step,
    format_comparisons,
    measure_hardware,
    read_plan,
)
from rayzero.recipes.planning import RecipeWork, recipe_work
from rayzero.recipes.recipe import RecipeConfig
from rayzero.recipes.run_log import StepRow
from rayzero.telemetry.metric import Role
from rayzero.telemetry.scrape import Scrape, Scraped, Target, parse_series

FAST = Hardware(
    hosts=Hosts(gpus_each=1), device_bytes=None, host_bytes=1 << 40, shm_bytes=1 << 40, flops=1e12,
    link=float("inf"), network=float("inf"), memory=1e10,
)  # fmt: skip
TOLD = {
    "optimizer": 'rayzero_plan_error_ratio{what="host"} 0.5\n',
    "rank": "rayzero_prefetch_window_bytes 3000\n",
}
MEMORY = 'rayzero_process_memory_bytes{kind="pss"} 9\nrayzero_memory_bytes{kind="process",tier="ram"} 8\n'


def record(*hosts: str) -> dict[str, Any]:
    """A rank and an owner on each host; the coordinator is on the first."""
    who = [("coordinator", hosts[0], {})]
    who += [("optimizer", host, {"actor": str(index)}) for index, host in enumerate(hosts)]
    who += [("rank", host, {"rank": str(index)}) for index, host in enumerate(hosts)]
    targets = [
        {"address": f"{host}:1", "labels": {"run": "r", "role": role, "node": host, **own}} for role, host, own in who
    ]
    members = [{"who": f"{role} {min(own.values())}", "host": host} for role, host, own in who if own]
    return {"telemetry": {"http_sd": "", "targets": targets}, "members": members}


class Checked:
    """A check, the clock it looks at, and what it says and is told."""

    def __init__(self, work: RecipeWork, folder: Path, hardware: Hardware | None = FAST, *hosts: str) -> None:
        self.now, self.looks, self.said = 0.0, 0, list[str]()
        self.silent: set[str] = set()
        self.check = PlanCheck(work, hardware, folder)
        self.check.started(record(*(hosts or ("h",))))

    def look(self, targets: tuple[Target, ...], **_: Any) -> Scrape:
        self.looks += 1
        pages = [(one, TOLD.get(one.role, "") + MEMORY) for one in targets]
        answers = [Scraped(target=one, series=None if one.who in self.silent else parse_series(p)) for one, p in pages]
        return Scrape(at=self.now, processes=tuple(answers))

    def rows(self, first: int, last: int, seconds: float = 0.1) -> None:
        module = "rayzero.recipes.plan_check"
        with patch(f"{module}.scrape", self.look), patch(f"{module}.monotonic", lambda: self.now):
            for step in range(first, last + 1):
                found = self.check.take(row(step, seconds))
                self.said += [] if found is None else [found]


def row(step: int, seconds: float) -> StepRow:
    return StepRow(
        step=step, loss=1.0, grad_norm=1.0, lr=1.0, tokens=1, tokens_per_second=1.0, step_seconds=seconds,
        fetch_wait_seconds=0.0, optimizer_exposed_seconds=0.0, memory_bytes=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def work() -> RecipeWork:
    """Of a model whose plan is big enough to be compared; nobody trains it."""
    recipe = RecipeConfig(dim=512, num_layers=4, num_heads=2, seq_len=16, steps=40)
    return recipe_work(recipe, 256, imported_memory(), on_gpu=False)


def test_it_is_compared_once_after_twenty_steps(work, tmp_path) -> None:
    one = Checked(work, tmp_path)
    one.rows(1, 1, seconds=9.0)  # the first is slow: the median does not mind
    one.rows(2, PLAN_STEPS - 1)
    assert (one.looks, one.said, read_plan(tmp_path)) == (0, [], None)
    one.rows(PLAN_STEPS, 40)
    assert (one.looks, len(one.said)) == (1, 1)
    assert one.said[0].startswith("plan against measured, after 20 steps\nrank 0 gathered parameters ")
    found = read_plan(tmp_path)
    assert found is not None
    assert found["steps"] == 20
    by_name = {one["what"].partition(" (")[0]: one for one in found["compared"]}
    assert by_name["step time"]["measured"] == pytest.approx(0.1)
    assert by_name["optimizer 0 memory"]["ratio"] == pytest.approx(1.5)
    assert [path.name for path in tmp_path.iterdir()] == [PLAN]


def test_it_asks_again_a_second_later_who_has_not_told_yet(work, tmp_path) -> None:
    one = Checked(work, tmp_path)
    one.silent = {"optimizer 0"}
    one.rows(1, 22)
    assert (one.looks, one.said) == (1, [])
    one.now, one.silent = 1.0, set()
    one.rows(23, 24)
    assert (one.looks, len(one.said)) == (2, 1)
    assert "after 23 steps" in one.said[0]
    assert "not told" not in one.said[0]


def test_it_does_not_ask_for_ever_and_at_the_last_step_takes_what_there_is(work, tmp_path) -> None:
    one = Checked(work, tmp_path)
    one.silent = {"optimizer 0"}
    for step in range(1, 40):
        one.now += 1.0
        one.rows(step, step)
    assert (one.looks, len(one.said)) == (5, 1)
    late = Checked(work, tmp_path)
    late.silent = {"optimizer 0"}
    late.rows(1, 40)
    assert (late.looks, len(late.said)) == (2, 1)
    assert "not told" in late.said[0]


def test_without_speeds_or_on_other_hosts_no_bound_is_told(work, tmp_path) -> None:
    for check in (Checked(work, tmp_path, None), Checked(work, tmp_path, FAST, "h", "other")):
        check.rows(1, PLAN_STEPS)
        assert "optimizer 0 memory" in check.said[0]
        assert "step time" not in check.said[0]


def test_an_optimizer_without_shards_makes_no_owners_plan_smaller(work, tmp_path) -> None:
    one = Checked(work, tmp_path)
    known = record("h")
    one.check.started(
        known | {"members": [*known["members"], {"who": "optimizer 1", "host": "h", "has_shards": False}]}
    )
    assert one.check._work.recipe.scaling.num_optimizers == 1


def test_a_run_without_telemetry_is_not_compared(work, tmp_path) -> None:
    one = Checked(work, tmp_path)
    one.check.started({**record("h"), "telemetry": None})
    one.rows(1, 40)
    assert (one.looks, one.said, list(tmp_path.iterdir())) == (0, [], [])


def test_the_host_is_measured_as_what_its_ranks_compute_on(work) -> None:
    found = measure_hardware(work)
    assert found is not None
    assert (found.hosts, found.device_bytes, found.link) == (Hosts(), None, float("inf"))
    assert found.flops > 1e8
    on_gpu = work.recipe.replace(scaling={"use_gpu": True})
    assert pickle.loads(pickle.dumps(replace(work, recipe=on_gpu))).layout == work.layout, "it travels to a process"


def test_a_slab_dir_that_is_not_there_is_named_in_place_of_a_plan(work, caplog) -> None:
    wrong = replace(work, recipe=work.recipe.replace(zero={"slab_dir": "/nowhere"}))
    assert measure_hardware(wrong) is None
    assert "zero.slab_dir is '/nowhere': No such file or directory; name a folder in memory" in caplog.text


# ---- A plan beside what exporters told: written-out pages in, figures out.


DEVICE = DeviceBytes(parameters=4000, buffers=0, leaving=0, sums=0, states=0, forward=1000, backward=2000)
PLANNED = RunBytes(
    device=DEVICE,
    owners=tuple(
        OwnerPlan(
            owner=index, num_owners=2, world_size=1, params=100, master=200, moments=400, gradients=200 + 100 * index,
            staging=0,
        )
        for index in range(2)
    ),
    hosts=(
        HostBytes(
            host=0, ranks=1, owners=2, shared=0, owner_bytes=1900, staging=0, activations=0, compute=100,
            programs=99999, coordinator=True,
        ),
    ),
)  # fmt: skip


def process(role: Role, index: int | None, page: str | None) -> Scraped:
    target = Target(address="h:1", run="demo", role=role, node="h", index=index)
    return Scraped(target=target, series=None if page is None else parse_series(page))


def memory(pss: int, before: int, unused: int = 0) -> str:
    return f'rayzero_process_memory_bytes{{kind="pss"}} {pss}\n' + (
        f'rayzero_memory_bytes{{kind="process",tier="ram"}} {before}\n'
        'rayzero_memory_bytes{kind="master",tier="ram"} 7\n'
        f'rayzero_memory_bytes{{kind="unused",tier="ram"}} {unused}\n'
    )


HEAP = 'rayzero_heap_bytes{kind="used"} 50\nrayzero_heap_bytes{kind="peak"} 80\n'
RANK = process(Role.RANK, 0, memory(5000, 4000, 40) + HEAP + "rayzero_prefetch_window_bytes 3000\n")
OWNERS = tuple(
    process(Role.OPTIMIZER, index, memory(6000, 5500, 100) + f'rayzero_plan_error_ratio{{what="host"}} {error}\n')
    for index, error in enumerate((0.5, -0.25))
)
EVERYONE = (process(Role.COORDINATOR, None, memory(10**6, 1)), *OWNERS, RANK)


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_check, "_LEAST_BYTES", 0)


def compared(*processes: Scraped, plan: RunBytes = PLANNED) -> dict[str, Comparison]:
    return {row.what: row for row in compare_bytes(plan, Scrape(at=0.0, processes=processes))}


def test_an_optimizer_without_shards_has_no_plan_of_its_own() -> None:
    rows = compared(*EVERYONE, process(Role.OPTIMIZER, 2, memory(6000, 5500)))
    assert [what for what in rows if what.startswith("optimizer")] == ["optimizer 0 memory", "optimizer 1 memory"]


def test_bytes_of_ranks_owners_and_the_host() -> None:
    rows = compared(*EVERYONE)
    assert list(rows) == [
        "rank 0 gathered parameters", "rank 0 computing", "optimizer 0 memory", "optimizer 1 memory",
        "host memory beyond the programs", "host memory",
        "freed memory that malloc keeps",
    ]  # fmt: skip
    figures = {what: (row.kind, row.planned, row.measured, row.ratio) for what, row in rows.items()}
    assert figures["rank 0 gathered parameters"] == ("at most", 4000, 3000, 0.75)
    assert figures["optimizer 0 memory"] == ("planned", 900, 1250, 1250 / 900)
    assert figures["optimizer 1 memory"] == ("planned", 1000, 650, 0.65)
    grown = 1000 + 500 + 500
    assert figures["rank 0 computing"] == ("planned", 100, 7 + 30, 0.37), "at the height of its steps"
    used = grown - 240 + 30
    assert figures["host memory beyond the programs"] == ("planned", 2000, used, used / 2000)
    everyone = 10**6 + 2 * 6000 + 5000 - 240 + 30
    assert figures["host memory"] == ("at most", 101999, everyone, everyone / 101999), "the coordinator's, too"
    assert figures["freed memory that malloc keeps"] == ("planned", 0, 200 + 10, None)


@pytest.mark.parametrize(
    ("peak", "rank", "host"), [(80, 37 / 60, 1790 / 1960), (123, 1, 1833 / 1960), (153, 1.1, 1863 / 1960)]
)
def test_gradients_may_wait_or_not(peak: int, rank: float, host: float) -> None:
    plan = replace(PLANNED, hosts=(replace(PLANNED.hosts[0], waiting=40),))
    now = process(Role.RANK, 0, memory(5000, 4000, 40) + HEAP.replace("80", str(peak)))
    rows = compared(now, *OWNERS, plan=plan)
    assert rows["rank 0 computing"].ratio == rank
    assert rows["host memory beyond the programs"].ratio == host


def test_a_rank_that_is_at_its_height_now_has_no_more_to_come() -> None:
    now = process(Role.RANK, 0, memory(5000, 4000, 40) + HEAP.replace("80", "45"))
    rows = compared(now, *OWNERS)
    assert rows["rank 0 computing"].measured == 7
    assert rows["host memory beyond the programs"].measured == 2000 - 240


def test_a_gpu_rank_tells_its_allocators_peak() -> None:
    gpu = process(Role.RANK, 0, 'rayzero_gpu_memory_bytes{kind="peak_active"} 5400\n')
    row = compared(gpu)["rank 0 device peak"]
    assert (row.planned, row.measured, row.ratio) == (6000, 5400, 0.9)


def test_who_did_not_tell_is_named_and_on_several_hosts_none_is_summed_up() -> None:
    rows = compared(RANK, process(Role.OPTIMIZER, 0, None), OWNERS[1])
    assert rows["optimizer 0 memory"].measured is None
    assert rows["host memory beyond the programs"].measured is None
    lines = format_comparisons(rows.values())
    assert "not told" in lines[2]
    assert "ratio" not in lines[2]
    two = RunBytes(device=DEVICE, owners=PLANNED.owners, hosts=PLANNED.hosts * 2)
    assert "host memory beyond the programs" not in compared(*EVERYONE, plan=two)


def test_a_step_is_held_against_the_least_it_can_take() -> None:
    bound = StepBound(compute=0.5, fetch=0.1, push=0.1, network=0.0, update=0.2, exposed=0.0)
    row = compare_step(bound, 0.75)
    assert (row.what, row.kind, row.ratio) == ("step time (bound by compute)", "at least", pytest.approx(1.5))
    assert format_comparisons([row]) == [
        "step time (bound by compute)      at least      0.5 s  measured     0.75 s  ratio 1.500"
    ]


def test_what_is_a_few_kilobytes_or_milliseconds_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process grows by some MiB whatever it trains: 3 to 400 times the plan of a model of 11,000 parameters."""
    monkeypatch.setattr(plan_check, "_LEAST_BYTES", 32 << 20)
    rows = compared(*EVERYONE)
    assert rows["rank 0 gathered parameters"].ratio == 0.75, "counted, not measured"
    small = ["rank 0 computing", "optimizer 0 memory", "host memory beyond the programs"]
    assert [rows[what].ratio for what in small] == [None] * 3
    assert [rows[what].to_json()["measured"] for what in small] == [37, 1250, 1790]
    assert sum(line.endswith("  too small to compare") for line in format_comparisons(rows.values())) == 5
    bound = StepBound(compute=1e-4, fetch=0.0, push=0.0, network=0.0, update=0.0, exposed=0.0)
    assert compare_step(bound, 0.02).ratio is None
