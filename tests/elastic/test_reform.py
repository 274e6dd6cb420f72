"""Changes of the owners: step by step, with deaths at each step, and in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rayzero.elastic.controller import Action, Connect, Controller, Lose, Run, Start, Succeed
from rayzero.elastic.members import MemberId, MemberKind, Process
from rayzero.elastic.reform import Abandon, Ask, Join, Kill, Reform, Release, Retire, Step
from rayzero.errors import ConfigError
from rayzero.layout.rescale import Rescale
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


def died(run: Controller, process: Process, **more: Any) -> list[Action]:
    return run.died(process.member, process.life, **more)


def serves(run: Controller, process: Process, address: str = "") -> list[Action]:
    return run.ready(process.member, process.life, address)


def answer(run: Controller, asked: Ask, lead: int = 0) -> list[Action]:
    """All answer, one after the other; what the last answer leads to."""
    actions: list[Action] = []
    for process in asked.processes:
        assert actions == [], "the others have not answered"
        says = {SETTLE: SPECS, PREPARE: process.member.index == lead}.get(asked.step)
        actions = run.answered(process, asked.step, says)
    return actions


def answer_late(run: Controller, asked: Ask) -> list[Action]:
    """All answer what they were asked in an attempt that is abandoned; what that leads to."""
    actions: list[Action] = []
    for process in asked.processes:
        assert actions == [], "the others have not answered"
        release, *actions = run.answered(process, asked.step)
        assert release == Release(process)
    return actions


def reach(run: Controller, actions: list[Action], step: Step, joins: dict[Process, str]) -> Ask:
    """Go on from the first ``actions`` of a change until somebody is asked to ``step``."""
    for process, address in joins.items():
        actions = serves(run, process, address)
    while True:
        (asked,) = actions
        assert isinstance(asked, Ask)
        if asked.step is step:
            return asked
        actions = answer(run, asked)


def up_to(step: Step, **more: Any) -> tuple[Controller, Ask]:
    """A run of two owners that are to be three, where somebody has just been asked to ``step``."""
    run = controller(**more)
    return run, reach(run, run.scale(UP), step, {owner(2): "b2"})


# ---- nobody dies


def test_one_owner_more() -> None:
    run, three = controller(), TWO.then(UP)
    assert run.scale(UP) == [Join(owner(2).member, 0, three)]
    assert run.changes
    assert run.coming == three
    assert serves(run, owner(2), "b2") == [Ask(HOLD, OWNERS)]
    assert run.answered(owner(0), HOLD, {0: 7}) == []
    assert run.answered(owner(1), HOLD, {}) == [Ask(SETTLE, OWNERS)]
    assert run.answered(owner(1), SETTLE, {}) == []
    new = (*OWNERS, owner(2))
    assert run.answered(owner(0), SETTLE, SPECS) == [Ask(PREPARE, new, (three, SPECS, ("a0", "a1")))]
    assert run.answered(owner(2), PREPARE, False) == []
    assert run.answered(owner(0), PREPARE, False) == []
    assert run.ownership == TWO
    assert run.answered(owner(1), PREPARE, True) == [Ask(LET_STAND, (owner(1),))]
    assert (run.ownership, run.addresses) == (three, ("a0", "a1", "b2"))
    asked = Ask(ENTER, new, (three, ("a0", "a1", "b2")))
    assert run.answered(owner(1), LET_STAND) == [asked]
    assert answer(run, asked) == [Ask(CHANGE, RANKS, (("a0", "a1", "b2"), three))]
    assert run.answered(rank(1), CHANGE) == []
    assert run.answered(rank(0), CHANGE) == [Retire(())]
    assert not run.changes
    assert set(run.running) == {process.member for process in (*RANKS, *new)}


def test_two_owners_less() -> None:
    run, one = controller(3), Ownership(3).then(DOWN)
    old = (*OWNERS, owner(2))
    assert run.scale(DOWN) == [Ask(HOLD, old)]
    assert answer(run, Ask(HOLD, old)) == [Ask(SETTLE, old)]
    assert answer(run, Ask(SETTLE, old)) == [Ask(PREPARE, (owner(0),), (one, SPECS, ("a0", "a1", "a2")))]
    assert run.answered(owner(0), PREPARE, True) == [Ask(LET_STAND, (owner(0),))]
    assert run.answered(owner(0), LET_STAND) == [Ask(ENTER, old, (one, ("a0",)))]
    assert answer(run, Ask(ENTER, old)) == [Ask(CHANGE, RANKS, (("a0",), one))]
    assert answer(run, Ask(CHANGE, RANKS)) == [Retire((owner(1), owner(2)))]
    assert died(run, owner(1)) == died(run, owner(2)) == [], "they were told to end"
    assert run.outlived == 0
    assert run.addresses == ("a0",)


def test_an_owner_that_comes_again_is_in_another_life() -> None:
    run = controller(3)
    answer(run, reach(run, run.scale(DOWN), CHANGE, {}))
    join, *_ = run.scale(Rescale.to(2, 1))
    assert join == Join(owner(1).member, 1, Ownership(3).then(DOWN).then(Rescale.to(2, 1)))
    assert serves(run, owner(1), "late") == died(run, owner(1)) == []
    assert serves(run, owner(1, 1), "b1") == [Ask(HOLD, (owner(0),))]


def test_another_process_in_an_owners_place() -> None:
    run, then = controller(), TWO.then(ANOTHER)
    new, addresses = (owner(0, 1), owner(1)), ("b0", "a1")
    assert run.scale(ANOTHER) == [Join(owner(0).member, 1, then)]
    assert serves(run, owner(0, 1), "b0") == [Ask(HOLD, OWNERS)]
    assert answer(run, Ask(HOLD, OWNERS)) == [Ask(SETTLE, OWNERS)]
    assert answer(run, Ask(SETTLE, OWNERS)) == [Ask(PREPARE, new, (then, SPECS, ("a0", "a1")))]
    assert answer(run, Ask(PREPARE, new)) == [Ask(LET_STAND, (owner(0, 1),))]
    assert run.answered(owner(0, 1), LET_STAND) == [Ask(ENTER, (*OWNERS, owner(0, 1)), (then, addresses))]
    assert answer(run, Ask(ENTER, (*OWNERS, owner(0, 1)))) == [Ask(CHANGE, RANKS, (addresses, then))]
    assert answer(run, Ask(CHANGE, RANKS)) == [Retire((owner(0),))]
    assert died(run, owner(0)) == [], "it was told to end"
    assert died(run, owner(0, 1)) == [Start(owner(0).member, 2)]


def test_a_run_without_models_or_without_ranks_changes_too() -> None:
    run = controller()
    for index in range(2):
        run.ended(index, 0)
    asked = reach(run, run.scale(UP), PREPARE, {owner(2): "b2"})
    (entering,) = answer(run, asked, lead=-1)
    assert entering == Ask(ENTER, (*OWNERS, owner(2)), (TWO.then(UP), ("a0", "a1", "b2")))
    assert answer(run, entering) == [Retire(())]


def test_no_process_takes_another_owners_number() -> None:
    with pytest.raises(ConfigError, match="optimizer 1 cannot become optimizer 0"):
        controller().scale(Rescale((1, 0)))


# ---- what is asked for in the meantime


def test_a_change_waits_until_every_member_does_its_work() -> None:
    run = controller()
    died(run, rank(0))
    assert run.scale(UP) == []
    assert run.changes
    assert serves(run, rank(0, 1)) == [Run(0, 1, ("a0", "a1")), Join(owner(2).member, 0, TWO.then(UP))]
    again = controller()
    died(again, owner(1))
    assert again.scale(UP) == []
    serves(again, owner(1, 1), "c1")
    told = Succeed(1, "c1", (*(process.member for process in RANKS), owner(0).member))
    assert again.connected(1, 1) == [told, Join(owner(2).member, 0, TWO.then(UP))]


def test_of_two_changes_that_wait_the_last_one_wins_and_it_may_be_none() -> None:
    run = controller()
    died(run, rank(0))
    run.scale(UP)
    run.scale(Rescale.to(1, 2))
    assert serves(run, rank(0, 1))[1:] == [Ask(HOLD, OWNERS)]
    none = controller()
    died(none, rank(0))
    none.scale(UP)
    none.scale(None)
    assert not none.changes
    assert serves(none, rank(0, 1)) == [Run(0, 1, ("a0", "a1"))]


def test_a_change_that_changes_nothing_is_over_at_once() -> None:
    run = controller()
    assert run.scale(Rescale.to(2, 2)) == []
    assert not run.changes


@pytest.mark.parametrize("step", [HOLD, PREPARE, LET_STAND, CHANGE])
def test_a_change_that_is_asked_for_during_one_comes_after_it(step: Step) -> None:
    run, asked = up_to(step)
    assert run.coming.num_owners == 3
    assert run.scale(DOWN) == []
    asked = reach(run, [asked], CHANGE, {})
    assert answer(run, asked) == [Retire(()), Ask(HOLD, (*OWNERS, owner(2)))]
    assert run.coming.num_owners == 1


def test_taking_back_leaves_alone_what_is_under_way() -> None:
    run, asked = up_to(HOLD)
    run.scale(DOWN)
    assert run.scale(None) == []
    assert answer(run, reach(run, [asked], CHANGE, {})) == [Retire(())]
    assert run.ownership.num_owners == 3


def test_the_change_that_waits_takes_the_place_of_one_that_is_abandoned() -> None:
    run, asked = up_to(HOLD)
    run.scale(Rescale.to(4, 3))
    died(run, owner(2))
    assert answer_late(run, asked) == [Join(owner(2).member, 1, run.coming), Join(owner(3).member, 0, run.coming)]
    assert run.coming.changes == (Rescale((0, 1, None, None)),)


def test_the_change_that_waits_may_have_nothing_to_do_once_the_other_one_is_abandoned() -> None:
    run, asked = up_to(HOLD)
    run.scale(Rescale.to(2, 3))
    died(run, owner(2))
    assert answer_late(run, asked) == []
    assert not run.changes


# ---- deaths before the point of no return


@pytest.mark.parametrize("step", [HOLD, SETTLE, PREPARE])
def test_an_owner_that_dies_before_is_replaced_and_the_change_is_tried_again(step: Step) -> None:
    run, _ = up_to(step)
    abandoned = Abandon((owner(0),), (owner(2),), "optimizer 1 has died")
    assert died(run, owner(1)) == [abandoned, Start(owner(1).member, 1)]
    assert (run.ownership, run.outlived) == (TWO, 1)
    serves(run, owner(1, 1), "c1")
    assert [type(action) for action in run.connected(1, 1)] == [Succeed], "owner 0 still does what it was asked"
    again = Join(owner(2).member, 1, TWO.then(UP))
    assert run.answered(owner(0), step) == [Release(owner(0)), again]
    assert serves(run, owner(2, 1), "c2") == [Ask(HOLD, (owner(0), owner(1, 1)))]


def test_an_owner_that_dies_while_new_processes_start() -> None:
    run = controller()
    run.scale(UP)
    abandoned = Abandon((), (owner(2),), "optimizer 0 has died")
    assert died(run, owner(0)) == [abandoned, Start(owner(0).member, 1)], "nobody was asked anything"
    assert serves(run, owner(2), "late") == []


def test_an_owner_that_is_to_leave_dies_before() -> None:
    run = controller(3)
    run.scale(DOWN)
    abandoned = Abandon((owner(0), owner(1)), (), "optimizer 2 has died")
    assert died(run, owner(2)) == [abandoned, Start(owner(2).member, 1)]


@pytest.mark.parametrize("step", [Step.START, HOLD, PREPARE])
def test_a_process_that_is_to_join_dies_and_another_one_is_started(step: Step) -> None:
    run = controller()
    actions = run.scale(UP)
    asked = reach(run, actions, step, {owner(2): "b2"}) if step is not Step.START else Ask(step, ())
    told = OWNERS if step is not Step.START else ()
    join = Join(owner(2).member, 1, TWO.then(UP))
    abandoned = Abandon(told, (owner(2),), "optimizer 2 has died")
    late = [process for process in asked.processes if process in OWNERS]
    assert died(run, owner(2)) == [abandoned, *([] if late else [join])]
    for process in late:
        assert run.answered(process, step) == [Release(process), *([join] if process is late[-1] else [])]
    assert run.outlived == 1
    assert run.life(owner(0).member) == 0
    assert run.answered(owner(2), step) == serves(run, owner(2), "late") == died(run, owner(2)) == []


def test_a_rank_that_dies_before_begins_at_once_and_goes_over_with_the_others() -> None:
    """The lead may wait for it: one that has taken over hears every rank before it goes on."""
    run, asked = up_to(HOLD)
    assert died(run, rank(1)) == [Lose(1, 1, (owner(0).member, owner(1).member)), Start(rank(1).member, 1)]
    assert serves(run, rank(1, 1)) == [Run(1, 1, ("a0", "a1"))]
    asked = reach(run, [asked], CHANGE, {})
    assert asked.processes == (rank(0), rank(1, 1))


def test_a_rank_that_is_there_behind_the_point_of_no_return_begins_when_the_change_is_over() -> None:
    run, asked = up_to(SETTLE)
    died(run, rank(1))
    asked = reach(run, [asked], LET_STAND, {})
    assert serves(run, rank(1, 1)) == []
    asked = reach(run, [asked], CHANGE, {})
    assert asked.processes == (rank(0),)
    assert run.answered(rank(0), CHANGE) == [Retire(()), Run(1, 1, ("a0", "a1", "b2"))]


def test_a_rank_does_not_begin_while_an_owner_is_not_there() -> None:
    run, _ = up_to(SETTLE)
    died(run, rank(1))
    assert [type(action) for action in died(run, owner(0))] == [Abandon, Start]
    assert serves(run, rank(1, 1)) == []


def test_what_is_refused_before_is_given_up_for_good() -> None:
    run, _ = up_to(PREPARE)
    abandoned = Abandon(OWNERS, (owner(2),), "optimizer 1: no memory")
    assert run.refused(owner(1), PREPARE, "no memory") == [abandoned]
    assert not run.changes
    assert run.answered(owner(0), PREPARE, True) == [Release(owner(0))]
    assert run.answered(owner(0), PREPARE, True) == []
    assert (run.ownership, run.outlived, run.over) == (TWO, 0, None)
    nowhere = controller()
    nowhere.scale(UP)
    assert nowhere.refused(owner(2), Step.START, "no place") == [Abandon((), (owner(2),), "optimizer 2: no place")]


def test_what_is_refused_does_not_take_the_next_change_with_it() -> None:
    run, _ = up_to(PREPARE)
    run.scale(Rescale.to(1, 3))
    run.refused(owner(1), PREPARE, "no memory")
    assert run.answered(owner(0), PREPARE, True) == [Release(owner(0)), Ask(HOLD, OWNERS)]


def test_late_refusals_are_not_taken_for_those_of_the_next_attempt() -> None:
    run, _ = up_to(HOLD)
    died(run, owner(2))
    assert run.refused(owner(0), HOLD, "the optimizers stay as they are") == [Release(owner(0))]
    (_, join) = run.answered(owner(1), HOLD)
    assert join == Join(owner(2).member, 1, TWO.then(UP))
    assert serves(run, owner(2, 1), "c2") == [Ask(HOLD, OWNERS)]
    assert run.refused(owner(2), HOLD, "late") == []


def test_whoever_dies_answers_late_no_more() -> None:
    run, _ = up_to(HOLD)
    run.answered(owner(0), HOLD)
    died(run, owner(2))
    assert died(run, owner(1)) == [Start(owner(1).member, 1)]
    serves(run, owner(1, 1), "c1")
    assert run.connected(1, 1)[1:] == [Join(owner(2).member, 1, TWO.then(UP))]


# ---- failures that are one too many


def test_a_run_that_outlives_no_more_failures_goes_on_without_a_process_that_was_to_join() -> None:
    run, _ = up_to(HOLD, max_failures=0)
    why = "optimizer 2 has died: nobody takes its place (max_failures=0)"
    assert died(run, owner(2)) == [Abandon(OWNERS, (owner(2),), why)]
    assert not run.changes
    assert (run.over, run.exhausted) == (None, False)


def test_failures_are_used_up_in_the_middle() -> None:
    run, _ = up_to(HOLD, max_failures=1)
    died(run, owner(2))
    assert answer_late(run, Ask(HOLD, OWNERS)) == [Join(owner(2).member, 1, TWO.then(UP))]
    serves(run, owner(2, 1), "c2")
    assert died(run, owner(0)) == []
    assert run.exhausted
    assert run.over == "it was one failure too many: the run has outlived 1 failure (max_failures=1)"


@pytest.mark.parametrize("process", [owner(0), owner(2), rank(1)])
@pytest.mark.parametrize("step", [LET_STAND, ENTER, CHANGE])
def test_a_run_is_over_at_once_behind_the_point_of_no_return(step: Step, process: Process) -> None:
    run, _ = up_to(step, max_failures=0)
    died(run, process)
    assert run.over == "nobody takes its place (max_failures=0)"


def test_a_death_with_a_cause_that_was_counted_is_not_counted() -> None:
    run, _ = up_to(LET_STAND, max_failures=0)
    assert died(run, owner(2), counted=True) == []
    before, _ = up_to(HOLD, max_failures=0)
    died(before, owner(2), counted=True)
    assert (run.over, run.outlived, before.changes) == (None, 0, True)


# ---- deaths behind the point of no return


def test_the_lead_dies_while_it_lets_the_next_epoch_stand() -> None:
    """Nobody knows whether it has: the next epoch is right in both cases."""
    run, _ = up_to(LET_STAND)
    asked = Ask(ENTER, (owner(1), owner(2)), (TWO.then(UP), ("a0", "a1", "b2")))
    assert died(run, owner(0)) == [asked]
    assert run.outlived == 1
    assert answer(run, asked) == [Start(owner(0).member, 1)]
    assert serves(run, owner(0, 1), "c0") == [Connect(0, 1, ("c0", "a1", "b2"))]
    told = Succeed(0, "c0", (owner(1).member, owner(2).member))
    assert run.connected(0, 1) == [told, Ask(CHANGE, RANKS, (("c0", "a1", "b2"), TWO.then(UP)))]
    assert answer(run, Ask(CHANGE, RANKS)) == [Retire(())]


@pytest.mark.parametrize("dies", [owner(1), owner(2)], ids=["stays", "joins"])
@pytest.mark.parametrize("step", [LET_STAND, ENTER])
def test_an_owner_that_dies_is_replaced_once_the_others_have_entered_and_before_ranks_go_over(
    step: Step, dies: Process
) -> None:
    run, asked = up_to(step)
    assert died(run, dies) == []
    asked = reach(run, [asked], ENTER, {})
    living = [process for process in (*OWNERS, owner(2)) if process != dies]
    assert run.answered(living[0], ENTER) == []
    assert run.answered(living[1], ENTER) == [Start(dies.member, 1)]
    index = dies.member.index
    addresses = tuple("c" if i == index else address for i, address in enumerate(("a0", "a1", "b2")))
    assert serves(run, Process(dies.member, 1), "c") == [Connect(index, 1, addresses)]
    told = Succeed(index, "c", tuple(process.member for process in living))
    assert run.connected(index, 1) == [told, Ask(CHANGE, RANKS, (addresses, TWO.then(UP)))]


def test_an_owner_that_leaves_may_die() -> None:
    run = controller(3, max_failures=0)
    reach(run, run.scale(DOWN), ENTER, {})
    run.answered(owner(0), ENTER)
    assert died(run, owner(1)) == []
    assert died(run, owner(2)) == [Ask(CHANGE, RANKS, (("a0",), Ownership(3).then(DOWN)))]
    assert answer(run, Ask(CHANGE, RANKS)) == [Retire((owner(1), owner(2)))]
    assert run.over is None


def test_the_former_process_in_an_owners_place_may_die() -> None:
    run = controller(max_failures=0)
    reach(run, run.scale(ANOTHER), ENTER, {owner(0, 1): "b0"})
    run.answered(owner(1), ENTER)
    assert died(run, owner(0)) == []
    (asked,) = run.answered(owner(0, 1), ENTER)
    assert isinstance(asked, Ask)
    assert (asked.step, run.over) == (CHANGE, None)


def test_an_owner_that_dies_while_ranks_go_over_is_replaced_at_once_for_they_wait_for_it() -> None:
    run, _ = up_to(CHANGE)
    run.answered(rank(0), CHANGE)
    assert died(run, owner(2)) == [Start(owner(2).member, 1)]
    serves(run, owner(2, 1), "c2")
    others = (*(process.member for process in RANKS), owner(0).member, owner(1).member)
    assert run.connected(2, 1) == [Succeed(2, "c2", others)]
    assert run.answered(rank(1), CHANGE) == [Retire(())]


def test_a_rank_that_dies_while_owners_enter_is_started_when_they_have() -> None:
    run, asked = up_to(ENTER)
    assert died(run, rank(0)) == []
    owners = tuple(process.member for process in asked.processes)
    lose, start, going = answer(run, asked)
    assert (lose, start) == (Lose(0, 1, owners), Start(rank(0).member, 1))
    assert going == Ask(CHANGE, (rank(1),), (("a0", "a1", "b2"), TWO.then(UP)))
    assert serves(run, rank(0, 1)) == []
    assert run.answered(rank(1), CHANGE) == [Retire(()), Run(0, 1, ("a0", "a1", "b2"))]


def test_a_rank_that_dies_while_it_goes_over_is_not_waited_for() -> None:
    run, _ = up_to(CHANGE)
    run.answered(rank(1), CHANGE)
    actions = died(run, rank(0))
    assert [type(action) for action in actions] == [Lose, Start, Retire]
    assert serves(run, rank(0, 1)) == [Run(0, 1, ("a0", "a1", "b2"))]


def test_a_rank_whose_loop_ends_in_the_change_is_not_waited_for() -> None:
    run, asked = up_to(ENTER, bound=frozenset([rank(0).member]))
    assert run.ended(0, 0) == []
    assert answer(run, asked) == [Ask(CHANGE, (rank(1),), (("a0", "a1", "b2"), TWO.then(UP)))]
    assert run.ended(1, 0) == [Retire(())]
    assert (run.over, run.outlived) == (None, 0)


def test_old_news_is_no_answer() -> None:
    run = controller()
    died(run, owner(0))
    serves(run, owner(0, 1), "b0")
    run.connected(0, 1)
    run.scale(UP)
    asked = reach(run, serves(run, owner(2), "b2"), ENTER, {})
    assert owner(0, 1) in asked.processes
    run.answered(owner(1), ENTER)
    run.answered(owner(2), ENTER)
    assert died(run, owner(0)) == run.answered(owner(0), ENTER) == []
    assert run.answered(owner(0, 1), HOLD) == []
    assert [type(action) for action in run.answered(owner(0, 1), ENTER)] == [Ask]


def test_whoever_cannot_go_on_into_the_next_epoch_is_killed() -> None:
    run, _ = up_to(ENTER)
    assert run.refused(owner(1), ENTER, "broken") == [Kill(owner(1), "broken")]
    assert died(run, owner(1)) == []
    run.answered(owner(0), ENTER)
    assert run.answered(owner(2), ENTER) == [Start(owner(1).member, 1)]
    going, _ = up_to(CHANGE)
    assert going.refused(rank(1), CHANGE, "broken") == [Kill(rank(1), "broken")]


def test_a_change_knows_who_leaves() -> None:
    change = Reform(TWO, ANOTHER, OWNERS, ("a0", "a1"), (owner(0, 1),))
    assert change.parting == (owner(0),)
    assert change.new == (owner(0, 1), owner(1))


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
                case Start(member, life):
                    assert member not in {process.member for process in self.alive - self.leaving}
                    self.starting.add(Process(member, life))
                case Join(member, life, ownership):
                    process = Process(member, life)
                    assert ownership == self.run.coming
                    assert process not in self.alive | self.starting | self.leaving
                    self.begin_attempt()
                    self.starting.add(process)
                    self.joining.add(process)
                case Run(index, life, addresses):
                    self.check_run(addresses)
                    self.knows[rank(index, life)] = (dict(enumerate(addresses)), self.run.ownership)
                case Lose(index, life, owners):
                    assert rank(index, life - 1) not in self.alive
                    assert all(self.present(member) in self.alive for member in owners)
                case Connect(index, life, addresses):
                    self.connecting.add(owner(index, life))
                    self.knows[owner(index, life)] = (dict(enumerate(addresses)), self.run.ownership)
                case Succeed(index, address, others):
                    for member in others:
                        process = self.present(member)
                        assert process in self.alive
                        self.knows[process][0][index] = address
                        if process in self.after:  # it waits for that successor
                            self.after[process][0][index] = address
                case Ask(step, processes, arguments):
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
                case Release(process):
                    assert process in self.alive
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
        assert set(processes) <= self.alive, "whoever is asked can answer"
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
        self.perform(self.run.died(process.member, process.life))

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
        self.perform(self.run.ready(process.member, process.life, self.addresses[process]))

    @precondition(lambda self: self.run.over is None and self.connecting)
    @rule(data=st.data())
    def a_successor_is_connected(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(sorted(self.connecting)))
        self.connecting.discard(process)
        self.perform(self.run.connected(process.member.index, process.life))

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
            assert died(self.run, process) == serves(self.run, process, "old") == []
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
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
