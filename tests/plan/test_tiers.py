"""The sums of a plan, what is said when they do not fit, and what programs take by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rayzero.cluster.processes.program_memory import Imported
from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.engine.units.partition import build_layout
from rayzero.errors import MemoryPlanError
from rayzero.layout.model_layout import ModelLayout
from rayzero.memory.process_memory import ProcessMemory
from rayzero.plan.hardware import Hardware, Hosts
from rayzero.plan.tiers import Programs, RunBytes, _gathered, check_fits, hosts_of_owners, hosts_of_ranks, plan_bytes
from rayzero.plan.work import Work
from rayzero.quantities import format_bytes
from rayzero.recipes.planning import programs_between

from .machines import CPU_HOST, GPU_HOSTS

WORK = Work(
    forward_flops=10**12,
    backward_flops=2 * 10**12,
    buffer_bytes=100,
    saved_bytes=5000,
    forward_peak_bytes=6000,
    backward_peak_bytes=7000,
)
UNIT = 64 * 64 * 2  # bytes in bf16


NOTHING = Programs(rank=0, owner=0, coordinator=0, files=0)


def four_layers(dtype: torch.dtype = torch.bfloat16) -> ModelLayout:
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        return build_layout(model, min_unit_bytes=1, compute_dtype=dtype).layout


def planned(
    zero: ZeroConfig,
    scaling: ScalingConfig,
    hardware: Hardware,
    programs: Programs = NOTHING,
    dtype: torch.dtype = torch.bfloat16,
) -> RunBytes:
    return plan_bytes(
        four_layers(dtype), WORK, zero, scaling, hardware.hosts, state_bytes=8, splits=False, programs=programs
    )


BF16 = ZeroConfig(precision="bf16")


def test_every_term_of_four_gpu_ranks_on_two_hosts() -> None:
    run = planned(
        BF16,
        ScalingConfig(num_workers=4, num_optimizers=2, use_gpu=True),
        GPU_HOSTS,
        programs=Programs(rank=1000, owner=100, coordinator=50, files=7),
    )
    assert (run.device.parameters, run.device.resting) == (4 * UNIT, 4 * UNIT + 100)
    assert run.device.peak == 4 * UNIT + 7100 + 2 * UNIT, "the gradients of two units on their way to host memory"
    elements = 4 * 64 * 64
    assert sum(owner.params for owner in run.owners) == 2 * elements
    assert sum(owner.master for owner in run.owners) == 4 * elements
    assert sum(owner.moments for owner in run.owners) == 8 * elements
    assert sum(owner.gradients for owner in run.owners) == (4 + 4 * 2) * elements, "totals, and all that 4 ranks push"
    first, second = run.hosts
    assert (first.ranks, first.owners, second.ranks, second.owners) == (2, 2, 2, 0), "owners stand beside ranks 0 and 1"
    assert (first.staging, second.staging) == (0, 2 * (2 * UNIT + 4 * UNIT)), "owners of another host: by gRPC"
    assert (first.compute, first.programs, second.programs) == (0, 2257, 2107), "the coordinator is on the first"
    assert (run.doors, first.doors, second.doors) == ([1], 0, 1), "an optimizer without shards is on the second"
    assert "3 programs" in second.describe()


@pytest.mark.parametrize("how", [{"transport": "grpc"}, {"offload_fraction": 0.5}])
def test_no_host_has_an_optimizer_without_shards_that_would_be_no_nearer(how: dict[str, Any]) -> None:
    four = ScalingConfig(num_workers=4, num_optimizers=1, use_gpu=True)
    assert planned(BF16, four, GPU_HOSTS).doors == [1]
    assert planned(BF16.replace(**how), four, GPU_HOSTS).doors == []


def test_ranks_that_share_memory_with_every_owner_stage_nothing_and_cpu_ranks_compute_in_host_memory() -> None:
    run = planned(BF16, ScalingConfig(num_workers=2, num_optimizers=2), CPU_HOST)
    (host,) = run.hosts
    assert host.staging == 0
    assert host.compute == 2 * (7100 + 2 * UNIT), "parameters are the owners' own pages; gradients wait for copies"
    assert host.waiting == 2 * 2 * UNIT
    assert host.owner_bytes == sum(owner.total for owner in run.owners)
    assert host.shared == sum(owner.steady for owner in run.owners), "copies for a checkpoint are the owners' own"
    apart = planned(BF16.replace(transport="grpc"), ScalingConfig(num_workers=2, num_optimizers=2), CPU_HOST).hosts[0]
    assert (apart.staging, apart.shared, apart.compute) == (4 * UNIT, 0, 2 * (7100 + (4 + 2) * UNIT))


def test_cpu_ranks_decode_what_is_kept_encoded_into_memory_of_their_own() -> None:
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        model[:3].requires_grad_(False)
        layout = build_layout(model, min_unit_bytes=1, compute_dtype=torch.bfloat16, frozen_codec="int8").layout
    two = ScalingConfig(num_workers=2, num_optimizers=2)
    for budget, decoded in ((1 << 20, 3 * UNIT), (2 * UNIT, 2 * UNIT)):
        zero = BF16.replace(gpu_param_memory_budget=budget)
        run = plan_bytes(layout, WORK, zero, two, CPU_HOST.hosts, state_bytes=8, splits=False, programs=NOTHING)
        assert run.hosts[0].compute == 2 * (7100 + decoded + 2 * UNIT)
    coded = 64 * 64 // 256 * 260 + 64  # a record with its header
    assert sum(owner.params for owner in run.owners) == 3 * coded + UNIT


def test_activations_that_leave_a_gpu_wait_in_host_memory_and_on_cpus_they_only_move() -> None:
    offloaded = replace(WORK, backward_peak_bytes=3000, forward_peak_bytes=2000, offloaded_host_bytes=4500)
    two = ScalingConfig(num_workers=2, num_optimizers=2)
    on_gpus, here = (
        plan_bytes(
            four_layers(), offloaded, BF16, scaling, machine.hosts, state_bytes=8, splits=False, programs=NOTHING
        )
        for machine, scaling in ((GPU_HOSTS, two.replace(use_gpu=True)), (CPU_HOST, two))
    )
    assert (on_gpus.device.peak, on_gpus.hosts[0].activations) == (6 * UNIT + 3100, 2 * 4500)
    (host,) = here.hosts
    assert host.of_ranks == 2 * (3100 + 2 * UNIT + 4500)
    assert host.total == host.owner_bytes + host.of_ranks
    assert "offloaded activations 8.789 KiB" in host.describe()
    tight = replace(GPU_HOSTS, device_bytes=6 * UNIT + 3100)
    check_fits(on_gpus, tight)
    with pytest.raises(MemoryPlanError, match=r"set zero\.offload_activations"):
        check_fits(planned(BF16, two.replace(use_gpu=True), GPU_HOSTS), tight)


def test_hosts_without_a_process_are_not_summed_up_however_many() -> None:
    many = replace(CPU_HOST, hosts=Hosts(count=10**12))
    run = planned(ZeroConfig(placement="packed"), ScalingConfig(num_workers=2, num_optimizers=1), many)
    assert [(host.host, host.ranks, host.owners) for host in run.hosts] == [(0, 1, 0), (1, 1, 0), (10**12 - 1, 0, 1)]
    assert all(host.total > 0 for host in run.hosts)


def test_an_optimizer_half_on_the_devices_moves_its_states_there_and_its_gradients_nowhere() -> None:
    scaling = ScalingConfig(num_workers=2, num_optimizers=2, use_gpu=True)
    whole, half = (planned(BF16.replace(offload_fraction=f), scaling, GPU_HOSTS) for f in (1.0, 0.5))
    elements = 4 * 64 * 64
    assert half.device.states == 12 * elements // 4, "half of them over two ranks"
    assert half.device.peak == whole.device.peak + half.device.states
    assert sum(owner.master + owner.moments for owner in half.owners) == 12 * elements // 2
    for kind in ("params", "gradients"):
        assert sum(getattr(o, kind) for o in half.owners) == sum(getattr(o, kind) for o in whole.owners)
    assert [host.owners for host in half.hosts] == [host.owners for host in whole.hosts], "no further processes"


def test_sums_kept_on_the_device_are_fp32() -> None:
    run = planned(BF16.replace(offload_grads=False), ScalingConfig(num_workers=1, num_optimizers=1), CPU_HOST)
    assert run.device.peak == 4 * UNIT + 100 + 4 * 64 * 64 * 4 + 7000


@pytest.mark.parametrize(
    ("placement", "owners"), [("beside_rank", [0, 0, 1, 1]), ("packed", [1, 1, 1, 1]), ("cpu_nodes", [1, 0, 1, 0])]
)
def test_owners_are_where_placement_puts_them(placement: str, owners: list[int]) -> None:
    scaling = ScalingConfig(num_workers=4, num_optimizers=4, use_gpu=True)
    assert hosts_of_ranks(scaling, GPU_HOSTS.hosts) == [0, 0, 1, 1]
    assert hosts_of_owners(ZeroConfig(placement=placement), scaling, GPU_HOSTS.hosts) == owners


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=12), budget=st.integers(1, 600))
def test_gathered_bytes_stay_within_the_budget_unless_one_unit_alone_is_larger(sizes: list[int], budget: int) -> None:
    peak = _gathered(sizes, budget)
    assert max(sizes) <= peak <= max(budget, max(sizes))
    assert peak == sum(sizes) or sum(sizes) > budget


def test_what_does_not_fit_is_refused_with_the_sum_and_the_setting() -> None:
    scaling = ScalingConfig(num_workers=4, num_optimizers=2, use_gpu=True)
    run = planned(BF16, scaling, GPU_HOSTS)
    check_fits(run, GPU_HOSTS)
    with pytest.raises(MemoryPlanError, match=r"a rank needs 54.93 KiB = gathered parameters 32 KiB \+ .* has 1 KiB"):
        check_fits(run, replace(GPU_HOSTS, device_bytes=1024))
    with pytest.raises(MemoryPlanError, match=r"host 0 needs .* = 2 optimizer actors .* but has 100 KiB"):
        check_fits(run, replace(GPU_HOSTS, host_bytes=100 << 10))
    with pytest.raises(MemoryPlanError, match=r"of shared memory, but zero.slab_dir has room for 64 KiB; set slab_dir"):
        check_fits(run, replace(GPU_HOSTS, shm_bytes=64 << 10))


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"host_push": "never"}])
def test_gradients_for_owners_elsewhere_are_in_memory_that_ranks_share(settings: dict[str, Any]) -> None:
    """Two bytes a trained element with bf16, however they leave; none for owners that read a rank's memory."""
    trained = sum(unit.numel for unit in four_layers().units if unit.trainable)
    four = ScalingConfig(num_workers=4, num_optimizers=2, use_gpu=True)
    run = planned(over("auto", placement="packed", **settings), four, GPU_HOSTS)
    assert [host.kept for host in run.hosts] == [2 * 2 * trained, 0], "one host has no owner, the other has both"
    assert run.hosts[0].shared == run.hosts[0].kept + run.hosts[0].copied
    assert run.hosts[0].of_ranks >= run.hosts[0].kept
    check_fits(run, replace(GPU_HOSTS, shm_bytes=max(host.shared for host in run.hosts)))
    alone = planned(over("grpc", placement="packed", **settings), four, GPU_HOSTS)
    assert [(host.kept, host.shared) for host in alone.hosts] == [(0, 0), (0, 0)]
    here = planned(over("auto", **settings), ScalingConfig(num_workers=2, num_optimizers=2), CPU_HOST)
    assert [host.kept for host in here.hosts] == [0]


def test_parameters_of_other_hosts_count_once_for_the_ranks_of_a_host() -> None:
    """Four layers; the ranks are on both hosts, and each host's owner has half of the parameters."""
    four = ScalingConfig(num_workers=4, num_optimizers=4, use_gpu=True)
    once, each = (planned(over(transport), four, GPU_HOSTS) for transport in ("auto", "grpc"))
    assert [host.copied for host in once.hosts] == [2 * UNIT, 2 * UNIT]
    assert [host.copied for host in each.hosts] == [0, 0]
    assert all(f"parameters of other hosts {format_bytes(2 * UNIT)}" in host.describe() for host in once.hosts)


def test_ranks_on_cpus_compute_with_what_the_host_has_once() -> None:
    packed = {"placement": "packed"}
    four = ScalingConfig(num_workers=4, num_optimizers=1)
    hosts = replace(CPU_HOST, hosts=Hosts(count=2))
    once, each = (planned(over(transport, **packed), four, hosts).hosts[0] for transport in ("auto", "grpc"))
    assert once.copied == 4 * UNIT
    assert each.compute - once.compute == 2 * 4 * UNIT, "two ranks' own copies"


def test_without_room_for_a_copy_the_run_goes_on_without_it() -> None:
    four = ScalingConfig(num_workers=4, num_optimizers=4, use_gpu=True)
    run = planned(over("auto"), four, GPU_HOSTS)
    most = max(host.shared for host in run.hosts)
    check_fits(run, replace(GPU_HOSTS, shm_bytes=most - 2 * UNIT))
    with pytest.raises(MemoryPlanError, match=r"of shared memory.*transport='grpc'"):
        check_fits(run, replace(GPU_HOSTS, shm_bytes=most - 2 * UNIT - 1))


def test_sums_of_gradients_that_leave_a_host_are_staged_there() -> None:
    """Ranks 0 and 1 are on the first host. Ranks 2 and 3 come behind them in their group, so each pushes its own."""
    four = ScalingConfig(num_workers=4, num_optimizers=2, use_gpu=True)
    packed, fp32 = ZeroConfig(placement="packed", gradient_accumulation_steps=2), torch.float32
    once, each = (planned(packed.replace(host_push=how), four, GPU_HOSTS, dtype=fp32) for how in ("auto", "never"))
    assert [owner.gradients for owner in once.owners] == [owner.gradients for owner in each.owners]
    sums = [a.staging - b.staging for a, b in zip(once.hosts, each.hosts, strict=True)]
    assert sums == [2 * 4 * 64 * 64, 0], "the door adds one up while the one before leaves"
    bf16 = [planned(packed.replace(host_push=how), four, GPU_HOSTS).hosts[0].staging for how in ("auto", "never")]
    assert bf16[0] == bf16[1], "two ranks push as many bytes"


def over(transport: str, **settings: Any) -> ZeroConfig:
    return ZeroConfig(precision="bf16", transport=transport, **settings)  # type: ignore[arg-type]


# ---- programs -------------------------------------------------------------------------------------------------------


def memory(anonymous: int, files: int) -> ProcessMemory:
    return ProcessMemory(rss=anonymous + files + 5, shm=5, pss=0, uss=0, anonymous=anonymous, split=0, file=0)


def test_a_rank_does_not_hold_the_compiler_that_a_plan_imports() -> None:
    imported = Imported(coordinator=memory(40, 30), owner=memory(170, 100), compiler=memory(240, 104))
    found = programs_between(imported, used=memory(260, 106))
    assert found == Programs(rank=190, owner=170, coordinator=40, files=102)
    assert found.of_host(2, 1, coordinators=1) == 2 * 190 + 170 + 40 + 102
    assert found.of_host(0, 0) == 0
