"""Whole simulated steps: computed by hand, conserved, bounded, monotone; one of each kind is as fast as all."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulation.cluster import Run, simulate
from lab.simulation.lead import Tree
from lab.simulation.machines import Options, costs_from, machine_from
from lab.simulation.ranks import Compute
from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.owner.gradients.contributions import EARLY
from rayzero.plan.bound import StepTraffic, bound_step
from rayzero.plan.hardware import Hosts
from rayzero.store.shm.words import GradientBytes
from tests.plan.machines import GPU_HOSTS

from .runs import FREE, GRPC, HOST, NUMEL, SHM, layout_of, moving, run_of

BYTES = 4 * NUMEL  # of a unit
MOVED = BYTES / 1e9  # seconds: gathered, summed for the norm, or over a stream
UPDATED = (BYTES + 24 * NUMEL) / 1e9  # gradient; master and two moments, read and written


def seconds_of(run: Run, **how) -> float:
    return simulate(run, steps=4, **how).seconds


# ---- by hand ----------------------------------------------------------------------------------------------------


def test_one_unit_in_shared_memory() -> None:
    """Nothing overlaps: compute, gather, norm, update, and again."""
    found = simulate(run_of(1, compute=Compute(forward=(1.0,), backward=(2.0,))), steps=4)
    assert found.seconds == pytest.approx(1 + 2 + MOVED + MOVED + UPDATED)
    assert found.waits["optimizer"] == pytest.approx(MOVED + UPDATED)
    assert found.waits["push"] == pytest.approx(MOVED)
    assert (found.waits["fetch"], found.fetched, found.pushed) == (0, 0, 0)


def test_one_unit_over_a_stream() -> None:
    found = simulate(run_of(1, compute=Compute(forward=(1.0,), backward=(2.0,)), options=GRPC), steps=4)
    assert found.seconds == pytest.approx(1 + 2 + MOVED + MOVED + MOVED + UPDATED + MOVED)
    assert found.waits["fetch"] == pytest.approx(MOVED)
    assert found.waits["push"] == pytest.approx(2 * MOVED), "gathered, then sent"
    assert (found.fetched, found.pushed) == (BYTES, BYTES)


def test_the_second_units_update_hides_behind_the_first_ones_forward() -> None:
    compute = Compute(forward=(1.0, 1.0), backward=(2.0, 2.0))
    found = simulate(run_of(2, compute=compute), steps=4)
    assert found.seconds == pytest.approx(6 + MOVED + 2 * MOVED + UPDATED), "the last gather, both norms, one update"
    none = simulate(run_of(2, compute=compute, zero=ZeroConfig(overlap="none", prefetch_buffer_size=1)), steps=4)
    assert none.seconds == pytest.approx(6 + MOVED + 2 * MOVED + 2 * UPDATED)


def test_norms_of_large_parts_are_summed_while_backward_goes_on() -> None:
    """Only the last unit's norm is waited for; smaller parts wait for the collect (EARLY, owner/gradients/)."""
    compute = Compute(forward=(1.0, 1.0), backward=(2.0, 2.0))
    found = simulate(run_of(layout=layout_of([EARLY, EARLY], shard=EARLY), compute=compute), steps=4)
    moved, updated = 4 * EARLY / 1e9, 28 * EARLY / 1e9
    assert found.seconds == pytest.approx(6 + moved + moved + updated)


def test_all_threads_sum_what_is_waited_for() -> None:
    """The second unit to be pushed waits for the norm of the first, for which one thread takes twice as long as a push.
    When its turn comes, the lead has asked."""
    machine = replace(HOST, owner_threads=4, norm_core=0.5e9)
    found = simulate(run_of(layout=layout_of([EARLY, EARLY], shard=EARLY), machine=machine), steps=4)
    moved, updated = 4 * EARLY / 1e9, 28 * EARLY / 1e9
    assert found.seconds == pytest.approx(3 * moved + 2 * moved / 4 + 2 * updated / 4)
    four = simulate(
        run_of(layout=layout_of([EARLY], shard=EARLY // 4), machine=replace(machine, norm_core=1e9)), steps=4
    )
    assert four.seconds == pytest.approx(moved + moved / 4 + 3 / 4 * moved / 4 + updated / 4), "one shard alone"


def test_owners_in_this_process_copy_nothing_and_overlap_nothing() -> None:
    compute = Compute(forward=(1.0, 1.0), backward=(2.0, 2.0))
    found = simulate(run_of(2, compute=compute, options=Options(transport="inproc")), steps=4)
    assert found.seconds == pytest.approx(6 + 2 * MOVED + 2 * UPDATED)


def test_two_owners_halve_the_update_of_a_unit_that_both_have() -> None:
    found = seconds_of(run_of(1, owner_hosts=(0, 0)))
    assert found == pytest.approx(MOVED + (MOVED + UPDATED) / 2)


def test_five_messages_lie_between_a_finish_and_a_publication() -> None:
    """finish, collect, its answer, apply, published."""
    late = replace(FREE, latency_s=0.25)
    assert seconds_of(run_of(1, costs=late)) == pytest.approx(seconds_of(run_of(1)) + 5 * 0.25)


def test_the_lead_handles_its_messages_one_after_another() -> None:
    """3 finishes; 2 collects and their answers; 3 norms; 2 applies; beside the next forward 2 answers more."""
    compute = Compute(forward=(1.0,), backward=(0.0,))
    machine = replace(HOST, norm_core=1e18, sum_core=1e18)  # else norms hide behind the messages to other owners
    plain = run_of(1, rank_hosts=(0,) * 3, owner_hosts=(0,) * 2, compute=compute, machine=machine)
    slow = replace(plain, costs=replace(FREE, message_s=0.125))
    found = simulate(slow, steps=4)
    assert found.seconds == pytest.approx(seconds_of(plain) + (3 + 2 + 2 + 3 + 2) * 0.125)
    assert found.lead_messages == 2 * 3 + 4 * 2
    assert found.lead == pytest.approx(14 * 0.125 / found.seconds)


ASKING = replace(SHM, ask_once_per_host=True)


def on_three_hosts(**changes) -> Run:
    """4 owners beside 2 ranks on the lead's host, and 2 ranks on each of two others. Norms take no time: else they hide
    behind the messages to other owners."""
    compute, machine = Compute(forward=(1.0,), backward=(0.0,)), replace(HOST, norm_core=1e18, sum_core=1e18)
    places = {"rank_hosts": (0, 0, 1, 1, 2, 2), "owner_hosts": (0,) * 4}
    return run_of(1, compute=compute, machine=machine, **{**places, **changes})


def test_a_door_asks_for_the_ranks_of_a_host_that_is_not_the_leads() -> None:
    """2 finishes of ranks beside the lead and 2 of doors, and as many answers; 4 messages to and from each owner."""
    plain, asked = (simulate(on_three_hosts(options=options), steps=4) for options in (SHM, ASKING))
    assert (plain.lead_messages, asked.lead_messages) == (2 * 6 + 4 * 4, 2 * (2 + 2) + 4 * 4)


def test_the_lead_works_for_each_rank_for_which_a_door_asks() -> None:
    """Two finishes of doors, each of two ranks, while the lead is waited for; and as many answers."""
    costs = replace(FREE, message_s=0.125, question_s=0.03125)
    run = on_three_hosts(rank_hosts=(1, 1, 2, 2), owner_hosts=(0,), options=ASKING, costs=costs)
    free = replace(run, costs=replace(costs, question_s=0.0))
    found = simulate(run, steps=4)
    assert found.seconds - seconds_of(free) == pytest.approx(2 * 4 * 0.03125)
    assert found.lead * found.seconds == pytest.approx((2 * 2 + 4) * 0.125 + 2 * 4 * 0.03125)
    unmeasured = simulate(replace(run, costs=replace(costs, question_s=None)), steps=4)
    assert unmeasured.lead * unmeasured.seconds == pytest.approx((2 * 2 + 4) * 0.125 + 2 * 4 * 0.125)


def test_an_owner_tells_each_rank_of_another_host_or_its_door() -> None:
    """4 ranks on other hosts, 2 on the owner's; what comes after the first notice waits for it."""
    run = on_three_hosts(owner_hosts=(0,), costs=replace(FREE, notice_s=0.125))
    each, once = (seconds_of(replace(run, options=options)) for options in (SHM, ASKING))
    assert each - seconds_of(replace(run, costs=FREE)) == pytest.approx(4 * 0.125)
    assert each - once == pytest.approx(2 * 0.125)


def test_what_the_lead_does_beside_messages_counts_once_a_step() -> None:
    run = on_three_hosts()
    assert seconds_of(replace(run, costs=replace(FREE, round_s=0.25))) - seconds_of(run) == pytest.approx(0.25)


def test_a_tree_of_owners_takes_messages_off_the_lead() -> None:
    """Of 4 owners the lead asks 2, twice, and 2 answer. The farthest one is behind one more, which sends 2 messages,
    and hears from it by 2."""
    run = on_three_hosts(rank_hosts=(0, 0, 1, 1))
    few = simulate(replace(run, options=replace(SHM, fan_out=2)), steps=4)
    assert few.lead_messages == 2 * 4 + 4 * 2
    slow = replace(FREE, message_s=0.125)
    tree = replace(run, costs=slow, options=replace(SHM, fan_out=2))
    assert seconds_of(tree) < seconds_of(replace(run, costs=slow))
    assert Tree.of(4, 0) == Tree(4, 0, 1.0)
    assert Tree.of(6, 2) == Tree(2, 1, 2 / 6), "2 owners, and 2 behind each"
    assert Tree.of(7, 2).between == 2
    assert Tree.of(256, 16) == Tree(16, 1, 1 / 16)


def test_gradients_of_several_ranks_are_added_up_by_the_norm_and_read_once_by_the_update() -> None:
    machine = replace(HOST, sum_core=0.25e9)
    found = seconds_of(run_of(1, machine=machine, rank_hosts=(0, 0)))
    total = 4 * NUMEL
    assert found == pytest.approx(MOVED + (2 * BYTES + total) / 0.25e9 + (total + 24 * NUMEL) / 1e9)
    assert seconds_of(run_of(1, machine=machine)) == pytest.approx(MOVED + MOVED + UPDATED), "nothing to add up"


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (2, 2), (4, 4), (100, 8)])
def test_an_owner_has_a_thread_for_each_of_a_few_streams(cores: int, threads: int) -> None:
    """Sixteen ranks, each on a host of its own, fetch a unit from one owner."""
    machine = replace(HOST, network=1e15, cores=float(cores), copy_core=1e15, norm_core=1e15, sum_core=1e15)
    found = simulate(elsewhere(16, 16, 1, machine=replace(machine, adam_core=1e15)), steps=4)
    assert found.waits["fetch"] == pytest.approx(2 * MOVED * 16 / threads, rel=1e-3), "two units of each rank"


def test_between_hosts_bytes_are_encrypted_if_a_run_says_so() -> None:
    slow = moving() | {"encrypted": moving(0.5e9)["encrypted"]}
    run = elsewhere(1, 1, 1, costs=replace(FREE, moving=slow), machine=replace(HOST, network=1e12))
    plain, encrypted = seconds_of(run), seconds_of(replace(run, options=replace(SHM, encrypted=True)))
    assert encrypted - plain == pytest.approx(2 * MOVED), "both units at once, twice as long each way"
    with pytest.raises(ConfigError, match="nothing of encrypted bytes that travel; measure it"):
        simulate(replace(run, costs=replace(FREE, moving={}), options=replace(SHM, encrypted=True)))


def test_ranks_and_owners_compete_for_cores() -> None:
    """Two ranks with a core each and one core in all: twice as long."""
    compute = Compute(forward=(1.0,), backward=(2.0,))
    one = replace(HOST, cores=1.0, copy_core=1e15, norm_core=1e15, adam_core=1e15)
    assert seconds_of(run_of(1, compute=compute, machine=one)) == pytest.approx(3.0, rel=1e-3)
    assert seconds_of(run_of(1, compute=compute, machine=one, rank_hosts=(0, 0))) == pytest.approx(6.0, rel=1e-3)


def test_a_gpu_gets_its_units_over_the_link() -> None:
    gpu = replace(HOST, gpus=True, link=1e8)
    found = seconds_of(run_of(1, compute=Compute(forward=(1.0,), backward=(2.0,)), machine=gpu))
    assert found == pytest.approx(3 + 10 * MOVED + MOVED + UPDATED + 10 * MOVED)


# ---- what must hold ---------------------------------------------------------------------------------------------


def elsewhere(ranks: int, hosts: int, owners: int, **changes) -> Run:
    """Ranks on the first hosts, each owner on one of its own."""
    return run_of(
        rank_hosts=tuple(rank % hosts for rank in range(ranks)),
        owner_hosts=tuple(hosts + owner for owner in range(owners)),
        **changes,
    )


@pytest.mark.parametrize("full", [False, True])
def test_the_bytes_on_the_network_are_those_of_the_arithmetic(full: bool) -> None:
    run = elsewhere(4, 2, 2, layout=layout_of([NUMEL] * 3))
    found = simulate(run, steps=4, full=full)
    assert (found.fetched, found.pushed) == (3 * BYTES, 3 * BYTES)
    into = {name: share for name, share in found.busy.items() if "network in" in name}
    ranks, owners = (2 * 3 * BYTES, 4 * 3 * BYTES // 2)  # two ranks of a host fetch; half of four ranks' pushes
    assert sorted(round(share * HOST.network) for share in into.values()) == sorted(
        [ranks] * (2 if full else 1) + [owners] * 2
    ), "the host of the lead is a kind of its own"


def test_a_copy_moves_a_units_bytes_to_a_host_once() -> None:
    run = elsewhere(4, 2, 2, layout=layout_of([NUMEL] * 3))
    once = replace(run, options=Options(transport="shm", fetch_once_per_host=True, push_once_per_host=True))
    plain, found = simulate(run, steps=4), simulate(once, steps=4)
    for name, share in found.busy.items():
        if "network" in name:
            assert share == pytest.approx(plain.busy[name] / 2)
    assert found.seconds < plain.seconds


def test_all_ranks_of_a_host_fetch_parts_for_it() -> None:
    """Four parts of a unit over two streams a rank: two after two by one rank, all at once by two."""
    options = replace(SHM, most_streams=2)
    run = elsewhere(2, 1, 4, options=options, machine=replace(HOST, network=1e12))
    both = replace(run, options=replace(options, fetch_once_per_host=True))
    assert simulate(run, steps=4).waits["fetch"] == pytest.approx(2 * MOVED / 2)
    assert simulate(both, steps=4).waits["fetch"] == pytest.approx(2 * MOVED / 4)


def test_a_host_pushes_one_sum_of_each_eight_ranks_in_fp32() -> None:
    layout = layout_of([NUMEL], torch.bfloat16)
    run = elsewhere(9, 1, 1, layout=layout, machine=replace(HOST, network=1e12))
    once = replace(run, options=replace(SHM, push_once_per_host=True))
    plain, found = simulate(run, steps=4), simulate(once, steps=4)
    card = "network out of host kind 0"  # that of the ranks
    assert plain.busy[card] == pytest.approx(9 * 2 * NUMEL / 1e12)
    assert found.busy[card] == pytest.approx(2 * 4 * NUMEL / 1e12), "two sums of nine ranks"
    summed = 9 * 2 * NUMEL / 2 / 1e9  # each of two threads reads half
    alone = 9 / 8 * 2 * NUMEL / 1e9  # nine streams share an owner's eight threads
    assert found.waits["push"] == pytest.approx(plain.waits["push"] - alone + summed + 4 * NUMEL / 1e9)
    gpus = replace(once, machine=replace(once.machine, cores=72.0, gpus=True, link=1e12))
    many = replace(gpus, machine=replace(gpus.machine, cores=16.0))  # one thread for a sum, and above four
    assert simulate(many, steps=4).waits["push"] - simulate(gpus, steps=4).waits["push"] == pytest.approx(
        summed * 3 / 4, rel=1e-3
    )


def test_what_does_not_fit_is_fetched_again() -> None:
    size = 4 * NUMEL
    tight = ZeroConfig(gpu_param_memory_budget=3 * size, prefetch_buffer_size=1)
    run = elsewhere(1, 1, 1, layout=layout_of([NUMEL] * 4), zero=tight)
    assert simulate(run, steps=4).fetched == (4 + 1) * BYTES, "one unit of four comes anew for the backward"


SPEEDS = st.floats(1e7, 1e10)


@settings(deadline=None, max_examples=min(settings.default.max_examples, 25))
@given(SPEEDS, SPEEDS, SPEEDS, st.integers(1, 3), st.floats(0, 0.01))
def test_no_step_beats_the_bound_of_a_plan(
    network: float, memory: float, adam: float, ranks: int, compute: float
) -> None:
    """The bound is computed in rayzero.plan, from sums alone: here for ranks on one host, and an owner on another."""
    run = elsewhere(
        ranks,
        1,
        1,
        machine=replace(HOST, network=network, memory=memory, adam_core=adam),
        compute=Compute(forward=(compute,) * 2, backward=(compute,) * 2),
        costs=replace(FREE, moving=moving(1e12)),
    )
    update = 2 * ranks * 2 * BYTES + 2 * NUMEL * 24
    traffic = StepTraffic(
        flops=int(4e12 * compute),
        fetch=2 * BYTES,
        gradients=GradientBytes(2 * BYTES, 8 * NUMEL),
        published=2 * BYTES,
        update=update,
    )
    hosts = Hosts(count=2, gpus_each=ranks)
    hardware = replace(GPU_HOSTS, hosts=hosts, flops=1e12, link=float("inf"), network=network, memory=memory)
    scaling = ScalingConfig(num_workers=ranks, num_optimizers=1, use_gpu=True)
    bound = bound_step(traffic, ZeroConfig(placement="packed", transport="grpc", host_push="never"), scaling, hardware)
    assert bound.network == pytest.approx(ranks * 2 * BYTES / network)
    found = simulate(run, steps=4)
    assert found.seconds >= bound.seconds * (1 - 1e-9)
    assert found.seconds >= found.bound * (1 - 1e-9)


@settings(deadline=None, max_examples=min(settings.default.max_examples, 25))
@given(st.sampled_from(["network", "memory", "adam_core", "norm_core", "copy_core", "cores"]), st.floats(1.1, 10))
def test_nothing_gets_slower_with_more_of_something(what: str, factor: float) -> None:
    slow = replace(HOST, cores=2.0, memory=4e9, network=5e8)
    costs = replace(FREE, moving=moving(byte_s=2e-10), unit_s=1e-5, latency_s=1e-5)
    run = elsewhere(3, 2, 2, machine=slow, costs=costs, compute=Compute(forward=(1e-4,) * 2, backward=(2e-4,) * 2))
    more = replace(run, machine=replace(slow, **{what: getattr(slow, what) * factor}))
    assert seconds_of(more) <= seconds_of(run) * 1.02


PLACES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2))


def placed(places: tuple[int, int, int, int], options: Options, gpus: bool, dtype: torch.dtype) -> Run:
    """``places``: hosts with ranks, ranks on each, owners beside them on each, hosts with owners alone."""
    hosts, each, beside, apart = places
    rank_hosts = tuple(host for host in range(hosts) for _ in range(each))
    owner_hosts = (*range(hosts, hosts + apart), *(host for host in range(hosts) for _ in range(beside)))
    layout = layout_of([NUMEL, 3 * NUMEL, NUMEL // 2], dtype)
    return run_of(
        layout=layout,
        rank_hosts=rank_hosts,
        owner_hosts=owner_hosts,
        options=options,
        machine=replace(HOST, cores=3.0, memory=6e9, gpus=gpus, link=2e9),
        costs=replace(FREE, moving=moving(byte_s=2e-10), unit_s=1e-5, step_s=1e-4, latency_s=1e-5),
        compute=Compute(forward=(1e-4,) * 3, backward=(2e-4,) * 3),
    )


@settings(deadline=None, max_examples=min(settings.default.max_examples, 30))
@given(
    PLACES,
    st.sampled_from([SHM, *(replace(GRPC, most_streams=most) for most in (1, 3, 4, 6, 8, 64))]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_one_of_each_kind_is_as_fast_as_all(
    places: tuple[int, int, int, int], options: Options, gpus: bool, dtype: torch.dtype
) -> None:
    run = placed(places, options, gpus, dtype)
    reduced, full = simulate(run), simulate(run, full=True)
    assert reduced.seconds == pytest.approx(full.seconds, rel=1e-6)
    assert (reduced.fetched, reduced.pushed, reduced.lead_messages) == (full.fetched, full.pushed, full.lead_messages)
    assert reduced.bound == pytest.approx(full.bound, rel=1e-6)
    assert reduced.kinds <= full.kinds


def test_the_same_run_gives_the_same_figures() -> None:
    run = elsewhere(3, 3, 2)
    assert simulate(run) == simulate(run)


def test_many_alike_are_as_fast_to_simulate_as_few() -> None:
    few, many = elsewhere(8, 4, 2), elsewhere(200, 100, 2)
    assert simulate(many).events < 2 * simulate(few).events


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "error", "said"),
    [
        (run_of(zero=ZeroConfig(offload_fraction=0.5)), UnsupportedError, "zero.offload_fraction is 0.5"),
        (run_of(zero=ZeroConfig(wire_compression="bf16")), UnsupportedError, "wire_compression"),
        (run_of(owner_hosts=(1,), options=Options(transport="inproc")), ConfigError, "inproc"),
        (run_of(compute=Compute(forward=(1.0,), backward=(1.0,))), ConfigError, "as many as the layout"),
    ],
)
def test_what_cannot_be_simulated_is_refused(run: Run, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        simulate(run)


@pytest.mark.parametrize(
    "run", [run_of(options=replace(SHM, fetch_once_per_host=True)), on_three_hosts(options=ASKING)]
)
def test_what_a_host_does_once_needs_its_ranks_together(run: Run) -> None:
    with pytest.raises(UnsupportedError, match="leave full out"):
        simulate(run, full=True)


def test_one_step_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="steps is 1 but must be at least 2"):
        simulate(run_of(), steps=1)


def test_descriptions_are_checked_field_by_field() -> None:
    with pytest.raises(ConfigError, match=r"Machine has no ram; it has adam_core, .*"):
        machine_from({"ram": 1})
    with pytest.raises(ConfigError, match=r"Costs lacks aside_s, step_s, shard_s, message_s, .*measure it"):
        costs_from({"unit_s": 1.0})
    with pytest.raises(ConfigError, match="moving has 'carrier', but must have some of plain, encrypted"):
        costs_from(asdict(FREE) | {"moving": {"carrier": {}}})
    with pytest.raises(ConfigError, match="Stream lacks speed, rank_byte_s, owner_byte_s"):
        costs_from(asdict(FREE) | {"moving": {"plain": {"fetch": {}, "push": {}}}})
    assert costs_from(asdict(FREE)) == FREE
    with pytest.raises(ConfigError, match=r"Machine\.cores is -1 but must be a number from 0 on"):
        machine_from(asdict(HOST) | {"cores": -1})
