"""Ranks as threads of this process."""

from __future__ import annotations

import logging
import threading

from rayzero.elastic.controller import Controller, Lose
from rayzero.elastic.members import MemberId, MemberKind
from rayzero.engine.context import RankContext, running_in
from rayzero.testing.owners import OwnersHere
from rayzero.testing.place import Ending, Killed, Loop, RankPlace, RankResult, T, outcome_of, results_of

log = logging.getLogger(__name__)


def run_threads(fn: Loop[T], places: list[RankPlace], owners: OwnersHere, max_failures: int) -> list[T]:
    """Run the loop on every rank; the results by rank. A rank that raises ``Killed`` begins anew, in its next life."""
    ending = Ending()
    contexts = [place.context(owners.connect, ending, 0) for place in places]
    outcomes: list[RankResult] = []  # in the order in which loops ended
    controller, lock = Controller(len(places), (), max_failures=max_failures), threading.Lock()

    def run(place: RankPlace) -> None:
        while not live(contexts[place.rank]):
            contexts[place.rank] = place.context(owners.connect, ending, contexts[place.rank].life + 1)

    def live(context: RankContext) -> bool:
        """One life of a rank; False: it died and is to be started again."""
        with running_in(context):
            outcome = outcome_of(fn, context)  # noted before the rank leaves the run, which fails the other ranks
            if isinstance(outcome.error, Killed) and outlived(context):
                return False
            with lock:
                outcomes.append(outcome)
                first_failure = outcome.error is not None and sum(o.error is not None for o in outcomes) == 1
        if first_failure:
            ending.reason = f"rank {context.rank} failed: {outcome.error}"
            for other in contexts:
                other.close(ending.reason)
        return True

    def outlived(context: RankContext) -> bool:
        rank = MemberId(MemberKind.RANK, context.rank)
        with lock:
            actions = controller.died(rank, context.life)
            controller.ready(rank, controller.life(rank))  # a thread needs no time to start
        for action in actions:
            if isinstance(action, Lose):
                log.warning("%s died and is started again", rank)
                owners.lose(action.rank, action.life)
        return bool(actions)

    ranks = [threading.Thread(target=run, args=(place,), name=f"rank-{place.rank}") for place in places]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return results_of(outcomes)
