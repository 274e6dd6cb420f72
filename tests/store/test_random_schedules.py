"""Random trainings: ranks that skip units, discard, accumulate and arrive in any order. No schedule may deadlock, and
none may change a bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayzero.protocol.messages import ModelSpec
from store.stores import STORES, inprocess
from store.toy import WAIT, Grads, Rank, equal, make_spec, masters, random_grads, start, started

MAX_PUSHES = 3  # of one unit in one attempt


@dataclass(frozen=True)
class RankStep:
    """What one rank does in one step."""

    dropped: tuple[int, ...]  # units pushed and then discarded by zero_grad()
    pushed: tuple[int, ...]  # units in the order of their pushes, repeats included


def rank_steps() -> st.SearchStrategy[RankStep]:
    units = st.lists(st.integers(0, 2), max_size=6).map(
        lambda found: tuple(u for i, u in enumerate(found) if found[:i].count(u) < MAX_PUSHES)
    )
    return st.builds(RankStep, dropped=units, pushed=units)


def programs() -> st.SearchStrategy[list[list[RankStep]]]:
    """[rank][step]"""
    return st.integers(1, 4).flatmap(
        lambda ranks: st.integers(1, 3).flatmap(
            lambda steps: st.lists(
                st.lists(rank_steps(), min_size=steps, max_size=steps), min_size=ranks, max_size=ranks
            )
        )
    )


def grads_of(spec: ModelSpec, rank: int, step: int, unit: int, seq: int, dropped: bool) -> Grads:
    """This push's gradients; now and then a parameter has none."""
    seed = hash((rank, step, unit, seq, dropped)) % (1 << 31)
    grads = random_grads(spec, seed)
    absent = random.Random(seed).choice([None, *grads])
    return {name: grad for name, grad in grads.items() if name != absent}


def events_of(rank: Rank, program: Sequence[RankStep], spec: ModelSpec):  # type: ignore[no-untyped-def]
    """The rank's training as a generator that stops before each event, saying whether it needs the others' last
    step."""
    for step, plan in enumerate(program):
        yield True
        rank.fetch()
        for dropped, units in ((True, plan.dropped), (False, plan.pushed)):
            flying = []
            for unit in units:
                yield False
                seq = rank.counts.get(unit, 0)
                flying.append(rank.push_unit(unit, grads_of(spec, rank.rank, step, unit, seq, dropped)))
            for push in flying:
                push.result(WAIT)
            if dropped and units:
                rank.zero_grad()
        yield False
        rank.finish(0.5)


def interleave(spec: ModelSpec, program: Sequence[Sequence[RankStep]], num_owners: int, order: random.Random) -> Grads:
    """Run all ranks in one thread, an event of a random rank at a time."""
    with started(inprocess(spec.world_size, num_owners), spec) as ranks:
        running = {r.rank: events_of(r, program[r.rank], spec) for r in ranks}
        needs = {rank: next(events) for rank, events in running.items()}
        while running:
            slowest = min(ranks[rank].step for rank in running)
            able = [rank for rank in running if not needs[rank] or ranks[rank].step == slowest]
            rank = order.choice(able)
            try:
                needs[rank] = next(running[rank])
            except StopIteration:
                del running[rank]
        return masters(ranks[0])


@pytest.mark.spread(3)
@settings(max_examples=min(settings.default.max_examples, 25), suppress_health_check=[HealthCheck.too_slow])
@given(programs(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_interleaving_ends_with_the_same_bits(
    program: list[list[RankStep]], num_owners: int, order: random.Random
) -> None:
    spec = make_spec(len(program), accumulation_steps=MAX_PUSHES)
    in_rank_order = random.Random(0)
    in_rank_order.choice = lambda able: min(able)  # type: ignore[method-assign, assignment]
    assert equal(interleave(spec, program, num_owners, order), interleave(spec, program, 1, in_rank_order))


@pytest.mark.thorough
@pytest.mark.parametrize("store", STORES)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(program=programs(), num_owners=st.integers(1, 4))
def test_ranks_in_threads_of_their_own_end_with_the_same_bits(
    store: str, program: list[list[RankStep]], num_owners: int
) -> None:
    spec = make_spec(len(program), accumulation_steps=MAX_PUSHES)
    with STORES[store](spec.world_size, num_owners) as stores:
        ranks = start(stores, spec)
        failures: list[BaseException] = []

        def run(rank: Rank) -> None:
            try:
                for _ in events_of(rank, program[rank.rank], spec):
                    pass
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT)
        assert not failures
        assert not any(thread.is_alive() for thread in threads)
        found = masters(ranks[0])
    in_rank_order = random.Random(0)
    in_rank_order.choice = lambda able: min(able)  # type: ignore[method-assign, assignment]
    assert equal(found, interleave(spec, program, 1, in_rank_order))
