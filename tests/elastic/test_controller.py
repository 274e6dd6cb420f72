"""Who takes the place of members that die, in any order, also while others are being replaced."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rayzero.elastic.controller import (
    Action,
    Connect,
    Controller,
    Lose,
    Run,
    Start,
    Succeed,
    wait_before_restart,
)
from rayzero.elastic.members import MemberId, MemberKind, Process
from rayzero.elastic.reform import Step
from rayzero.layout.rescale import Rescale
from rayzero.protocol.ownership import Ownership

RANKS, OWNERS, FAILURES = 3, 2, 4
FIRST = ("a0", "a1")


def rank(index: int) -> MemberId:
    return MemberId(MemberKind.RANK, index)


def owner(index: int) -> MemberId:
    return MemberId(MemberKind.OWNER, index)


def controller(max_failures: int = FAILURES, **more: Any) -> Controller:
    return Controller(RANKS, FIRST, max_failures=max_failures, **more)


def test_a_dead_owner_is_succeeded_and_everybody_else_is_told() -> None:
    run = controller()
    assert run.died(owner(1), 0) == [Start(owner(1), 1)]
    others = (rank(0), rank(1), rank(2), owner(0))
    assert run.ready(owner(1), 1, "b1") == [Connect(1, 1, ("a0", "b1"))]
    assert run.connected(1, 1) == [Succeed(1, "b1", others)]


def test_owners_beside_ranks_take_every_step_of_a_change_but_ranks_do_and_keep_their_places_at_the_end() -> None:
    beside = tuple(Process(MemberId(MemberKind.BESIDE, index), 0) for index in range(RANKS))
    run = Controller(RANKS, (*FIRST, "b0", "b1", "b2"), max_failures=FAILURES, beside=RANKS)
    assert run.ownership == Ownership(2)
    assert [action.member for action in run.scale(Rescale.to(3, 2))] == [owner(2)]
    asked = run.ready(owner(2), 0, "a2")
    steps = []
    while steps[-1:] != [Step.CHANGE]:
        (ask,) = asked
        steps.append(ask.step)
        took_part = {Step.LET_STAND: (), Step.CHANGE: ()}.get(ask.step, beside)
        assert ask.processes[len(ask.processes) - len(took_part) :] == took_part
        for process in ask.processes:
            answer = ask.step is Step.PREPARE and process == Process(owner(0), 0)
            asked = run.answered(process, ask.step, answer)
    assert steps == [step for step in Step if step is not Step.START]
    assert run.addresses == ("a0", "a1", "a2", "b0", "b1", "b2")
    (lose, _) = run.died(rank(0), 0)
    assert set(lose.owners) == {*map(owner, range(3)), *(each.member for each in beside)}


def test_owners_are_told_of_a_dead_rank_and_its_new_process_begins_at_once() -> None:
    run = controller()
    assert run.died(rank(2), 0) == [Lose(2, 1, (owner(0), owner(1))), Start(rank(2), 1)]
    assert run.ready(rank(2), 1) == [Run(2, 1, FIRST)]


def test_a_loop_begins_once_every_owner_has_a_process_and_with_its_address() -> None:
    run = controller()
    run.died(owner(0), 0)
    assert run.died(rank(1), 0) == [Lose(1, 1, (owner(1),)), Start(rank(1), 1)]
    assert run.ready(rank(1), 1) == []
    assert run.ready(owner(0), 1, "b0") == [Connect(0, 1, ("b0", "a1"))]
    told = Succeed(0, "b0", (rank(0), rank(2), owner(1)))
    assert run.connected(0, 1) == [told, Run(1, 1, ("b0", "a1"))]


def test_a_successor_that_dies_is_succeeded_and_its_late_answer_is_not_taken() -> None:
    run = controller()
    run.died(owner(0), 0)
    assert run.died(owner(0), 1) == [Start(owner(0), 2)]
    assert run.ready(owner(0), 1, "late") == []
    assert run.died(owner(0), 0) == []
    assert run.ready(owner(0), 2, "c0") == [Connect(0, 2, ("c0", "a1"))]
    assert run.connected(0, 1) == []
    assert run.connected(0, 2) == [Succeed(0, "c0", (rank(0), rank(1), rank(2), owner(1)))]


def test_two_successors_learn_of_each_other() -> None:
    run = controller()
    run.died(owner(0), 0)
    run.died(owner(1), 0)
    assert run.ready(owner(0), 1, "b0") == [Connect(0, 1, ("b0", "a1"))]
    assert run.ready(owner(1), 1, "b1") == [Connect(1, 1, ("b0", "b1"))]
    ranks = rank(0), rank(1), rank(2)
    assert run.connected(1, 1) == [Succeed(1, "b1", (*ranks, owner(0)))]
    assert run.connected(0, 1) == [Succeed(0, "b0", (*ranks, owner(1)))]


def test_a_rank_whose_loop_has_ended_is_not_replaced() -> None:
    run = controller()
    run.ended(0, 0)
    assert run.died(rank(0), 0) == []
    assert run.over is None


def test_why_a_death_is_not_outlived() -> None:
    none = controller(0)
    assert none.died(rank(0), 0) == []
    assert (none.over, none.exhausted) == ("nobody takes its place (max_failures=0)", True)
    one = controller(1)
    one.died(rank(0), 0)
    assert one.over is None
    assert one.died(owner(0), 0) == []
    assert one.over == "it was one failure too many: the run has outlived 1 failure (max_failures=1)"
    bound = controller(bound=frozenset([rank(1)]))
    assert bound.died(rank(1), 0) == []
    assert bound.over == "its part of the optimizer was in its own memory, so nobody can take its place"
    assert (bound.exhausted, bound.outlived) == (False, 1), "the run may start again, which is a failure it outlives"


def test_a_rank_whose_loop_has_ended_is_missed_only_for_what_it_owned() -> None:
    alone, also_owner = controller(), controller(bound=frozenset([rank(1)]))
    for each in (alone, also_owner):
        each.ended(1, 0)
        assert each.died(rank(1), 0) == []
    assert (alone.over, alone.outlived) == (None, 0)
    assert also_owner.over is not None, "others may still fetch what it had"


def test_failures_before_a_restart_count() -> None:
    again = controller(2, outlived=1)
    assert again.died(rank(0), 0) != []
    assert again.died(owner(0), 0) == []
    assert again.exhausted


def test_every_wait_before_a_restart_is_twice_as_long_and_at_most_a_minute() -> None:
    assert [wait_before_restart(restarts) for restarts in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


class AnyOrder(RuleBasedStateMachine):
    """Processes die and answer in any order; what a shell would have is kept beside the controller."""

    def __init__(self) -> None:
        super().__init__()
        self.run = controller()
        self.members = [*map(rank, range(RANKS)), *map(owner, range(OWNERS))]
        self.alive = dict.fromkeys(self.members, 0)  # member -> the life of its process
        self.starting: dict[MemberId, int] = {}
        self.connecting: dict[int, int] = {}  # owner -> its life
        self.knows = {member: dict(enumerate(FIRST)) for member in self.members}  # the owners' addresses
        self.begun = dict.fromkeys(range(RANKS), 0)  # rank -> life of its loop
        self.deaths = 0

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(member, life):
                    assert member not in self.alive
                    assert member not in self.starting
                    self.starting[member] = life
                case Run(index, life, addresses):
                    assert life == self.begun[index] + 1 or life > self.begun[index]
                    assert all(owner(o) in self.alive for o in range(OWNERS)), "its owners have processes"
                    self.begun[index] = life
                    self.knows[rank(index)] = dict(enumerate(addresses))
                case Lose(index, life, owners):
                    assert rank(index) not in self.alive
                    assert set(owners) <= set(self.alive)
                case Connect(index, life, addresses):
                    self.connecting[index] = life
                    self.knows[owner(index)] = dict(enumerate(addresses))
                case Succeed(index, address, others):
                    assert owner(index) not in others
                    for other in others:
                        assert other in self.alive
                        self.knows[other][index] = address

    @precondition(lambda self: self.alive and self.run.over is None)
    @rule(data=st.data())
    def one_dies(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.alive)))
        life = self.alive.pop(member)
        if member.kind is MemberKind.OWNER:
            self.connecting.pop(member.index, None)
        self.deaths += 1
        self.perform(self.run.died(member, life))

    @precondition(lambda self: self.starting and self.run.over is None)
    @rule(data=st.data())
    def a_new_process_dies(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.starting)))
        self.deaths += 1
        self.perform(self.run.died(member, self.starting.pop(member)))

    @precondition(lambda self: self.starting and self.run.over is None)
    @rule(data=st.data())
    def a_new_process_answers(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.starting)))
        life = self.alive[member] = self.starting.pop(member)
        self.perform(self.run.ready(member, life, f"{member} {life}" if member.kind is MemberKind.OWNER else ""))

    @precondition(lambda self: self.connecting and self.run.over is None)
    @rule(data=st.data())
    def a_successor_is_connected(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.connecting)))
        self.perform(self.run.connected(index, self.connecting.pop(index)))

    @rule(data=st.data())
    def old_news_changes_nothing(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.members))
        if self.run.life(member) and self.run.over is None:
            assert self.run.died(member, self.run.life(member) - 1) == []
            assert self.run.ready(member, self.run.life(member) - 1, "old") == []

    @invariant()
    def failures_are_counted(self) -> None:
        assert self.run.outlived == min(self.deaths, FAILURES)
        assert (self.run.over is not None) == (self.deaths > FAILURES)

    @invariant()
    def whoever_runs_knows_where_the_living_owners_are(self) -> None:
        if self.run.over is None and not self.starting and not self.connecting:
            assert self.run.awaited == []
            assert set(self.run.running) == set(self.members)
            assert all(self.begun[i] == self.alive[rank(i)] for i in range(RANKS))
            now = dict(enumerate(self.run.addresses))
            assert all(self.knows[member] == now for member in self.members)
            lives = {index: self.alive[owner(index)] for index in now}
            assert now == {index: f"{owner(index)} {life}" if life else FIRST[index] for index, life in lives.items()}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
