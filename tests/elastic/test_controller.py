"""Who takes the place of members that die, and changes of the owners: step by step, and in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rayzero.elastic.controller import Action, Controller, Run, Start, wait_before_restart
from rayzero.elastic.members import MemberId, MemberKind, Process
from rayzero.elastic.reform import Abandon, Call, Join, Kill, Retire, Step
from rayzero.errors import ConfigError
from rayzero.layout.shard_map import Rescale
from rayzero.protocol.ownership import Ownership

HOLD, SETTLE, PREPARE, LET_STAND, ENTER, CHANGE = list(Step)[1:]
UP, DOWN, ANOTHER = Rescale.to(3, 2), Rescale.to(1, 3), Rescale((None, 1))
TWO = Ownership(2)
SPECS = {0: b"spec"}


def rank(index: int, life: int = 0) -> Process:
    return Process(MemberId(MemberKind.RANK, index), life)


def owner(index: int, life: int = 0) -> Process:
    return Process(MemberId(MemberKind.OWNER, index), life)


RANKS, OWNERS = (rank(0), rank(1)), (owner(0), owner(1))


def controller(owners: int = 2, max_failures: int = 4, **more: Any) -> Controller:
    return Controller(2, [f"a{index}" for index in range(owners)], max_failures=max_failures, **more)


def answer(run: Controller, asked: Call, lead: int = 0) -> list[Action]:
    """All answer, one after the other; what the last answer leads to."""
    actions: list[Action] = []
    for process in asked.processes:
        assert actions == [], "the others have not answered"
        says = {SETTLE: SPECS, PREPARE: process.member.index == lead}.get(asked.method)
        actions = run.answered(process, asked.method, says)
    return actions


def reach(run: Controller, actions: list[Action], step: Step, joins: dict[Process, str]) -> Call:
    """Go on from the first ``actions`` of a change until somebody is asked to ``step``."""
    for process, address in joins.items():
        actions = run.ready(process, address)
    while True:
        (asked,) = actions
        assert isinstance(asked, Call)
        if asked.method is step:
            return asked
        actions = answer(run, asked)


def up_to(step: Step, **more: Any) -> tuple[Controller, Call]:
    """A run of two owners that are to be three, where somebody has just been asked to ``step``."""
    run = controller(**more)
    return run, reach(run, run.scale(UP), step, {owner(2): "b2"})


# ---- deaths without a change


def test_why_a_death_is_not_outlived() -> None:
    none = controller(max_failures=0)
    assert none.died(rank(0)) == []
    assert (none.over, none.exhausted) == ("nobody takes its place (max_failures=0)", True)
    one = controller(max_failures=1)
    one.died(rank(0))
    assert one.over is None
    assert one.died(owner(0)) == []
    assert one.over == "it was one failure too many: the run has outlived 1 failure (max_failures=1)"
    bound = controller(bound=frozenset([rank(1).member]))
    assert bound.died(rank(1)) == []
    assert bound.over == "its part of the optimizer was in its own memory, so nobody can take its place"
    assert (bound.exhausted, bound.outlived) == (False, 1), "the run may start again, which is a failure it outlives"
    again = controller(max_failures=2, outlived=1)
    assert again.died(rank(0)) != []
    assert again.died(owner(0)) == []
    assert again.exhausted, "failures before a restart count"


def test_a_rank_whose_loop_has_ended_is_missed_only_for_what_it_owned() -> None:
    alone, also_owner = controller(), controller(bound=frozenset([rank(1).member]))
    for each in (alone, also_owner):
        each.ended(rank(1))
        assert each.died(rank(1)) == []
    assert (alone.over, alone.outlived) == (None, 0)
    assert also_owner.over is not None, "others may still fetch what it had"


def test_every_wait_before_a_restart_is_twice_as_long_and_at_most_a_minute() -> None:
    assert [wait_before_restart(restarts) for restarts in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_two_successors_learn_of_each_other() -> None:
    run = controller()
    run.died(owner(0))
    run.died(owner(1))
    assert run.ready(owner(0, 1), "b0") == [Call((owner(0, 1),), "connect_peers", (("b0", "a1"),))]
    assert run.ready(owner(1, 1), "b1") == [Call((owner(1, 1),), "connect_peers", (("b0", "b1"),))]
    assert run.connected(owner(1, 1)) == [Call((*RANKS, owner(0, 1)), "succeed", (1, "b1"))]
    assert run.connected(owner(0, 1)) == [Call((*RANKS, owner(1, 1)), "succeed", (0, "b0"))]


# ---- a change, and nobody dies


def test_one_owner_more() -> None:
    run, three = controller(), TWO.then(UP)
    assert run.scale(UP) == [Join(owner(2), three)]
    assert run.changes
    assert run.coming == three
    assert run.ready(owner(2), "b2") == [Call(OWNERS, HOLD)]
    assert run.answered(owner(0), HOLD, {0: 7}) == []
    assert run.answered(owner(1), HOLD, {}) == [Call(OWNERS, SETTLE)]
    assert run.answered(owner(1), SETTLE, {}) == []
    new = (*OWNERS, owner(2))
    assert run.answered(owner(0), SETTLE, SPECS) == [Call(new, PREPARE, (three, SPECS, ("a0", "a1")))]
    assert run.answered(owner(2), PREPARE, False) == []
    assert run.answered(owner(0), PREPARE, False) == []
    assert run.ownership == TWO
    assert run.answered(owner(1), PREPARE, True) == [Call((owner(1),), LET_STAND)]
    assert (run.ownership, run.addresses) == (three, ("a0", "a1", "b2"))
    asked = Call(new, ENTER, (three, ("a0", "a1", "b2")))
    assert run.answered(owner(1), LET_STAND) == [asked]
    assert answer(run, asked) == [Call(RANKS, CHANGE, (("a0", "a1", "b2"), three))]
    assert run.answered(rank(1), CHANGE) == []
    assert run.answered(rank(0), CHANGE) == [Retire(())]
    assert not run.changes
    assert set(run.running) == {process.member for process in (*RANKS, *new)}


def test_another_process_in_an_owners_place() -> None:
    run, then = controller(), TWO.then(ANOTHER)
    new, addresses = (owner(0, 1), owner(1)), ("b0", "a1")
    assert run.scale(ANOTHER) == [Join(owner(0, 1), then)]
    assert run.ready(owner(0, 1), "b0") == [Call(OWNERS, HOLD)]
    assert answer(run, Call(OWNERS, HOLD)) == [Call(OWNERS, SETTLE)]
    assert answer(run, Call(OWNERS, SETTLE)) == [Call(new, PREPARE, (then, SPECS, ("a0", "a1")))]
    assert answer(run, Call(new, PREPARE)) == [Call((owner(0, 1),), LET_STAND)]
    assert run.answered(owner(0, 1), LET_STAND) == [Call((*OWNERS, owner(0, 1)), ENTER, (then, addresses))]
    assert answer(run, Call((*OWNERS, owner(0, 1)), ENTER)) == [Call(RANKS, CHANGE, (addresses, then))]
    assert answer(run, Call(RANKS, CHANGE)) == [Retire((owner(0),))]
    assert run.died(owner(0)) == [], "it was told to end"
    assert run.died(owner(0, 1)) == [Start(owner(0, 2))]


def test_owners_beside_ranks_take_every_step_of_a_change_but_ranks_do_and_keep_their_places_at_the_end() -> None:
    beside = tuple(Process(MemberId(MemberKind.BESIDE, index), 0) for index in range(2))
    run = Controller(2, ("a0", "a1", "b0", "b1"), max_failures=4, beside=2)
    assert run.ownership == TWO
    assert run.scale(UP) == [Join(owner(2), TWO.then(UP))]
    asked, steps = run.ready(owner(2), "a2"), list[Step]()
    while steps[-1:] != [CHANGE]:
        (ask,) = asked
        assert isinstance(ask, Call)
        steps.append(ask.method)
        took_part = () if ask.method in (LET_STAND, CHANGE) else beside
        assert ask.processes[len(ask.processes) - len(took_part) :] == took_part
        asked = answer(run, ask)
    assert steps == [HOLD, SETTLE, PREPARE, LET_STAND, ENTER, CHANGE]
    assert run.addresses == ("a0", "a1", "a2", "b0", "b1")
    (lose, _) = run.died(rank(0))
    assert isinstance(lose, Call)
    assert (set(lose.processes), lose.method) == ({*map(owner, range(3)), *beside}, "lose")


def test_a_run_without_models_or_without_ranks_changes_too() -> None:
    run = controller()
    for index in range(2):
        run.ended(rank(index))
    asked = reach(run, run.scale(UP), PREPARE, {owner(2): "b2"})
    (entering,) = answer(run, asked, lead=-1)
    assert entering == Call((*OWNERS, owner(2)), ENTER, (TWO.then(UP), ("a0", "a1", "b2")))
    assert answer(run, entering) == [Retire(())]


def test_no_process_takes_another_owners_number() -> None:
    with pytest.raises(ConfigError, match="optimizer 1 cannot become optimizer 0"):
        controller().scale(Rescale((1, 0)))


# ---- what is asked for in the meantime


def test_a_change_waits_until_every_member_does_its_work() -> None:
    run = controller()
    run.died(rank(0))
    assert run.scale(UP) == []
    assert run.changes
    assert run.ready(rank(0, 1)) == [Run(rank(0, 1), ("a0", "a1")), Join(owner(2), TWO.then(UP))]
    again = controller()
    again.died(owner(1))
    assert again.scale(UP) == []
    again.ready(owner(1, 1), "c1")
    told = Call((*RANKS, owner(0)), "succeed", (1, "c1"))
    assert again.connected(owner(1, 1)) == [told, Join(owner(2), TWO.then(UP))]


def test_a_change_that_changes_nothing_is_over_at_once() -> None:
    run = controller()
    assert run.scale(Rescale.to(2, 2)) == []
    assert not run.changes


def test_the_change_that_waits_takes_the_place_of_one_that_is_abandoned() -> None:
    run, _ = up_to(HOLD)
    run.scale(Rescale.to(4, 3))
    run.died(owner(2))
    assert run.answered(owner(0), HOLD) == [Call((owner(0),), "abandon")]
    (_, *joins) = run.answered(owner(1), HOLD)
    assert joins == [Join(owner(2, 1), run.coming), Join(owner(3), run.coming)]
    assert run.coming.changes == (Rescale((0, 1, None, None)),)


# ---- deaths before the point of no return


@pytest.mark.parametrize("step", [HOLD, SETTLE, PREPARE])
def test_an_owner_that_dies_before_is_replaced_and_the_change_is_tried_again(step: Step) -> None:
    run, _ = up_to(step)
    abandoned = Abandon((owner(0),), (owner(2),), "optimizer 1 has died")
    assert run.died(owner(1)) == [abandoned, Start(owner(1, 1))]
    assert (run.ownership, run.outlived) == (TWO, 1)
    run.ready(owner(1, 1), "c1")
    (told,) = run.connected(owner(1, 1))
    assert told == Call((*RANKS, owner(0)), "succeed", (1, "c1")), "owner 0 still does what it was asked"
    again = Join(owner(2, 1), TWO.then(UP))
    assert run.answered(owner(0), step) == [Call((owner(0),), "abandon"), again]
    assert run.ready(owner(2, 1), "c2") == [Call((owner(0), owner(1, 1)), HOLD)]


def test_a_rank_that_dies_before_begins_at_once_and_goes_over_with_the_others() -> None:
    """The lead may wait for it: one that has taken over hears every rank before it goes on."""
    run, asked = up_to(HOLD)
    assert run.died(rank(1)) == [Call(OWNERS, "lose", (1, 1)), Start(rank(1, 1))]
    assert run.ready(rank(1, 1)) == [Run(rank(1, 1), ("a0", "a1"))]
    asked = reach(run, [asked], CHANGE, {})
    assert asked.processes == (rank(0), rank(1, 1))


def test_what_is_refused_before_is_given_up_for_good() -> None:
    run, _ = up_to(PREPARE)
    abandoned = Abandon(OWNERS, (owner(2),), "optimizer 1: no memory")
    assert run.refused(owner(1), PREPARE, "no memory") == [abandoned]
    assert not run.changes
    assert run.answered(owner(0), PREPARE, True) == [Call((owner(0),), "abandon")]
    assert run.answered(owner(0), PREPARE, True) == []
    assert (run.ownership, run.outlived, run.over) == (TWO, 0, None)
    nowhere = controller()
    nowhere.scale(UP)
    assert nowhere.refused(owner(2), Step.START, "no place") == [Abandon((), (owner(2),), "optimizer 2: no place")]


# ---- failures that are one too many


def test_a_run_that_outlives_no_more_failures_goes_on_without_a_process_that_was_to_join() -> None:
    run, _ = up_to(HOLD, max_failures=0)
    why = "optimizer 2 has died: nobody takes its place (max_failures=0)"
    assert run.died(owner(2)) == [Abandon(OWNERS, (owner(2),), why)]
    assert not run.changes
    assert (run.over, run.exhausted) == (None, False)


def test_a_death_with_a_cause_that_was_counted_is_not_counted() -> None:
    run, _ = up_to(LET_STAND, max_failures=0)
    assert run.died(owner(2), counted=True) == []
    before, _ = up_to(HOLD, max_failures=0)
    before.died(owner(2), counted=True)
    assert (run.over, run.outlived, before.changes) == (None, 0, True)


# ---- deaths behind the point of no return


def test_the_lead_dies_while_it_lets_the_next_epoch_stand() -> None:
    """Nobody knows whether it has: the next epoch is right in both cases."""
    run, _ = up_to(LET_STAND)
    asked = Call((owner(1), owner(2)), ENTER, (TWO.then(UP), ("a0", "a1", "b2")))
    assert run.died(owner(0)) == [asked]
    assert run.outlived == 1
    assert answer(run, asked) == [Start(owner(0, 1))]
    assert run.ready(owner(0, 1), "c0") == [Call((owner(0, 1),), "connect_peers", (("c0", "a1", "b2"),))]
    told = Call((owner(1), owner(2)), "succeed", (0, "c0"))
    assert run.connected(owner(0, 1)) == [told, Call(RANKS, CHANGE, (("c0", "a1", "b2"), TWO.then(UP)))]
    assert answer(run, Call(RANKS, CHANGE)) == [Retire(())]


@pytest.mark.parametrize("dies", [owner(1), owner(2)], ids=["stays", "joins"])
@pytest.mark.parametrize("step", [LET_STAND, ENTER])
def test_an_owner_that_dies_is_replaced_once_the_others_have_entered_and_before_ranks_go_over(
    step: Step, dies: Process
) -> None:
    run, asked = up_to(step)
    assert run.died(dies) == []
    asked = reach(run, [asked], ENTER, {})
    living = [process for process in (*OWNERS, owner(2)) if process != dies]
    assert run.answered(living[0], ENTER) == []
    assert run.answered(living[1], ENTER) == [Start(Process(dies.member, 1))]
    index = dies.member.index
    addresses = tuple("c" if i == index else address for i, address in enumerate(("a0", "a1", "b2")))
    assert run.ready(Process(dies.member, 1), "c") == [Call((owner(index, 1),), "connect_peers", (addresses,))]
    told = Call(tuple(living), "succeed", (index, "c"))
    assert run.connected(owner(index, 1)) == [told, Call(RANKS, CHANGE, (addresses, TWO.then(UP)))]


def test_a_rank_whose_loop_ends_in_the_change_is_not_waited_for() -> None:
    run, asked = up_to(ENTER, bound=frozenset([rank(0).member]))
    assert run.ended(rank(0)) == []
    assert answer(run, asked) == [Call((rank(1),), CHANGE, (("a0", "a1", "b2"), TWO.then(UP)))]
    assert run.ended(rank(1)) == [Retire(())]
    assert (run.over, run.outlived) == (None, 0)


# ---- in any order

FAILURES = 5


class AnyOrder(RuleBasedStateMachine):
    """Processes die, answer and refuse in any order while changes are asked for. What a shell would have is kept beside
    the controller: its processes, what they were asked, and what they know."""

    def __init__(self) -> None:
        super().__init__()
        self.run = controller(2, FAILURES)
        self.alive: set[Process] = {*RANKS, *OWNERS}
        self.starting: set[Process] = set()
        self.joining: set[Process] = set()  # of starting, and of those alive, until they have entered
        self.connecting: set[Process] = set()
        self.leaving: set[Process] = set()  # were told to end, or have no place any more
        self.asked: list[tuple[Process, Step]] = []
        self.addresses: dict[Process, str] = {process: f"a{process.member.index}" for process in OWNERS}
        first = (dict(enumerate(("a0", "a1"))), TWO)
        self.knows: dict[Process, tuple[dict[int, str], Ownership]] = dict.fromkeys((*RANKS, *OWNERS), first)
        self.after: dict[Process, Any] = {}  # asked to enter or change -> what it will know
        self.prepared: set[Process] = set()
        self.late: set[tuple[Process, Step]] = set()  # of asked: in an attempt that is abandoned
        self.under_way = self.let_stand = False
        self.wanted = 2
        self.waits = False  # something was asked for since the change under way began
        self.deaths = self.not_needed = 0

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(process):
                    assert process.member not in {other.member for other in self.alive - self.leaving}
                    self.starting.add(process)
                case Join(process, ownership):
                    assert ownership == self.run.coming
                    assert process not in self.alive | self.starting | self.leaving
                    self.begin_attempt()
                    self.starting.add(process)
                    self.joining.add(process)
                case Run(process, addresses):
                    self.check_run(addresses)
                    self.knows[process] = (dict(enumerate(addresses)), self.run.ownership)
                case Call(owners, "lose", (index, life)):
                    assert rank(index, life - 1) not in self.alive
                    serving = self.alive - self.connecting - self.present_ranks()
                    assert set(owners) == {process for process in serving if self.has_place(process)}
                case Call((process,), "connect_peers", (addresses,)):
                    self.connecting.add(process)
                    self.knows[process] = (dict(enumerate(addresses)), self.run.ownership)
                case Call(others, "succeed", (index, address)):
                    for process in others:
                        assert process in self.alive
                        assert self.present(process.member) == process
                        self.knows[process][0][index] = address
                        if process in self.after:  # it waits for that successor
                            self.after[process][0][index] = address
                case Call((process,), "abandon"):
                    assert process in self.alive
                case Call(processes, Step() as step, arguments):
                    self.ask(step, processes, arguments)
                case Abandon(owners, joined, why):
                    assert set(owners) <= self.alive
                    assert why
                    assert not self.let_stand
                    self.under_way, self.late = False, set(self.asked)
                    for process in joined:
                        self.starting.discard(process)
                        self.joining.discard(process)
                        self.leaving |= {process} & self.alive
                case Kill(process):
                    self.die(process)
                case Retire(processes):
                    assert not {asked for asked in self.asked if asked[0] in self.present_ranks()}
                    self.leaving |= set(processes) & self.alive
                    self.under_way = self.let_stand = False

    def begin_attempt(self) -> None:
        if not self.under_way:
            assert not {process for process, _ in self.asked} - self.leaving, "nothing is left of another attempt"
            self.under_way, self.waits, self.prepared = True, False, set()

    def ask(self, step: Step, processes: tuple[Process, ...], arguments: tuple[Any, ...]) -> None:
        assert processes
        assert set(processes) <= self.alive, "a process that is asked is alive"
        assert not set(self.asked) & {(process, step) for process in processes}, "nobody is asked twice"
        if step is HOLD:
            self.begin_attempt()
        elif step is LET_STAND:
            self.let_stand = True
            self.leaving |= {process for process in self.alive if not self.has_place(process)}
            assert self.prepared == {self.present(owner(i).member) for i in range(self.run.ownership.num_owners)}
        elif step is ENTER:
            assert self.let_stand
            assert not any(asked is LET_STAND for _, asked in self.asked)
        elif step is CHANGE:
            assert not any(asked is ENTER for _, asked in self.asked)
            assert all(self.present(owner(i).member) in self.alive for i in range(self.run.ownership.num_owners))
            assert not self.connecting
        if step in (ENTER, CHANGE):
            addresses, ownership = (arguments[1], arguments[0]) if step is ENTER else arguments
            self.after |= {process: (dict(enumerate(addresses)), ownership) for process in processes}
        self.asked += [(process, step) for process in processes]

    def check_run(self, addresses: tuple[str, ...]) -> None:
        assert addresses == self.run.addresses
        assert not [asked for asked in self.asked if asked[1] in (ENTER, CHANGE)], "no change is under way"
        owners = [self.present(owner(i).member) for i in range(self.run.ownership.num_owners)]
        assert all(process in self.alive and process not in self.connecting for process in owners)

    def present(self, member: MemberId) -> Process:
        return Process(member, self.run.life(member))

    def present_ranks(self) -> set[Process]:
        return {self.present(process.member) for process in RANKS} & self.alive

    def has_place(self, process: Process) -> bool:
        if process.member.kind is MemberKind.RANK:
            return True
        return process.member.index < len(self.run.addresses) and self.present(process.member) == process

    def die(self, process: Process) -> None:
        joins = process in self.joining and not self.let_stand
        if joins:
            self.not_needed += self.run.outlived == FAILURES
        if joins or self.has_place(process):
            self.deaths += 1
        for where in (self.alive, self.starting, self.connecting, self.leaving, self.joining):
            where.discard(process)
        self.asked = [(other, step) for other, step in self.asked if other != process]
        self.after.pop(process, None)
        if joins and self.run.outlived == FAILURES:
            self.given_up()
        self.perform(self.run.died(process))

    def given_up(self) -> None:
        """The change under way is given up, but not what was asked for since it began."""
        if not self.waits:
            self.wanted = self.run.ownership.num_owners

    # ---- what may happen

    @precondition(lambda self: self.run.over is None)
    @rule(data=st.data(), num=st.integers(1, 4), other=st.sets(st.integers(0, 3), max_size=1))
    def asked_to_change(self, data: st.DataObject, num: int, other: set[int]) -> None:
        there = self.run.coming.num_owners
        self.wanted = num
        former = tuple(i if i < there and i not in other else None for i in range(num))
        change = Rescale(former)
        self.waits = self.under_way and former != tuple(range(there))
        self.perform(self.run.scale(change if former != tuple(range(there)) else None))

    @precondition(lambda self: self.run.over is None and (self.alive or self.starting))
    @rule(data=st.data())
    def one_dies(self, data: st.DataObject) -> None:
        self.die(data.draw(st.sampled_from(sorted(self.alive | self.starting))))

    @precondition(lambda self: self.run.over is None and self.starting)
    @rule(data=st.data())
    def a_new_process_answers(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(sorted(self.starting)))
        self.starting.discard(process)
        self.alive.add(process)
        self.addresses[process] = f"{process} {process.life}"
        self.perform(self.run.ready(process, self.addresses[process]))

    @precondition(lambda self: self.run.over is None and self.connecting)
    @rule(data=st.data())
    def a_successor_is_connected(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(sorted(self.connecting)))
        self.connecting.discard(process)
        self.perform(self.run.connected(process))

    @precondition(lambda self: self.run.over is None and self.asked)
    @rule(data=st.data())
    def one_answers(self, data: st.DataObject) -> None:
        self.answers(*data.draw(st.sampled_from(self.asked)))

    @precondition(lambda self: self.run.over is None and self.asked)
    @rule()
    def all_answer(self) -> None:
        for process, step in list(self.asked):
            if (process, step) in self.asked:
                self.answers(process, step)

    def answers(self, process: Process, step: Step) -> None:
        self.asked.remove((process, step))
        if step is PREPARE and (process, step) not in self.late:
            self.prepared.add(process)
        self.late.discard((process, step))
        if step in (ENTER, CHANGE):
            self.knows[process] = self.after.pop(process)
            self.joining.discard(process)
        says = {SETTLE: SPECS, PREPARE: process.member.index != 1}.get(step)  # two models, say
        self.perform(self.run.answered(process, step, says))

    @precondition(lambda self: self.run.over is None and self.asked)
    @rule(data=st.data())
    def one_refuses(self, data: st.DataObject) -> None:
        process, step = asked = data.draw(st.sampled_from(self.asked))
        if self.under_way and asked not in self.late and not self.let_stand:
            self.given_up()
        self.asked.remove(asked)
        self.late.discard(asked)
        self.perform(self.run.refused(process, step, "no"))

    @rule(process=st.sampled_from([rank(0), rank(1), *map(owner, range(4))]), step=st.sampled_from(list(Step)))
    def news_of_others_changes_nothing(self, process: Process, step: Step) -> None:
        if self.run.over is None and process not in self.alive | self.starting | self.leaving:
            assert self.run.died(process) == self.run.ready(process, "old") == []
            assert self.run.answered(process, step) == self.run.refused(process, step, "old") == []

    # ---- what holds

    @invariant()
    def failures_are_counted_once(self) -> None:
        needed = self.deaths - self.not_needed
        assert self.run.outlived == min(needed, FAILURES)
        assert (self.run.over is not None) == (needed > FAILURES)

    @invariant()
    def something_can_happen_or_all_is_well(self) -> None:
        if self.run.over is not None or self.starting or self.connecting or self.asked:
            return
        assert not self.run.changes
        assert self.run.awaited == []
        assert self.run.ownership.num_owners == len(self.run.addresses) == self.wanted
        owners = [self.present(owner(i).member) for i in range(self.wanted)]
        ranks = [self.present(process.member) for process in RANKS]
        assert set(self.run.running) == {process.member for process in (*ranks, *owners)}
        assert self.alive - self.leaving == {*ranks, *owners}
        assert not self.leaving & {*ranks, *owners}
        assert self.run.addresses == tuple(self.addresses[process] for process in owners)
        now = dict(enumerate(self.run.addresses)), self.run.ownership
        assert all(self.knows[process] == now for process in ranks)
        assert all(self.knows[process] == now for process in owners)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=40)
