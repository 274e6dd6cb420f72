"""What is left of a run whose owner died in the middle of an update, told from its shared memory alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked
from typer.testing import CliRunner

from rayzero.cli import app
from rayzero.concurrency.futures import failed
from rayzero.errors import HandshakeError, RayZeroError, StoreError
from rayzero.kernels.stamps import STAMP, TileStamps
from rayzero.kernels.torch_kernel import TorchKernel
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.owner import rules
from rayzero.owner.service import ShardService
from rayzero.protocol.messages import Action, Decision, ModelSpec
from rayzero.protocol.ownership import Ownership
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.store.owner.memory.shared_owner import SharedOwner
from rayzero.store.shm.recovery import DeadRun, DeadShard, Outcome, RecoveryVerdict, assess, read_run
from rayzero.store.shm.shared_plan import SharedPlan
from tests.support import needs

from .stores import connected
from .test_shared_store import served
from .toy import Rank, make_spec, masters, random_grads, started

# ---- the decision, from values


def shard(index: int = 0, **fields: Any) -> DeadShard:
    at = {"owner": index % 2, "published": 7, "decided": 7, "applied": 7, "tiles": (14, 14, 14)}
    return DeadShard(shard=index, **at | fields)


def record(step: int, **fields: Any) -> Decision:
    values = {"attempts": (0, 0), "action": Action.APPLY, "scale": 0.5, "norm": 1.0, "hyper": ()}
    return Decision(step=step, **values | fields)


def run(*shards: DeadShard, **fields: Any) -> DeadRun:
    values = {"num_owners": 2, "records": (record(5), record(6)), "ranks": frozenset((0, 1)), "lives": (0, 1)}
    return DeadRun(run="r", shards=shards, **values | fields)


DECIDED = {"records": (record(6), record(7))}
MIXED = shard(1, decided=8, tiles=(16, 14, 16))


@pytest.mark.parametrize(
    ("dead", "outcome", "version", "behind"),
    [
        (run(shard(0), shard(1)), Outcome.WHOLE, 7, ()),
        (run(shard(0), shard(1, applied=-1, decided=-1, tiles=())), Outcome.WHOLE, 7, ()),  # frozen
        (run(shard(0), shard(1), **DECIDED), Outcome.REDO, 8, ((0, (0, 1, 2)), (1, (0, 1, 2)))),
        (run(shard(0, decided=8), MIXED, **DECIDED), Outcome.REDO, 8, ((0, (0, 1, 2)), (1, (1,)))),
        (run(shard(0, published=8), replace(MIXED, applied=8), **DECIDED), Outcome.WHOLE, 8, ()),
        (
            run(shard(0, published=8), replace(MIXED, tiles=(15, 14, 16), undone=frozenset({0})), **DECIDED),
            Outcome.REDO,
            8,
            ((1, (0, 1)),),
        ),
        (run(shard(0, published=8), shard(1), records=(record(7, action=Action.SKIP),)), Outcome.REDO, 8, ((1, ()),)),
        (
            run(shard(0), shard(1), num_owners=3, ownership=Ownership(3, doors=1)),
            Outcome.WHOLE,
            7,
            (),
        ),  # no door is left
    ],
)
def test_what_can_be_had(dead: DeadRun, outcome: Outcome, version: int, behind: object) -> None:
    found = assess(dead)
    assert (found.outcome, found.version, found.behind) == (outcome, version, behind)


@pytest.mark.parametrize(
    ("dead", "reason"),
    [
        (run(shard(0), shard(1, decided=8, tiles=(16, 15, 14)), **DECIDED), "tiles [1] of shard 1 of optimizer 1 were"),
        (run(shard(0), MIXED), "the decision of step 7 is not recorded on this host"),
        (run(shard(0), MIXED, **DECIDED, ranks=frozenset((1,))), "gradients of ranks [0] are not on this host"),
        (run(shard(0), lives=(0,)), "optimizers [1] left nothing on this host"),
        (run(shard(0), shard(1), lives=(0, 1, 1)), "optimizers [1] left slabs of two lives"),
        (run(shard(0), shard(1, published=-1, applied=-1, tiles=(0,))), "shard 1 of optimizer 1 never had values"),
        (run(shard(0, published=9), shard(1), **DECIDED), "more than one decision behind v9"),
        (run(shard(0), shard(1, tiles=(), on_device=True)), "masters and states of shard 1 of optimizer 1 were in a"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(dead: DeadRun, reason: str) -> None:
    found = assess(dead)
    assert (found.outcome, found.version) == (Outcome.REFUSED, -1)
    assert reason in found.reason


# ---- stopped at every point of an update

needs_signals = needs.signals_between_processes
POINTS = ("recorded", "before a tile", "within a tile", "between tiles", "applied")


def large_spec(run_id: str) -> ModelSpec:
    """Two units of three tiles each, a shard each."""
    units = tuple(lay_out_unit(i, f"u{i}", torch.bfloat16, True, [(f"u{i}.w", (3, STAMP))]) for i in range(2))
    base = make_spec(1)
    layout = ModelLayout(units=units, shard_numel=3 * STAMP)
    return replace(base, run=run_id, layout=layout, group_of=((0,), (0,)), kernel="torch")


class Halt(StoreError):
    """The process ends here."""


def halt() -> None:
    raise Halt


def halt_at(point: str, patch: Any, stop: Any = halt) -> None:
    """``stop`` at a point of the second update: of step 1."""
    patch.setattr(rules, "choose_kernel", lambda name: TorchKernel(tile=STAMP))
    apply, publish, writing = ShardService.apply, SharedOwner._publish, TileStamps.writing

    def stopping_apply(self: ShardService, decision: Decision) -> Future[None]:
        try:
            if decision.step == 1:
                stop()
        except Halt as halted:
            return failed(halted)
        return apply(self, decision)

    def stopping_publish(self: SharedOwner, published: Any) -> None:
        if any(each.version == 2 for each in published):
            stop()
        publish(self, published)

    @contextmanager
    def stopping_writing(self: TileStamps, start: int, end: int) -> Iterator[None]:
        here = self.version == 2 and start == STAMP
        if here and point == "before a tile":
            stop()
        with writing(self, start, end):
            yield
            if here and point == "within a tile":
                stop()
        if here and point == "between tiles":
            stop()

    if point == "recorded":
        patch.setattr(ShardService, "apply", stopping_apply)
    elif point == "applied":
        patch.setattr(SharedOwner, "_publish", stopping_publish)
    else:
        patch.setattr(TileStamps, "writing", stopping_writing)


def two_steps(stack: ExitStack, spec: ModelSpec, directory: Path = SHARED_MEMORY) -> Rank:
    stores = connected(served(stack, 1, directory=directory), share=directory, stall_timeout=20)
    (rank,) = stack.enter_context(started(stores, spec))
    for step in range(2):
        rank.fetch()
        rank.push(random_grads(spec, step))
        rank.finish(1.0).result(20)
    return rank


def found_of(run_id: str) -> RecoveryVerdict:
    control = [s for s in list_slabs() if s.header is not None and s.header.facts.run == run_id]
    dead = read_run(run_id, [s for s in control if s.header is not None and s.header.facts.role == "control"])
    assert dead is not None
    return assess(dead)


@needs_signals
@pytest.mark.parametrize("point", POINTS)
def test_an_update_that_stopped_anywhere_is_told_from_the_files(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    halt_at(point, monkeypatch)
    with ExitStack() as stack:
        rank = two_steps(stack, large_spec(point))
        with pytest.raises(RayZeroError):
            rank.fetch(2)
        found = found_of(point)
    expected = {
        "recorded": (Outcome.REDO, ((0, (0, 1, 2)), (1, (0, 1, 2)))),
        "before a tile": (Outcome.REDO, ((0, (1, 2)), (1, (0, 1, 2)))),
        "within a tile": (Outcome.REFUSED, ()),
        "between tiles": (Outcome.REDO, ((0, (2,)), (1, (0, 1, 2)))),
        "applied": (Outcome.REDO, ((1, (0, 1, 2)),)),
    }
    assert (found.outcome, found.behind) == expected[point]


@needs_signals
@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_every_kernel_stamps_what_it_wrote(kernel: str) -> None:
    spec = replace(make_spec(1), run=f"stamps-{kernel}", kernel=kernel)
    with ExitStack() as stack:
        (rank,) = stack.enter_context(started(connected(served(stack, 1), share=SHARED_MEMORY), spec))
        rank.push(random_grads(spec, 1))
        rank.finish().result(20)
        masters(rank, 1)
        control = [s for s in list_slabs() if s.header is not None and s.header.facts.run == spec.run]
        dead = read_run(spec.run, [s for s in control if s.header is not None and s.header.facts.role == "control"])
        assert dead is not None
        assert {shard.tiles for shard in dead.shards} == {(2,)}
        assert {shard.applied for shard in dead.shards} == {1}
        assert [record.step for record in dead.records] == [0]
        assert assess(dead).reason == f"all {len(dead.shards)} shards have v1"


# ---- killed

PROGRAM = """
import os, pathlib, signal, sys
from contextlib import ExitStack
from store import test_recovery as t
class Patch:
    setattr = staticmethod(setattr)
t.halt_at("between tiles", Patch, lambda: os.kill(os.getpid(), signal.SIGKILL))
t.two_steps(ExitStack(), t.large_spec("killed"), pathlib.Path(sys.argv[1])).fetch(2)
"""


@needs_signals
def test_doctor_tells_what_a_killed_owner_left_before_it_sweeps(slab_dir: Path) -> None:
    with forked(PROGRAM, slab_dir) as process:
        assert process.wait() == -signal.SIGKILL
    told = CliRunner().invoke(app, ["doctor", "--sweep", "--slab-dir", str(slab_dir)]).output.splitlines()
    said = "run killed: redo: step 1 was decided; 4 tiles of 2 of 2 shards lack its update"
    assert said in told
    assert list_slabs(slab_dir) == []


@needs_signals
def test_a_slab_of_an_earlier_life_is_refused_by_name() -> None:
    spec = make_spec(1)
    plan = SharedPlan.of(spec, 1)
    with ExitStack() as stack:
        lives = []
        for _ in range(2):
            shared = SharedOwner(0, 1)
            service = ShardService(0, 1, memory=shared)
            stack.callback(shared.close)
            stack.callback(service.close)
            service.attach(0, spec, own_gradients=True)
            lives.append(shared.offer())
        control = plan.attach(lives[1].control, "rank 0", writable=True)
        stack.callback(control.close)
        with pytest.raises(HandshakeError, match=r"rank 0 talks to process 0 in its life .* one of the two"):
            plan.attach(lives[0].tensors[0], "rank 0", writable=False, life=control.header.facts)


def test_an_update_that_fails_leaves_its_tiles_torn() -> None:
    stamps = TileStamps(torch.zeros(3, dtype=torch.int64), 4)
    with stamps.writing(0, STAMP):
        assert stamps.words.tolist() == [7, 0, 0]
    with pytest.raises(StoreError), stamps.writing(STAMP, 2 * STAMP + 64):
        raise StoreError("broken")
    assert stamps.words.tolist() == [8, 7, 7]
