"""Arenas: every tensor has a place of its own, aligned, and groups stay together."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.quantities import PAGE
from rayzero.slabs.arena import Arena, SlabGroup, SlabPiece, plan_arena
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import Slab

FACTS = SlabFacts(run="r", role="state", index=0, number=4, incarnation=1, layout_digest="d", kernel="k")
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


def group(*sizes: int, name: str = "g", align: int = 1, dtype: torch.dtype = torch.float32) -> SlabGroup:
    pieces = tuple(SlabPiece(key=(name, index), numel=numel, dtype=dtype) for index, numel in enumerate(sizes))
    return SlabGroup(pieces=pieces, align=align)


def test_pieces_follow_each_other_at_multiples_of_64_elements() -> None:
    plan = plan_arena([group(1, 64, 65), group(3, name="h", align=PAGE), group(1, name="i", dtype=torch.bfloat16)])
    assert [place.offset for place in plan.places.values()] == [PAGE, PAGE + 256, PAGE + 512, 2 * PAGE, 2 * PAGE + 128]
    assert plan.slabs == (PAGE + 128 + 2,)


def test_a_group_that_does_not_fit_the_rest_of_a_slab_begins_the_next() -> None:
    page = PAGE // 4  # elements
    plan = plan_arena([group(2 * page), group(page, page, name="h"), group(page, name="i")], slab_bytes=4 * PAGE)
    assert [place.slab for place in plan.places.values()] == [0, 1, 1, 1]
    assert plan.slabs == (2 * PAGE, 3 * PAGE)


def test_a_group_larger_than_a_slab_gets_a_larger_one_for_itself() -> None:
    page = PAGE // 4
    plan = plan_arena([group(page, name="a"), group(9 * page, name="b"), group(page, name="c")], slab_bytes=4 * PAGE)
    assert [place.slab for place in plan.places.values()] == [0, 1, 2]
    assert plan.slabs == (PAGE, 9 * PAGE, PAGE)


GROUPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(DTYPES)), max_size=4), st.sampled_from([1, 64, PAGE])
    ),
    max_size=12,
)


@given(GROUPS)
def test_no_plan_overlaps_splits_a_group_or_misses_an_alignment(drawn: list) -> None:
    groups = [
        SlabGroup(pieces=tuple(SlabPiece(key=(g, p), numel=n, dtype=d) for p, (n, d) in enumerate(pieces)), align=align)
        for g, (pieces, align) in enumerate(drawn)
    ]
    plan = plan_arena(groups, slab_bytes=4 * PAGE)
    ends = [PAGE] * len(plan.slabs)
    for group_ in groups:
        places = [plan.places[piece.key] for piece in group_.pieces]
        assert len({place.slab for place in places}) <= 1
        assert all(place.offset % group_.align == 0 for place in places[:1])
        for place in places:
            assert place.offset % (64 * place.dtype.itemsize) == 0
            assert place.offset >= ends[place.slab]
            ends[place.slab] = place.offset + place.numel * place.dtype.itemsize
    assert all(end <= PAGE + size for end, size in zip(ends, plan.slabs, strict=True))


def test_tensors_of_an_arena_are_apart_and_seen_by_who_attaches_to_its_slabs(tmp_path: Path) -> None:
    page = PAGE // 4
    plan = plan_arena([group(page, 3, name="a"), group(2 * page, name="b")], slab_bytes=4 * PAGE)
    arena = Arena.create(plan, FACTS, tmp_path)
    assert [slab.header.facts.number for slab in arena.slabs] == [4, 5]
    for value, key in enumerate(plan.places, 1):
        arena.tensor(key).fill_(value)
    paths = [slab.path for slab in arena.slabs if slab.path]
    other = Arena(plan, [Slab.attach(path, writable=True, run="r", layout_digest="d") for path in paths])
    for value, (key, place) in enumerate(plan.places.items(), 1):
        assert other.tensor(key).tolist() == [float(value)] * place.numel
    kept = other.tensor(("b", 0))
    other.close()
    assert len(list(tmp_path.iterdir())) == 2
    arena.close()
    assert list(tmp_path.iterdir()) == []
    assert float(kept.sum()) == 3.0 * 2 * page
