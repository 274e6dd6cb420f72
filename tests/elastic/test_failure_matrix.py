"""The failure matrix: whatever goes wrong with a process, at whatever point, the run ends with the bits of one that was
not disturbed, or with one clear error. Other tests have its other rows: tests/engine/test_whole_run.py the death of all
processes, tests/cluster/ what only Ray has."""

from __future__ import annotations

import functools
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import seeded
from engine.test_comeback import Small
from owner.test_products import Divided
from torch import nn

import rayzero
from rayzero.engine.context import RankContext
from rayzero.errors import RayZeroError, RunFailedError, StateLostError
from rayzero.slabs.sweep import list_slabs
from rayzero.testing import Transport, run_ranks
from tests.support import needs
from tests.support.faults import Fault, FaultError, Faults
from tests.support.waiting import until

from .disturbed import (
    OWNERS,
    RANKS,
    Disturbed,
    another_host,
    differences,
    missed,
    train,
    undisturbed,
    unsharded,
)
from .test_scaling_cases import momentum, muon_and_adamw

pytestmark = [needs.shared_memory, pytest.mark.timeout(600)]  # a series has dozens of deaths
Cells = dict[str, tuple[Fault, ...]]


def killed(member: str, point: str, nth: int = 1, life: int | None = None) -> Fault:
    return Fault(member, point, "kill", nth, life)


def at_the_step(fault: Fault) -> Fault:
    """The same in owners that run a torch class, whose update is no kernel's."""
    return replace(fault, point="owner.step") if fault.point == "owner.adam" else fault


OWNER = {
    "idle": killed("optimizer 1", "owner.idle", 2),
    "receiving": killed("optimizer 1", "owner.receive", 5),
    "asked-for-norms": killed("optimizer 1", "owner.collect", 2),
    "in-the-norm": killed("optimizer 1", "owner.norm", 2),
    "told-to-update": killed("optimizer 1", "owner.apply", 2),
    "before-adam": killed("optimizer 1", "owner.decided", 2),
    "mid-adam": killed("optimizer 1", "owner.adam", 3),
    "mid-adam-in-the-lead": killed("optimizer 0", "owner.adam", 2),
    "updated": killed("optimizer 1", "owner.updated", 3),
    "publishing": killed("optimizer 1", "owner.publish", 4),
    "between-shards": killed("optimizer 1", "owner.between-shards", 3),
    "writing": killed("optimizer 1", "owner.write"),
    "saving": killed("optimizer 1", "owner.save"),
    "saved": killed("optimizer 1", "owner.saved"),
}
LEAD = {
    "hears-a-finish": killed("optimizer 0", "lead.finish", 3),
    "has-the-norm": killed("optimizer 0", "lead.norm", 3),
    "hears-a-commit": killed("optimizer 0", "lead.commit", 3),
    "before-the-record": killed("optimizer 0", "lead.before-record", 3),
    "in-the-record": killed("optimizer 0", "lead.record", 3),
    "after-the-record": killed("optimizer 0", "lead.after-record", 3),
    "one-owner-told": killed("optimizer 0", "lead.ordered", 3),
    "owners-told": killed("optimizer 0", "lead.tell", 3),
    "in-a-mean": killed("optimizer 0", "lead.mean", 4),
    "in-a-write": killed("optimizer 0", "lead.write", 2),
    "asked-to-save": killed("optimizer 0", "lead.save", 2),
    "before-the-manifest": killed("optimizer 0", "lead.before-manifest"),
    "after-the-manifest": killed("optimizer 0", "lead.after-manifest"),
}
RANK = {
    "fetching": killed("rank 1", "rank.fetch", 6),
    "forward": killed("rank 1", "rank.forward", 8),
    "backward": killed("rank 1", "rank.backward", 6),
    "between-two-pushes": killed("rank 1", "rank.pushed", 6),
    "push-not-announced": killed("rank 1", "rank.announce", 6),
    "after-the-last-push": killed("rank 1", "rank.pushed-last", 2),
    "in-clip": killed("rank 1", "rank.clip", 2),
    "clipped": killed("rank 1", "rank.clipped", 2),
    "keeping-its-state": killed("rank 1", "rank.keep", 2),
    "finishing": killed("rank 1", "rank.finish", 3),
    "after-finish": killed("rank 1", "rank.finished", 3),
    "in-a-mean": killed("rank 1", "rank.mean-asked", 3),
    "in-a-write": killed("rank 0", "rank.write-asked"),
    "in-a-save": killed("rank 1", "rank.save-asked"),
    "rank-0": killed("rank 0", "rank.pushed", 6),
}
TOGETHER = {
    "both-owners": (killed("optimizer 0", "owner.apply", 3), killed("optimizer 1", "owner.apply", 3)),
    "both-owners-mid-adam": (killed("optimizer 0", "owner.adam", 2), killed("optimizer 1", "owner.adam", 2)),
    "both-ranks": (killed("rank 0", "rank.finish", 2), killed("rank 1", "rank.finish", 2)),
    "an-owner-and-a-rank": (killed("optimizer 1", "owner.receive", 6), killed("rank 1", "rank.pushed", 6)),
    "everybody": (
        *(killed(f"optimizer {owner}", "owner.norm", 4) for owner in range(2)),
        *(killed(f"rank {rank}", "rank.pushed-last", 3) for rank in range(2)),
    ),
    "a-successor-as-it-starts": (killed("optimizer 1", "owner.norm", 3), killed("optimizer 1", "owner.start", 1, 1)),
    "a-successor-with-the-locks": (
        killed("optimizer 1", "owner.adam", 2),
        killed("optimizer 1", "owner.took-over", 1, 1),
    ),
    "a-successor-that-redoes": (killed("optimizer 1", "owner.apply", 2), killed("optimizer 1", "owner.redo", 1, 1)),
    "a-successor-mid-adam-again": (killed("optimizer 1", "owner.adam", 3), killed("optimizer 1", "owner.adam", 1, 1)),
    "a-lead's-successor": (killed("optimizer 0", "lead.record", 3), killed("optimizer 0", "owner.attach", 2, 1)),
    "the-lead-with-a-mean-that-one-rank-has-had": (
        killed("rank 0", "rank.mean-asked", 3),
        killed("rank 1", "rank.pushed-last", 4),  # in its next life it does not ask again
        Fault("rank 0", "rank.mean", "delay", 1, 1, seconds=2.0),  # until that has begun
        killed("optimizer 0", "lead.mean", 7),
    ),
    "a-rank-between-two-writes": (killed("rank 1", "rank.write", 2),),
    "the-lead-with-a-write-that-no-rank-knows-to-be-made-and-a-rank": (
        killed("optimizer 0", "lead.wrote", 2),
        killed("rank 1", "rank.rejoin", 1),  # its next life finds the unit published and does not ask
    ),
    "the-same-and-rank-0": (killed("optimizer 0", "lead.wrote", 2), killed("rank 0", "rank.rejoin", 1)),
    "a-rank-that-comes-back": (killed("rank 1", "rank.finish", 2), killed("rank 1", "rank.attached", 1, 1)),
    "a-rank-while-an-owner-is-replaced": (
        killed("optimizer 1", "owner.adam", 2),
        killed("rank 1", "rank.rejoin", 1),
    ),
    "the-other-owner-while-one-is-replaced": (
        killed("optimizer 0", "lead.after-record", 2),
        killed("optimizer 1", "owner.redo", 1),
    ),
}


STOPPED = {
    "an-owner": Fault("optimizer 1", "owner.norm", "stop", 3),
    "the-lead": Fault("optimizer 0", "lead.after-record", "stop", 2),
    "a-rank": Fault("rank 1", "rank.pushed", "stop", 6),
}
LATE = {
    "an-answer": Fault("rank 1", "rank.answer", "delay", method="Share"),  # the first cell begins with the processes
    "a-norm": Fault("optimizer 1", "owner.norm", "delay", 3),
    "an-order": Fault("optimizer 1", "owner.apply", "delay", 2),
    "a-record": Fault("optimizer 0", "lead.before-record", "delay", 2),
    "a-publication": Fault("optimizer 1", "owner.publish", "delay", 4),
    "a-push": Fault("rank 1", "rank.announce", "delay", 5),
    "a-finish": Fault("rank 0", "rank.finish", "delay", 2),
}
TWICE = {
    "an-announcement": Fault("optimizer 1", "owner.receive", "duplicate", 5),
    "an-order-to-collect": Fault("optimizer 1", "owner.collect", "duplicate", 2),
    "an-order-to-apply": Fault("optimizer 1", "owner.apply", "duplicate", 2),
    "a-write": Fault("optimizer 1", "owner.write", "duplicate"),
    "a-finish": Fault("optimizer 0", "lead.finish", "duplicate", 3),
    "a-commit": Fault("optimizer 0", "lead.commit", "duplicate", 2),
    "a-mean": Fault("optimizer 0", "lead.mean", "duplicate", 3),
    "a-save": Fault("optimizer 0", "lead.save", "duplicate"),
}
WIRE = (
    {
        "attach": (
            Fault("rank 1", "rank.call", "drop", method="Attach"),
            Fault("rank 0", "rank.call", "duplicate", method="Attach"),
        ),
    }
    | {
        f"{what}-{act}": Fault(member, point, act, nth, method=method)
        for what, member, point, nth, method in (
            ("finish", "rank 1", "rank.call", 2, "Finish"),
            ("commit", "rank 0", "rank.call", 1, "Commit"),
            ("mean", "rank 1", "rank.call", 2, "Mean"),
            ("write", "rank 1", "rank.call", 1, "Write"),
            ("save", "rank 0", "rank.call", 1, "Save"),
            ("collect", "optimizer 0", "lead.call", 2, "Collect"),
            ("apply", "optimizer 0", "lead.call", 2, "Apply"),
            ("write-shards", "optimizer 0", "lead.call", 1, "WriteShards"),
        )
        for act in ("drop", "duplicate")
    }
    | {
        f"answer-to-{method.lower()}-drop": Fault("rank 1", "rank.answer", "drop", 1, method=method)
        for method in ("Finish", "Commit", "Mean", "Write", "Save")
    }
)
RAISED = {
    "in-the-norm": (
        Fault("optimizer 1", "owner.norm", "raise", 3),
        r"optimizer 1 failed: FaultError\('optimizer 1 owner",
    ),
    "receiving": (
        Fault("optimizer 1", "owner.receive", "raise", 3),
        r"an owner failed: FaultError\('optimizer 1 owner",
    ),
    "publishing": (
        Fault("optimizer 1", "owner.publish", "raise", 4),
        r"optimizer 1 failed: FaultError\('optimizer 1 ow",
    ),
    "told-to-update": (Fault("optimizer 1", "owner.apply", "raise", 2), r"FaultError\('optimizer 1 owner.apply raise"),
    "in-the-record": (
        Fault("optimizer 0", "lead.before-record", "raise", 2),
        r"FaultError\('optimizer 0 lead.before-rec",
    ),
    "in-a-save": (Fault("optimizer 1", "owner.save", "raise"), r"optimizer 1 failed: FaultError\('optimizer 1 owner.s"),
    "in-a-rank": (Fault("rank 1", "rank.pushed", "raise", 6), r"rank 1 rank.pushed raise, as a test asked for"),
}


def row(*cells: Mapping[str, Fault | tuple[Fault, ...]]) -> Cells:
    """The cells of one series."""
    merged = dict(item for some in cells for item in some.items())
    return {name: faults if isinstance(faults, tuple) else (faults,) for name, faults in merged.items()}


KILLED = {
    "an-owner": row(OWNER),
    "the-lead": row(LEAD),
    "a-rank": row(RANK),
    "several": row(TOGETHER),
}


def soap_of_a_package(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Keeps matrices of each axis, and lists of them."""
    from pytorch_optimizer import SOAP

    made: torch.optim.Optimizer = SOAP(params, lr=lr)
    return made


CLASSES: dict[str, Callable[..., Any]] = {
    "muon-and-adamw": muon_and_adamw,
    "adamw": functools.partial(torch.optim.AdamW, fused=True),  # whose bits its kernel has
    "momentum": momentum,
    "adafactor": torch.optim.Adafactor,
}
PACKAGES = {"soap": soap_of_a_package}


@pytest.fixture(scope="module")
def expected_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], Any]:
    """By class, precision and number of cells, what a run ends with that nothing happens to. It is compared with plain
    torch, too: all weights, losses and what the classes keep."""

    @functools.cache
    def results(name: str, precision: str, cells: int) -> Any:
        given = {"make": (CLASSES | PACKAGES)[name], "precision": precision, "cells": cells}
        found, plain = undisturbed(tmp_path_factory.mktemp("undisturbed"), **given), unsharded(**given)
        (named,) = {tuple(tensors) for _, tensors, *_ in plain}  # not the owners' counts of updates
        ours = [(life, {n: tensors[n] for n in named}, *rest) for life, tensors, *rest in found]
        assert differences(ours, plain) == []
        assert all(bool(tensor.isfinite().all()) for tensor in plain[0][1].values())
        return found

    return results


@pytest.mark.promise("recoverable", "optimizers")
@pytest.mark.promise("exact", "optimizers", "precisions")
@pytest.mark.usefixtures("forked_with_compiler")
@pytest.mark.spread(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("row", KILLED)
@pytest.mark.parametrize("name", CLASSES)
def test_a_kill_changes_no_bit(
    name: str,
    row: str,
    precision: str,
    expected_of: Callable[[str, str, int], Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One run, whose processes are killed at one point after the other."""
    cells = KILLED[row]
    if name != "adamw":
        cells = {cell: tuple(map(at_the_step, faults)) for cell, faults in cells.items()}
    expected = expected_of(name, precision, len(cells))
    Disturbed(tmp_path, cells=cells, make=CLASSES[name], precision=precision).changes_no_bit(expected, caplog)


@pytest.mark.thorough
@pytest.mark.usefixtures("forked_with_compiler")
@pytest.mark.parametrize("name", PACKAGES)
def test_nor_does_one_with_a_class_of_a_package(
    name: str, expected_of: Callable[[str, str, int], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cells = {cell: tuple(map(at_the_step, faults)) for cell, faults in row(TOGETHER).items()}
    expected = expected_of(name, "fp32", len(cells))
    Disturbed(tmp_path, cells=cells, make=PACKAGES[name], precision="fp32").changes_no_bit(expected, caplog)


NOT_KILLED: dict[str, tuple[Cells, Transport, float]] = {
    "over-grpc": (row(WIRE), "grpc", 60.0),
    "late-or-twice": (row(LATE, TWICE), "shm", 60.0),
    "stopped": (row(STOPPED), "shm", 6.0),
}


@pytest.mark.promise("recoverable", "transports")
@pytest.mark.spread(1)
@pytest.mark.parametrize(("cells", "transport", "stall_timeout"), NOT_KILLED.values(), ids=NOT_KILLED)
def test_what_is_late_or_lost_or_comes_twice_changes_no_bit(
    cells: Cells,
    transport: Transport,
    stall_timeout: float,
    expected_of: Callable[[str, str, int], Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disturbed = Disturbed(tmp_path, cells=cells, transport=transport, stall_timeout=stall_timeout)
    disturbed.changes_no_bit(expected_of("adamw", "fp32", len(cells)), caplog)


ON_RANKS = row(
    {
        "a-rank-that-asks": killed("rank 1", "rank.asks-for-products", 3),
        "a-rank-that-has-multiplied": killed("rank 1", "rank.has-multiplied", 2),
        "a-rank-that-answers-late": Fault("rank 1", "rank.has-multiplied", "delay", 2, seconds=8.0),
        "an-owner-that-waits": killed("optimizer 1", "owner.awaits-products", 3),
        "an-owner-with-the-answer": killed("optimizer 1", "owner.has-products", 3),
        "an-owner-mid-step": killed("optimizer 1", "owner.step", 3),
        "the-lead-mid-step": killed("optimizer 0", "owner.step", 2),
        "a-successor-mid-step-again": (
            killed("optimizer 1", "owner.step", 3),
            killed("optimizer 1", "owner.step", 1, 1),
        ),
        "an-owner-and-a-rank": (
            killed("optimizer 1", "owner.awaits-products", 2),
            killed("rank 1", "rank.has-multiplied", 2),
        ),
    }
)


@pytest.mark.thorough
@pytest.mark.usefixtures("forked_with_compiler")
def test_a_fault_while_ranks_multiply_changes_no_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    multiplied_by_owners = undisturbed(tmp_path, make=Divided, cells=len(ON_RANKS))
    disturbed = Disturbed(tmp_path, cells=ON_RANKS, make=Divided, matrix_updates="rank", stall_timeout=90.0)
    disturbed.changes_no_bit(multiplied_by_owners, caplog)


BEFORE_ADAM, BEFORE_IT_PUSHES_AGAIN = killed("optimizer 1", "owner.decided", 2), killed("rank 1", "rank.rejoin")
OTHER_HOST = row(
    {
        "the-owner": BEFORE_ADAM,
        "the-owner-and-a-rank": (BEFORE_ADAM, BEFORE_IT_PUSHES_AGAIN),
        "the-owner-and-both-ranks": (BEFORE_ADAM, BEFORE_IT_PUSHES_AGAIN, killed("rank 0", "rank.rejoin")),
        "the-owner-a-rank-and-its-next-life": (
            BEFORE_ADAM,
            BEFORE_IT_PUSHES_AGAIN,
            killed("rank 1", "rank.attached", 1, 1),
        ),
        "the-owner-a-rank-and-the-successor": (
            BEFORE_ADAM,
            BEFORE_IT_PUSHES_AGAIN,
            killed("optimizer 1", "owner.apply", 1, 1),
        ),
        "everybody": (
            BEFORE_ADAM,
            killed("optimizer 0", "lead.tell", 2),
            BEFORE_IT_PUSHES_AGAIN,
            killed("rank 0", "rank.rejoin"),
        ),
    }
)
PROTECTED = row(
    {
        "the-owner-and-a-rank": (BEFORE_ADAM, BEFORE_IT_PUSHES_AGAIN),
        "the-lead": LEAD["in-the-record"],
        "both-ranks": TOGETHER["both-ranks"],
    }
)


@pytest.mark.promise("recoverable", "hosts", "tls")
@pytest.mark.spread(1)
@pytest.mark.parametrize(("cells", "tls"), [(PROTECTED, True), (OTHER_HOST, False)], ids=["mutual TLS", "plain"])
def test_an_owner_on_another_host_dies_and_what_ranks_had_pushed_to_it_comes_again(
    cells: Cells,
    tls: bool,
    expected_of: Callable[[str, str, int], Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also from ranks that have died since: it is in the memory that they shared with an owner of their host."""
    with another_host("optimizer 1") as hosts:
        disturbed = Disturbed(tmp_path, cells=cells, hosts=hosts, tls=tls)
        disturbed.changes_no_bit(expected_of("adamw", "fp32", len(cells)), caplog)


@pytest.mark.thorough
def test_what_dead_ranks_had_pushed_takes_no_memory_once_it_is_applied(tmp_path: Path, expected: Any) -> None:
    """Each death would otherwise cost the host the size of all gradients until the run ends."""
    faults = Faults(tmp_path, tuple(killed("rank 1", "rank.pushed", 4, life) for life in range(3)))
    loop = functools.partial(train_and_list, base=seeded(Small, 3), folder=tmp_path)
    found = run_ranks(loop, RANKS, OWNERS, "shm", True, max_failures=3, faults=faults)
    assert [life for _, (life, *_) in found] == [0, 3]
    assert differences([result for _, result in found], expected) == []
    assert [incarnations for incarnations, _ in found] == [{0: 1, 1: 1}] * RANKS


def train_and_list(context: RankContext, base: nn.Module, folder: Path) -> Any:
    """Train; how many lives' gradients are on this host at the end, by rank, and the results."""
    results = train(context, base, folder)
    lives = defaultdict[int, set[int]](set)
    for slab in list_slabs():
        if slab.header is not None and (slab.header.facts.run, slab.header.facts.role) == (context.run, "grads"):
            lives[slab.header.facts.index].add(slab.header.facts.incarnation)
    rayzero.mean_over_ranks(0.0)
    return {rank: len(each) for rank, each in sorted(lives.items())}, results


@pytest.mark.thorough
def test_a_rank_and_an_owner_die_and_the_ranks_host_has_no_owner_but_a_door(
    expected: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it had pushed is in its owner's total, which a successor goes on from. Its loop's state was kept by that
    owner's process, and is in the memory that the rank shares with the door of its host."""
    with another_host("rank 1") as hosts:
        Disturbed(tmp_path, BEFORE_ADAM, BEFORE_IT_PUSHES_AGAIN, hosts=hosts, stall_timeout=20.0).changes_no_bit(
            expected, caplog
        )


def test_an_owner_that_dies_before_the_run_begins_ends_it_by_name(tmp_path: Path) -> None:
    disturbed = Disturbed(tmp_path, killed("optimizer 1", "owner.start"))
    with pytest.raises(RunFailedError, match="the process of optimizer 1 died before the run began"):
        disturbed.results()
    disturbed.check_nothing_left()


@pytest.mark.spread(1)
@pytest.mark.parametrize("point", ["rank.meet", "rank.met"])
def test_an_owner_that_dies_while_a_rank_maps_its_memory_ends_the_run_by_name(point: str, tmp_path: Path) -> None:
    """It has published nothing, so its successor makes other memory. ``point``: where rank 0 is meanwhile, which has
    shaken hands with it; rank 1 comes later, and its handshake is what the owner dies in."""
    faults = (
        Fault("rank 0", point, "delay", 2, seconds=4.0),
        Fault("rank 1", "rank.attach", "delay", seconds=2.0),  # longer than rank 0 takes to shake hands
        killed("optimizer 1", "owner.attach", 2),
    )
    disturbed = Disturbed(tmp_path, *faults)
    with pytest.raises(StateLostError, match=r"optimizer 1 .*has died before it had published every first value"):
        disturbed.results()
    disturbed.check_nothing_left()


@pytest.mark.parametrize("owner", range(OWNERS))
def test_an_owner_dies_with_all_ranks_before_it_has_a_value(owner: int, expected: Any, tmp_path: Path) -> None:
    """Nobody has seen its memory but the other owner, which finds its successor in other memory."""
    late = (Fault(f"rank {rank}", "rank.attached", "delay", life=0, seconds=60.0) for rank in range(RANKS))
    faults = Faults(tmp_path, (*late, Fault(f"optimizer {owner}", "owner.attach", "delay", RANKS)))

    def kill() -> None:
        until(lambda: missed(faults) == [])
        for struck in map(faults.struck, range(RANKS + 1)):
            assert struck is not None
            os.kill(struck.pid, signal.SIGKILL)

    loop = functools.partial(train, base=seeded(Small, 3), folder=tmp_path)
    with ThreadPoolExecutor(1) as pool:
        killed_all = pool.submit(kill)
        found = run_ranks(loop, RANKS, OWNERS, "shm", True, stall_timeout=20.0, max_failures=RANKS + 1, faults=faults)
        killed_all.result()
    assert [life for life, *_ in found] == [1] * RANKS
    assert differences(found, expected) == []


@pytest.mark.spread(1)
@pytest.mark.parametrize(("fault", "said"), RAISED.values(), ids=RAISED)
def test_an_error_in_a_process_ends_the_run_with_one_that_says_where(fault: Fault, said: str, tmp_path: Path) -> None:
    disturbed = Disturbed(tmp_path, fault)
    with pytest.raises((RayZeroError, FaultError), match=said):
        disturbed.results()
    assert disturbed.faults.struck(0)
    disturbed.check_nothing_left()
