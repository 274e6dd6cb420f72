"""The host plan is what an owner allocates, and too little is said with the sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from store.toy import make_spec

from rayzero.errors import MemoryPlanError
from rayzero.kernels.moments import moment_bytes
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.layout.shard_map import shard_map_for
from rayzero.memory.planner import (
    OwnerPlan,
    check_budget,
    check_host,
    check_shared,
    plan_owner,
)
from rayzero.memory.process_memory import HostLimits, host_limits, ray_memory_threshold
from rayzero.owner.gradients.landing import Landing, RankGradients
from rayzero.owner.memory import HostMemory
from rayzero.owner.shard import allocate
from rayzero.quantities import format_bytes

MIB = 1 << 20
LARGE = 4 * MIB  # elements of a unit, so that two fill a rank's pool in any dtype


KEPT = "frozen, with a master"
Described = tuple[int, torch.dtype, bool | str]  # elements, dtype, whether it is trained


def layout_of(*units: Described, shard_numel: int = 1024) -> ModelLayout:
    laid_out = (
        lay_out_unit(i, f"u{i}", dtype, trained is True, [("w", (n,))], frozen_master=trained == KEPT)
        for i, (n, dtype, trained) in enumerate(units)
    )
    return ModelLayout(units=tuple(laid_out), shard_numel=shard_numel)


def plan(
    layout: ModelLayout,
    *,
    owner: int = 0,
    owners: int = 1,
    ranks: int = 1,
    steps: int = 1,
    state_bytes: float = 8.0,
    splits: bool = False,
) -> OwnerPlan:
    shard_map = shard_map_for(layout, owners, "balanced")
    return plan_owner(layout, shard_map, owner, ranks, steps, state_bytes=state_bytes, splits=splits)


# ---- the equation -----------------------------------------------------------------------------------------------


def test_fp32_is_16_bytes_an_element_and_4_of_two_units_a_rank() -> None:
    found = plan(layout_of(*[(LARGE, torch.float32, True)] * 5, shard_numel=MIB), ranks=3)
    assert (found.params, found.master, found.moments) == (0, 4 * 5 * LARGE, 8 * 5 * LARGE)
    assert found.gradients == 4 * 5 * LARGE + 3 * 2 * 4 * LARGE
    assert found.staging == 0


def test_one_rank_in_fp32_is_16_bytes_an_element() -> None:
    found = plan(layout_of((4096, torch.float32, True)), ranks=1)
    assert (found.params, found.master, found.moments, found.gradients) == (0, 4 * 4096, 8 * 4096, 4 * 4096)
    assert found.staging == 2 * 4 * 1024  # two shards: fp32 memory can add an unplanned push


@pytest.mark.promise("bounded", "precisions")
def test_bf16_is_18_bytes_an_element_and_2_of_two_units_a_rank() -> None:
    found = plan(layout_of(*[(LARGE, torch.bfloat16, True)] * 5, shard_numel=MIB), ranks=3)
    assert found.total == (2 + 12 + 4) * 5 * LARGE + 3 * 2 * 2 * LARGE


@pytest.mark.promise("bounded", "accumulation")
def test_accumulation_takes_what_one_backward_does_and_the_largest_shard_once_more() -> None:
    layout = layout_of(*[(LARGE, torch.bfloat16, True)] * 5, shard_numel=MIB)
    one, several = (plan(layout, ranks=3, steps=steps) for steps in (1, 4))
    assert several.total == one.total + 4 * MIB


@pytest.mark.parametrize(
    ("numel", "steps", "pool"),
    [
        (4096, 1, 5 * 2 * 4096),
        (4096, 4, (4 + 1) * 5 * 2 * 4096),  # step() may push, too
        (2 * MIB, 1, 16 * MIB),
        (2 * MIB, 4, 16 * MIB),
        (LARGE, 4, 2 * 2 * LARGE),
    ],
)
def test_a_rank_has_room_for_16_mib_of_small_units_if_a_step_pushes_so_much(numel: int, steps: int, pool: int) -> None:
    layout = layout_of(*[(numel, torch.bfloat16, True)] * 5, shard_numel=MIB)
    kept = 4 * min(numel, MIB) if steps > 1 else 0
    assert plan(layout, ranks=3, steps=steps).gradients == 4 * 5 * numel + 3 * pool + kept


@pytest.mark.promise("bounded", "accumulation")
def test_accumulation_of_one_rank_is_4_bytes_and_staging_for_two_largest_units() -> None:
    found = plan(layout_of((4096, torch.bfloat16, True), (1024, torch.bfloat16, True)), ranks=1, steps=2)
    assert found.gradients == 4 * 5120
    assert found.staging == 2 * (2 * 4096)


def test_a_frozen_unit_has_its_parameters_only() -> None:
    found = plan(layout_of((4096, torch.bfloat16, False), (64, torch.float32, False)), ranks=3, steps=4)
    assert (found.params, found.total) == (2 * 4096 + 4 * 64, 2 * 4096 + 4 * 64)


def test_a_frozen_unit_that_its_dtype_would_round_has_a_master_more() -> None:
    found = plan(layout_of((4096, torch.bfloat16, KEPT), (64, torch.bfloat16, False)), ranks=3, steps=4)
    assert (found.params, found.master, found.total) == (2 * 4160, 4 * 4096, 6 * 4096 + 2 * 64)
    assert "master 16 KiB" in found.describe()


def test_norms_are_measured_with_the_largest_trained_shard_in_fp32() -> None:
    layout = layout_of((4096, torch.bfloat16, False), (320, torch.bfloat16, True), shard_numel=2048)
    shards = shard_map_for(layout, 1, "balanced")
    without, measures = (
        plan_owner(layout, shards, 0, 2, 1, splits=False, measures_norms=measures) for measures in (False, True)
    )
    assert (without.norms, measures.norms) == (0, 4 * 320)
    assert measures.total == without.total + 4 * 320
    assert "norms 1.25 KiB" in measures.describe()


units = st.tuples(
    st.integers(0, 9000),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([True, False, KEPT]),
).map(lambda unit: (unit[0], torch.bfloat16, KEPT) if unit[2] == KEPT else unit)


@given(st.lists(units, max_size=6), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_the_owners_plans_add_up_to_the_model(described: list[Described], owners: int, ranks: int, steps: int) -> None:
    layout = layout_of(*described)
    plans = [plan(layout, owner=k, owners=owners, ranks=ranks, steps=steps) for k in range(owners)]
    trained = sum(unit.numel for unit in layout.units if unit.trainable)
    kept = sum(unit.numel for unit in layout.units if unit.frozen_master)
    assert sum(p.master for p in plans) == 4 * (trained + kept)
    assert sum(p.moments for p in plans) == 8 * trained
    published = sum(u.size_bytes for u in layout.units if not (u.trainable and u.dtype is torch.float32))
    assert sum(p.params for p in plans) == published
    assert all(p.total == p.params + p.master + p.moments + p.gradients + p.staging + p.norms for p in plans)


@given(
    st.lists(units, max_size=6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["fp32", "bf16", "int8"]),
    st.booleans(),
)
def test_a_plan_is_what_the_owner_allocates(
    described: list[Described], owners: int, ranks: int, steps: int, moments: str, splits: bool
) -> None:
    layout, splits = layout_of(*described), splits and moments == "fp32"
    for owner in range(owners):
        shards = shard_map_for(layout, owners, "balanced").shards_of(owner)
        kinds, groups = ("exp_avg", "exp_avg_sq"), ((0,),) * len(layout.units)
        spec = make_spec(ranks, accumulation_steps=steps, layout=layout, group_of=groups, moments=moments)
        owned = list(allocate(spec, shards, kinds, HostMemory(), room=None, splits=splits).values())
        gradients = [RankGradients(rank, owned, spec) for rank in range(ranks)]
        tensors = [tensor for shard in owned for tensor in (shard.params, shard.master)]
        tensors += [tensor for shard in owned for moment in shard.states.values() for tensor in moment.tensors]
        tensors += [shard.total for shard in owned]
        landings = [landing for rank in gradients for landing in rank.landings.values()]
        tensors += [landing.sum.memory for landing in landings if isinstance(landing, Landing)]
        tensors += [tensor for rank in gradients for tensor in all_staging(rank)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
        planned = plan(
            layout,
            owner=owner,
            owners=owners,
            ranks=ranks,
            steps=steps,
            state_bytes=2 * moment_bytes(moments),
            splits=splits,
        )
        pools = (
            planned.gradients - 4 * sum(s.shard.numel for s in owned if s.trainable) if ranks > 1 else 0
        )  # the ranks'
        assert sum(storages.values()) == planned.total - pools


def all_staging(rank: RankGradients) -> list[torch.Tensor]:
    """Every staging entry of a rank, taken."""
    some = next((landing.owned for landing in rank.landings.values()), None)
    return list(iter(lambda: rank.lease(some), None)) if some is not None else []


# ---- the check --------------------------------------------------------------------------------------------------

ROOMY = HostLimits(available=1 << 40, total=1 << 40, source="RAM")


def test_a_plan_over_the_budget_is_one_line_with_the_sum_and_the_setting() -> None:
    wanted = plan(layout_of(*[(MIB // 4, torch.bfloat16, True)] * 4), owners=2, ranks=2)
    check_budget(wanted, wanted.total)
    with pytest.raises(MemoryPlanError) as caught:
        check_budget(wanted, wanted.total - 1)
    line = str(caught.value)
    assert line == (
        "optimizer 0 of 2 needs 11 MiB = parameters 1 MiB + master 2 MiB + moments 4 MiB + gradients of 2 ranks 4 MiB, "
        "but cpu_memory_budget is 11 MiB; raise cpu_memory_budget or num_optimizers"
    )


def test_a_plan_over_what_the_host_has_is_refused_naming_who_measured_it() -> None:
    wanted = plan(layout_of((MIB, torch.float32, True)))
    tight = HostLimits(available=wanted.total, total=1 << 40, source="/sys/fs/cgroup/memory.max")
    check_host(wanted, tight)
    with pytest.raises(MemoryPlanError, match=r" free, measured by /sys/fs/cgroup/memory.max; raise num_optim"):
        check_host(wanted, replace(tight, available=wanted.total - 1))


def test_bytes_are_shown_in_the_unit_that_fits() -> None:
    shown = [format_bytes(size) for size in (0, 1023, 1536, 5 << 20, 1 << 30, 3 << 40, 5000 << 40)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "5 MiB", "1 GiB", "3 TiB", "5000 TiB"]


# ---- what the host has ------------------------------------------------------------------------------------------


def make_cgroup(folder: Path, version: int, *, limit: str, usage: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    v2 = version == 2
    (folder / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(f"{limit}\n")
    (folder / ("memory.current" if v2 else "memory.usage_in_bytes")).write_text(f"{usage}\n")
    name = "inactive_file" if v2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{name} {cache}\n")


def limits_with(tmp_path: Path, cgroup_lines: str) -> HostLimits:
    proc = tmp_path / "proc_cgroup"
    proc.write_text(cgroup_lines)
    return host_limits(tmp_path / "cgroup", proc)


def test_the_tightest_cgroup_above_the_process_counts_and_cache_is_free(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    make_cgroup(root / "pod", 2, limit=str(3 * MIB), usage=2 * MIB, cache=MIB // 2)
    make_cgroup(root / "pod/box", 2, limit="max", usage=MIB)
    found = limits_with(tmp_path, "0::/pod/box\n")
    assert found == HostLimits(available=3 * MIB // 2, total=3 * MIB, source=str(root / "pod/memory.max"))


def test_version_1_cgroups_are_read_and_their_no_limit_is_none(tmp_path: Path) -> None:
    root = tmp_path / "cgroup/memory"
    make_cgroup(root, 1, limit=str(0x7FFFFFFFFFFFF000), usage=MIB)
    make_cgroup(root / "docker/abc", 1, limit=str(2 * MIB), usage=3 * MIB)
    found = limits_with(tmp_path, "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    assert (found.available, found.source) == (0, str(root / "docker/abc/memory.limit_in_bytes"))


def test_a_namespaced_path_falls_back_to_the_visible_root(tmp_path: Path) -> None:
    make_cgroup(tmp_path / "cgroup", 2, limit=str(MIB), usage=0)
    assert limits_with(tmp_path, "0::/not/visible/here\n").total == MIB


def test_without_cgroups_ram_counts(tmp_path: Path) -> None:
    found = host_limits(tmp_path, tmp_path / "missing")
    assert (found.source, found.total) == ("RAM", psutil.virtual_memory().total)


# ---- shared memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "threshold"),
    [
        ({}, 0.95),
        ({"RAY_memory_usage_threshold": "0.8"}, 0.8),
        ({"RAY_memory_usage_threshold": "0.8", "RAY_memory_monitor_refresh_ms": "250"}, 0.8),
        ({"RAY_memory_monitor_refresh_ms": "0"}, 1.0),
    ],
)
def test_rays_memory_threshold_is_read_from_rays_settings(environment: dict[str, str], threshold: float) -> None:
    assert ray_memory_threshold(environment) == threshold


def test_shared_memory_may_take_what_ray_allows_and_not_a_byte_more(tmp_path: Path) -> None:
    host = HostLimits(available=60 * MIB, total=100 * MIB, source="RAM")
    half = {"RAY_memory_usage_threshold": "0.5"}
    check_shared(10 * MIB, tmp_path, limits=host, environment=half)
    with pytest.raises(MemoryPlanError) as caught:
        check_shared(10 * MIB + 1, tmp_path, limits=host, environment=half)
    assert str(caught.value).startswith(
        "shared memory needs 10 MiB, but this host has 10 MiB for it: "
        "100 MiB (RAM) x 0.5 (where Ray kills processes) - 40 MiB in use; lower num_workers"
    )


def test_a_host_that_is_full_already_has_no_room_for_shared_memory(tmp_path: Path) -> None:
    full = HostLimits(available=MIB, total=100 * MIB, source="RAM")
    check_shared(0, tmp_path, limits=full, environment={})
    with pytest.raises(MemoryPlanError, match="this host has 0 B for it"):
        check_shared(1, tmp_path, limits=full, environment={})


def test_shared_memory_that_its_directory_does_not_hold_names_the_setting() -> None:
    limits = HostLimits(available=1 << 60, total=1 << 60, source="RAM")
    with pytest.raises(MemoryPlanError, match=r"needs 100 TiB, but /dev/shm has .* free .*slab_dir.*--shm-size"):
        check_shared(100 << 40, Path("/dev/shm"), limits=limits)
