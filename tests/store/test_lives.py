"""A rank that has died and comes back, over every store: what its earlier life did counts only where it was decided.

Here the earlier life still runs, like a process that was stopped and wakes up: whatever it says is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clock import StallClock

from rayzero.errors import StallError, StoreClosedError, StoreError
from rayzero.protocol.messages import ATTEMPTS, COMPUTE, LoopState, MeanInput
from store.stores import STORES, StoreFactory, Stores
from store.toy import WAIT, Grads, Rank, ask_norms, equal, make_spec, push_all, random_grads, start, take_step


@functools.cache
def undisturbed() -> tuple[Grads, float]:
    """What the step makes of the gradients that count, and their norm."""
    spec = make_spec(world_size=2)
    with STORES["inprocess"](2, 2) as stores:
        ranks = start(stores, spec)
        norm = take_step(ranks, [random_grads(spec, 1), random_grads(spec, 2)])
        return ranks[0].fetch(), norm.total


def begun(stores: Stores) -> tuple[list[Rank], list[Grads]]:
    """Both ranks, and the gradients that count."""
    spec = make_spec(world_size=2)
    return start(stores, spec), [random_grads(spec, 1), random_grads(spec, 2)]


def back(stores: Stores, rank: int = 1, *, at: int = 0) -> Rank:
    """A rank in its second life."""
    store, spec = stores.again(rank), make_spec(world_size=2)
    attached = store.attach(spec)
    assert (attached.step, attached.needs_load) == (at, False)
    return Rank(rank, store, spec, step=at, attempt=ATTEMPTS)


def ends_well(ranks: list[Rank]) -> None:
    """The step has the bits of one without a death."""
    for rank in ranks:
        assert equal(rank.fetch(1), undisturbed()[0])


def test_what_an_earlier_life_pushed_and_committed_counts_no_more(make_stores: StoreFactory) -> None:
    with make_stores(2, 3) as stores:
        (first, old), grads = begun(stores)
        old.push(random_grads(old.spec, 77))
        old.finish()
        new = back(stores)
        push_all((first, new), grads)
        norms = [rank.finish() for rank in (first, new)]
        assert norms[0].result(WAIT) == norms[1].result(WAIT)
        ends_well([first, new])


def test_a_push_of_the_same_step_is_replaced_even_if_it_was_counted(make_stores: StoreFactory) -> None:
    """All had the norm; the dead rank's gradients are at the owners, with their norm."""
    with make_stores(2, 3) as stores:
        (first, old), grads = begun(stores)
        push_all((first, old), grads)
        norms = [rank.ask_norm() for rank in (first, old)]
        total = norms[0].result(WAIT)
        new = back(stores)
        new.push(grads[1])
        assert new.ask_norm().result(WAIT) == total
        made = [rank.commit() for rank in (first, new)]
        assert made[0].result(WAIT).attempts == (0, ATTEMPTS)
        assert made[1].result(WAIT) == made[0].result(WAIT)
        ends_well([first, new])


def test_what_was_added_to_the_others_gradients_is_not_added_again(make_stores: StoreFactory) -> None:
    """The other rank may have given its own gradients back by then. A new life repeats the old one's; were they others,
    they would come too late."""
    with make_stores(2, 2) as stores:
        (first, old), grads = begun(stores)
        push_all((first, old), grads)
        ask_norms((first, old))
        new = back(stores)
        new.push(random_grads(new.spec, 77))
        new.ask_norm().result(WAIT)
        made = [rank.commit() for rank in (first, new)]
        assert made[0].result(WAIT).norm == undisturbed()[1]
        ends_well([first, new])


def test_a_commit_that_looks_like_the_earlier_lifes_is_a_new_one(make_stores: StoreFactory) -> None:
    with make_stores(2, 2) as stores:
        (first, old), grads = begun(stores)
        push_all((first, old), grads)
        ask_norms((first, old))
        lost = old.commit()
        new = back(stores)
        new.push(grads[1])
        new.ask_norm().result(WAIT)
        made = first.commit()
        with pytest.raises(TimeoutError):  # the earlier life's commit counts no more
            made.result(0.2)
        assert new.commit().result(WAIT) == made.result(WAIT)
        assert not lost.done() or lost.exception() is not None
        ends_well([first, new])


def test_a_step_that_was_discarded_before_the_death_is_discarded_again(make_stores: StoreFactory) -> None:
    with make_stores(2, 2) as stores:
        (first, old), grads = begun(stores)
        for rank in (first, old):
            rank.push(random_grads(rank.spec, 50))
        ask_norms((first, old))
        first.discard().result(WAIT)
        first.push(grads[0])  # of its next attempt: its first one's gradients are gone
        old.discard().result(WAIT)
        new = back(stores)
        new.push(grads[1])
        norms = [first.finish(), new.finish()]
        assert norms[0].result(WAIT) == norms[1].result(WAIT)
        ends_well([first, new])


def test_a_discard_is_repeated_without_the_others_first_gradients(make_stores: StoreFactory) -> None:
    """The dead rank had the norm; the other one has discarded since, and its first gradients are gone."""
    with make_stores(2, 2) as stores:
        (first, old), grads = begun(stores)
        for rank in (first, old):
            rank.push(random_grads(rank.spec, 50))
        norm = min([rank.ask_norm() for rank in (first, old)], key=id).result(WAIT)
        first.discard().result(WAIT)
        first.push(grads[0])
        new = back(stores)
        new.push(random_grads(new.spec, 50))
        assert new.ask_norm().result(WAIT) == norm
        new.discard().result(WAIT)
        new.push(grads[1])
        for finished in [first.finish(), new.finish()]:
            finished.result(WAIT)
        ends_well([first, new])


def test_a_decided_step_is_answered_from_what_was_decided(make_stores: StoreFactory) -> None:
    with make_stores(2, 3) as stores:
        (first, old), grads = begun(stores)
        push_all((first, old), grads)
        norm = min([rank.finish() for rank in (first, old)], key=id).result(WAIT)
        first.store.decision(0).result(WAIT)
        new = back(stores, at=1)
        new.store.repeat(1)
        new.step = 0
        assert equal(new.fetch(), first.fetch(1))
        assert new.store.published(0, 0).result(WAIT) == 1
        new.push(random_grads(new.spec, 99))
        unit = new.spec.layout.units[0]
        new.store.write(0, 0, COMPUTE, torch.zeros(unit.numel, dtype=unit.dtype)).result(WAIT)
        assert new.ask_norm().result(WAIT) == norm
        assert new.commit().result(WAIT) == first.store.decision(0).result(WAIT)
        ends_well([first, new])
        new.attempt = ATTEMPTS
        push_all((first, new), grads)
        for finished in [first.finish(), new.finish()]:
            finished.result(WAIT)


CALLS: dict[str, Callable[[Rank], Any]] = {
    "finish": lambda old: old.finish(),
    "commit": lambda old: old.commit(),
    "mean": lambda old: old.store.mean(MeanInput(values=(1.0,), weight=1.0)),
    "discard": lambda old: old.discard(),
    "decision": lambda old: old.store.decision(0),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_earlier_lifes_late_calls_are_refused(make_stores: StoreFactory, call: str) -> None:
    with make_stores(2, 2) as stores:
        (first, old), grads = begun(stores)
        new = back(stores)
        if not _by_mailbox(stores):  # nobody reads the mailbox of an earlier life
            with pytest.raises(
                StoreClosedError, match=r"rank 1 was replaced: its life 0 is over, 1 is its present one"
            ):
                CALLS[call](old).result(WAIT)
        else:
            late = CALLS[call](old)
        old.store.close("it wakes up and leaves")
        push_all((first, new), grads)
        for finished in [first.finish(), new.finish()]:
            finished.result(WAIT)
        assert not _by_mailbox(stores) or isinstance(late.exception(WAIT), StoreError)
        ends_well([first, new])


def _by_mailbox(stores: Stores) -> bool:
    return getattr(stores[1].connection, "_shared", None) is not None  # type: ignore[attr-defined]


def test_an_earlier_lifes_late_pushes_and_states_change_nothing(make_stores: StoreFactory) -> None:
    with make_stores(2, 2) as stores:
        (first, old), grads = begun(stores)
        new = back(stores)
        push_all((first, new), grads)
        for unit in old.spec.layout.units:
            if unit.trainable:
                done = old.push_unit(unit.index, random_grads(old.spec, 3))
                done.exception(WAIT)  # refused, or into memory that nobody reads
        for finished in [first.finish(), new.finish()]:
            finished.result(WAIT)
        ends_well([first, new])


def test_what_was_kept_is_there_for_the_next_life(make_stores: StoreFactory) -> None:
    with make_stores(2, 2) as stores:
        _, old = begun(stores)[0]
        kept = [LoopState(step=step, part=part, content=b"x" * 999) for step in (3, 4) for part in (0, 1)]
        for state in kept:
            old.store.keep(state)
        old.finish()
        assert back(stores).store.kept() == kept


def test_a_write_is_asked_for_again(make_stores: StoreFactory) -> None:
    with make_stores(2, 2) as stores:
        (first, old), _ = begun(stores)
        unit = first.spec.layout.units[0]
        values = torch.full((unit.numel,), 0.5, dtype=unit.dtype)
        old.store.write(0, 0, COMPUTE, values)
        new = back(stores)
        asked = [rank.store.write(0, 0, COMPUTE, values) for rank in (new, first)]
        for write in asked:
            write.result(WAIT)
        late = Rank(1, stores.again(1, 2), new.spec)
        late.store.attach(new.spec)
        late.store.write(0, 0, COMPUTE, values).result(WAIT)  # it was made for all while the rank was away
        out = torch.empty_like(values)
        late.store.fetch(0, 0, COMPUTE, out).result(WAIT)
        assert torch.equal(out[: unit.slots[0].numel], values[: unit.slots[0].numel])


def test_a_mean_is_asked_for_again(make_stores: StoreFactory) -> None:
    with make_stores(2, 2) as stores:
        (first, old), _ = begun(stores)
        old.store.mean(MeanInput(values=(70.0,), weight=1.0))
        new = back(stores)
        means = [rank.store.mean(MeanInput(values=(v,), weight=1.0)) for rank, v in ((new, 2.0), (first, 4.0))]
        assert [mean.result(WAIT) for mean in means] == [(3.0,)] * 2
        late = stores.again(1, 2)
        late.attach(new.spec)
        assert late.mean(MeanInput(values=(2.0,), weight=1.0)).result(WAIT) == (3.0,)


def test_a_save_is_asked_for_again(make_stores: StoreFactory, tmp_path: Path) -> None:
    with make_stores(2, 2) as stores:
        (first, old), _ = begun(stores)
        old.store.save(0, tmp_path / "ck", ())
        new = back(stores)
        saves = [rank.store.save(0, tmp_path / "ck", ()) for rank in (new, first)]
        assert saves[0].result(WAIT) == saves[1].result(WAIT)
        late = stores.again(1, 2)
        late.attach(new.spec)
        assert late.save(0, tmp_path / "ck", ()).result(WAIT) == saves[0].result(WAIT)


def test_the_others_are_told_who_is_replaced(make_stores: StoreFactory, stall_clock: StallClock) -> None:
    with make_stores(2, 2) as stores:
        (first, old), grads = begun(stores)
        new = stores.again(1)
        new.attach(old.spec)
        first.push(grads[0])
        with pytest.raises(StallError, match="rank 1 has not finished step 0"):
            stall_clock.stall(first.finish())
