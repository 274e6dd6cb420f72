"""A run takes in a host that joins late, goes on without one that is lost, and names whom it awaits in vain."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.waiting import until

from .hosts import Host, hosts, why_no_hosts
from .trainings import (
    ENDLESS,
    LONG_S,
    OWNERS_ELSEWHERE,
    PYTHON,
    QUICKLY,
    RANKS_ON_HEAD,
    RAY_ENV,
    join_ray,
    shut,
    start_ray,
    train,
    two_hosts_with_ray,
)

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]


def test_an_owner_joins_on_a_new_host_and_then_two_that_cannot_reach_each_other_only_delay_the_ranks(
    undisturbed: str, tmp_path: Path
) -> None:
    with hosts(3) as (a, b, c):
        address = start_ray(a)
        join_ray(b, address)
        training = train(a, tmp_path, address, *RANKS_ON_HEAD, "scaling.optimizer_labels={host: '!host-1'}")
        training.until(10)
        rank_0 = training.members(a)["rank 0"]
        a.kill(
            rank_0, signal.SIGSTOP
        )  # so that the run does not end before; rank 1 is to try whether it reaches the new owner
        join_ray(c, address)
        scaling = a.start([PYTHON, "-m", "rayzero", "scale", str(training.folder), "--optimizers", "3"], env=RAY_ENV)
        until(
            lambda: str(training.record()["rescaling"]).endswith("leading the ranks to them"), LONG_S, "a third owner"
        )
        a.kill(rank_0, signal.SIGCONT)
        until(lambda: len(training.record()["rescales"]) > 0, LONG_S, "the end of the change")

        b.cable(c).cut()
        done = training.done()
        with pytest.raises(subprocess.TimeoutExpired):
            training.driver.wait(5.0)
        assert training.done() <= done + 1, "the lead knows the norms of all owners or of none"
        b.cable(c).mend()

        said = scaling.communicate(timeout=LONG_S)[0]
        assert scaling.returncode == 0, said
        assert re.search(r"2 optimizers became 3; \S+ \S+ have another owner", said)
        training.end()
        assert sorted(training.members(a)) == ["optimizer 3", "rank 0", "rank 1"], "its door has another number now"
        assert [len(training.members(host)) for host in (b, c)] == [2, 1]
        [change] = training.record()["rescales"]
        assert change["moved_bytes"] > 0
        assert b.sent_to(c) > 100_000, "a third of the states"
        assert training.record()["recoveries"] == []
        assert training.digest() == undisturbed


def test_a_host_that_ranks_do_not_reach_gets_no_owner_and_disturbs_nothing(undisturbed: str, tmp_path: Path) -> None:
    with hosts(3) as (a, b, c):
        address = start_ray(a)
        join_ray(b, address)
        training = train(a, tmp_path, address, *RANKS_ON_HEAD, "scaling.optimizer_labels={host: '!host-1'}")
        training.until(10)
        rank_0 = training.members(a)["rank 0"]
        a.kill(rank_0, signal.SIGSTOP)  # so that the run does not end before the answer
        join_ray(c, address)
        shut(a, c)
        scaling = a.run([PYTHON, "-m", "rayzero", "scale", str(training.folder), "--optimizers", "3"], env=RAY_ENV)
        a.kill(rank_0, signal.SIGCONT)
        said = scaling.stderr
        assert scaling.returncode == 1, said
        refused = (
            rf"stay as they are: .*{a.address} cannot connect to optimizer 2 at {c.address}:21\d+: no answer within 5 s"
        )
        assert re.search(refused, said), said
        training.end()
        assert training.members(c) == {}
        assert training.digest() == undisturbed


def test_a_firewall_before_the_owners_is_named_at_the_start(tmp_path: Path) -> None:
    with two_hosts_with_ray() as made:
        a, b, address = made.a, made.b, made.address
        shut(a, b)
        training = train(a, tmp_path, address, *OWNERS_ELSEWHERE)
        said = training.driver.communicate(timeout=LONG_S)[0]
        assert training.driver.returncode == 2, said
        named = rf"the host {a.address} cannot connect to optimizer \d at {b.address}:21\d+: no answer within 5 s"
        assert re.search(named + r" \(and \d more such pairs?\); open the ports between the hosts", said), said


def test_a_host_that_was_given_up_and_comes_back_disturbs_nothing(undisturbed: str, tmp_path: Path) -> None:
    """Until it comes back, it is to the others a host that has lost its power: no connection was ever closed."""
    with two_hosts_with_ray(**QUICKLY) as made:
        a, b, address = made.a, made.b, made.address
        settings = ["run.checkpoint_every=10", "scaling.rescale_on_failure=true", "scaling.placement_timeout=3"]
        training = train(a, tmp_path, address, *settings)
        training.until(12)
        assert sorted(training.members(b)) == ["optimizer 1", "rank 1"]
        a.cable(b).cut()
        said = training.until_it_says("Its host has left the cluster: only a checkpoint brings back what it had.")
        assert len(members_alive(b)) == 2
        a.cable(b).mend()
        training.end(said)
        assert [one["who"] for one in training.record()["recoveries"]] == ["the run"]
        assert sorted(training.members(a)) == ["optimizer 0", "optimizer 1", "rank 0", "rank 1"]
        assert training.digest() == undisturbed
        until(lambda: members_alive(b) == [], LONG_S, "the end of what was given up")


def members_alive(host: Host) -> list[str]:
    """The pids of all ranks and owners on a host."""
    return host.run(["pgrep", "-f", "^ray::(RankWorker|OptimizerActor)"]).stdout.split()


def test_a_cable_that_stays_cut_ends_the_run_with_the_name_of_who_is_awaited(tmp_path: Path) -> None:
    with two_hosts_with_ray() as made:
        a, b, address = made.a, made.b, made.address
        training = train(a, tmp_path, address, "zero.stall_timeout=6", steps=ENDLESS)
        training.until(10)
        a.cable(b).cut()
        said = training.driver.communicate(timeout=LONG_S)[0]
        assert training.driver.returncode == 1, said
        assert re.search(
            r"rank (0 raised StallError.*(optimizer|rank) 1|1 raised StallError.*(optimizer|rank) 0)", said
        ), said
