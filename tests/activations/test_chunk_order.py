"""The order of backwards over pipeline schedules, by simulation."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.activations.group import ChunkKey, ChunkOrder, ChunkQuota, OffloadPolicy
from rayzero.errors import ConfigError

Event = tuple[str, int, int]  # "F" or "B", virtual stage, microbatch


def one_f_one_b(pp: int, rank: int, num: int) -> list[Event]:
    warm = min(pp - rank - 1, num)
    events = [("F", 0, m) for m in range(warm)]
    for m in range(num - warm):
        events += [("F", 0, warm + m), ("B", 0, m)]
    return events + [("B", 0, m) for m in range(num - warm, num)]


def interleaved(pp: int, rank: int, vpp: int, num: int) -> list[Event]:
    """Megatron's interleaved 1F1B on one rank; ``num`` is a multiple of ``pp``."""
    order = [(s, g + m) for g in range(0, num, pp) for s in range(vpp) for m in range(pp)]
    back = [(s, g + m) for g in range(0, num, pp) for s in reversed(range(vpp)) for m in range(pp)]
    warm = min((pp - rank - 1) * 2 + (vpp - 1) * pp, len(order))
    events = [("F", *key) for key in order[:warm]]
    for index in range(len(order) - warm):
        events += [("F", *order[warm + index]), ("B", *back[index])]
    return events + [("B", *key) for key in back[len(order) - warm :]]


def all_then_all(vpp: int, num: int) -> list[Event]:
    forwards = [("F", s, m) for s in range(vpp) for m in range(num)]
    return forwards + [("B", s, m) for s in reversed(range(vpp)) for m in range(num)]


def arbitrary(rng: random.Random, vpp: int, num: int) -> list[Event]:
    todo = [(s, m) for s in range(vpp) for m in range(num)]
    events: list[Event] = []
    open_: list[tuple[int, int]] = []
    while todo or open_:
        if todo and (not open_ or rng.random() < 0.5):
            stage = rng.choice(sorted({s for s, _ in todo}))
            key = min(k for k in todo if k[0] == stage)
            todo.remove(key)
            open_.append(key)
            events.append(("F", *key))
        else:
            events.append(("B", *open_.pop(rng.randrange(len(open_)))))
    return events


def wrong_predictions(order: ChunkOrder, events: list[Event]) -> int:
    """Run one step; predictions that named another chunk, or none where the next one was ready."""
    wrong = 0
    live: set[tuple[int, int]] = set()
    keys: dict[tuple[int, int], ChunkKey] = {}
    backs = [(s, m) for kind, s, m in events if kind == "B"]
    for kind, stage, microbatch in events:
        chunk = (stage, microbatch)
        if kind == "F":
            keys[chunk] = order.forward_began(stage)
            order.forward_ended(keys[chunk])
            live.add(chunk)
            continue
        order.backward_began(keys[chunk])
        place = backs.index(chunk) + 1
        follower = backs[place] if place < len(backs) else None
        predicted = order.expected_after(keys[chunk])
        wrong += predicted != (keys[follower] if follower in live else None)
        live.discard(chunk)
        order.gone(keys[chunk])
    return wrong


SCHEDULES: dict[str, list[list[Event]]] = {
    "1F1B": [one_f_one_b(pp, rank, num) for pp in (1, 2, 3, 4, 8) for num in (1, 2, 5, 8, 16) for rank in range(pp)],
    "interleaved 1F1B": [
        interleaved(pp, rank, vpp, pp * groups)
        for pp, vpp, groups in product((1, 2, 3, 4), (2, 3, 4), (1, 2, 4))
        for rank in range(pp)
    ],
    "all forwards, then all backwards": [all_then_all(vpp, num) for vpp in (1, 2, 3) for num in (1, 2, 6)],
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_is_predicted_from_the_first_step(kind: str) -> None:
    for events in SCHEDULES[kind]:
        order = ChunkOrder()
        assert [wrong_predictions(order, events) for _ in range(3)] == [0, 0, 0]


def test_the_staged_vector():
    order = ChunkOrder()
    events = [("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("B", 1, 1), ("B", 0, 0), ("B", 0, 1)]
    assert wrong_predictions(order, events) == 0
    assert order.learned == (ChunkKey(1, 0), ChunkKey(1, 1), ChunkKey(0, 0), ChunkKey(0, 1))


def test_several_forwards_and_one_backward_run_newest_first():
    order = ChunkOrder()
    events = [("F", 0, m) for m in range(4)] + [("B", 0, m) for m in reversed(range(4))]
    assert wrong_predictions(order, events) == 0


def test_any_schedule_is_predicted_after_one_step():
    rng = random.Random(3)
    for _ in range(300):
        events = arbitrary(rng, rng.randint(1, 4), rng.randint(1, 6))
        order = ChunkOrder()
        lasting = has_one_step(events)
        first = wrong_predictions(order, events)
        assert first <= len(events) // 2
        if lasting:
            assert wrong_predictions(order, events) == 0


def has_one_step(events: list[Event]) -> bool:
    """True when a chunk is live from the first forward to the last backward."""
    depth = 0
    for index, (kind, _, _) in enumerate(events):
        depth += 1 if kind == "F" else -1
        if depth == 0 and index < len(events) - 1:
            return False
    return True


def test_more_or_fewer_microbatches_fall_back_to_the_rule():
    order = ChunkOrder()
    for num in (8, 4, 12, 2):
        assert wrong_predictions(order, one_f_one_b(4, 0, num)) == 0


def test_a_forward_without_backward_leaves_the_learned_order():
    order = ChunkOrder()
    wrong_predictions(order, one_f_one_b(2, 0, 4))
    learned = order.learned
    key = order.forward_began(0)
    order.forward_ended(key)
    order.gone(key)
    assert order.learned == learned
    assert wrong_predictions(order, one_f_one_b(2, 0, 4)) == 0


def test_only_the_chunk_whose_backward_is_next_keeps_a_margin():
    order = ChunkOrder()
    first = order.forward_began(0)
    assert order.comes_next(first)
    order.forward_ended(first)
    second = order.forward_began(0)
    assert not order.comes_next(second)
    order.backward_began(first)
    assert order.comes_next(second)


# ---- how many bytes of a chunk leave


def run(policy: OffloadPolicy, groups: list[int], expected: list[int] | None, margin: int = 0) -> list[int]:
    quota = ChunkQuota(policy, expected, margin=margin)
    return [quota.take(nbytes, group=index) for index, nbytes in enumerate(groups)]


@pytest.mark.parametrize(
    ("policy", "groups", "taken"),
    [
        (OffloadPolicy(fraction=0.5), 7, [100, 100, 100, 50, 0, 0, 0]),
        (OffloadPolicy(fraction=0.8), 5, [100, 100, 100, 100, 0]),
        (OffloadPolicy(rank=2, delta_bytes=60), 4, [100, 100, 80, 0]),
    ],
)
def test_the_earliest_bytes_leave(policy: OffloadPolicy, groups: int, taken: list[int]) -> None:
    assert run(policy, [100] * groups, [100] * groups) == taken


@given(st.lists(st.integers(0, 10**9), max_size=20), st.floats(0, 1), st.integers(0, 3), st.integers(0, 3))
def test_the_share_is_exact_to_the_byte_when_the_chunk_is_known(groups, fraction, margin, rank):
    policy = OffloadPolicy(fraction=fraction, rank=rank, delta_bytes=1000)
    taken = run(policy, groups, groups, margin)
    movable = sum(groups[: max(0, len(groups) - margin)])
    assert sum(taken) == max(0, round(fraction * (movable - rank * 1000)))
    assert all(0 <= t <= n for t, n in zip(taken, groups, strict=True))
    assert margin == 0 or not any(taken[len(groups) - margin :])


@given(st.lists(st.integers(1, 10**6), max_size=20), st.floats(0, 1))
def test_an_unknown_chunk_is_never_more_than_one_tensor_off(groups, fraction):
    taken = run(OffloadPolicy(fraction=fraction), groups, None)
    for upto in range(1, len(groups) + 1):
        short = fraction * sum(groups[:upto]) - sum(taken[:upto])
        assert -1 <= short <= max(groups[:upto]) + 1


def test_a_chunk_that_grew_keeps_its_share():
    assert sum(run(OffloadPolicy(fraction=0.5), [100] * 10, [100] * 4)) == 500


@pytest.mark.parametrize(
    "wrong",
    [{"fraction": 1.1}, {"fraction": -0.1}, {"min_bytes": -1}, {"compress": "zip"}, {"max_in_flight": -1},
     {"view_coverage": 0.0}, {"delta_bytes": -5}],
)  # fmt: skip
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OffloadPolicy(**wrong)
