"""The names of a run's members and of the actors that they are in."""

from __future__ import annotations

from rayzero.cluster.run import actor_name, optimizer_name, rank_name
from rayzero.elastic.members import MemberId, MemberKind


def test_an_owner_beside_a_rank_is_in_the_ranks_actor() -> None:
    assert actor_name(MemberId(MemberKind.BESIDE, 3)) == rank_name(3) == actor_name(MemberId(MemberKind.RANK, 3))
    assert actor_name(MemberId(MemberKind.OWNER, 3)) == optimizer_name(3)
