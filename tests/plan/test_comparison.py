"""A plan beside what exporters told: written-out pages in, figures out."""

from __future__ import annotations

import pytest

from rayzero.memory.planner import OwnerPlan
from rayzero.plan import comparison as comparison_module
from rayzero.plan.bound import StepBound
from rayzero.plan.comparison import Comparison, compare_bytes, compare_step, format_comparisons
from rayzero.plan.tiers import DeviceBytes, HostBytes, RunBytes
from rayzero.telemetry.discovery import Target
from rayzero.telemetry.metric import Role
from rayzero.telemetry.scrape import Scrape, Scraped, parse_series

DEVICE = DeviceBytes(parameters=4000, buffers=0, leaving=0, sums=0, states=0, forward=1000, backward=2000)
PLAN = RunBytes(
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
    monkeypatch.setattr(comparison_module, "_LEAST_BYTES", 0)


def compared(*processes: Scraped, plan: RunBytes = PLAN) -> dict[str, Comparison]:
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
    two = RunBytes(device=DEVICE, owners=PLAN.owners, hosts=PLAN.hosts * 2)
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
    monkeypatch.setattr(comparison_module, "_LEAST_BYTES", 32 << 20)
    rows = compared(*EVERYONE)
    assert rows["rank 0 gathered parameters"].ratio == 0.75, "counted, not measured"
    small = ["rank 0 computing", "optimizer 0 memory", "host memory beyond the programs"]
    assert [rows[what].ratio for what in small] == [None] * 3
    assert [rows[what].to_json()["measured"] for what in small] == [37, 1250, 1790]
    assert sum(line.endswith("  too small to compare") for line in format_comparisons(rows.values())) == 5
    bound = StepBound(compute=1e-4, fetch=0.0, push=0.0, network=0.0, update=0.0, exposed=0.0)
    assert compare_step(bound, 0.02).ratio is None
