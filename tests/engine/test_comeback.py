"""A rank that dies is started again, repeats its step, and the run ends with the bits of one that was not disturbed."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.rank_step import RankStep
from rayzero.errors import RunFailedError, StateLostError, UntrackedError
from rayzero.protocol.messages import ATTEMPTS, FinishReport, StepInputs
from rayzero.telemetry.recorder import NullRecorder
from rayzero.testing import Killed, run_ranks
from tests.support import needs

from .models import VOCAB, Batches, Block, same_bits

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Point = tuple[str, int]  # where in the loop, in which step

STEPS, AT = 5, 2  # steps of a run; the step in which most of these tests let a rank die
POINTS = (
    "fetch",
    "counted",
    "forward",
    "backward",
    "pushes",
    "pushed",
    "norm",
    "clipped",
    "finish",
    "finished",
    "stepped",
    "mean",
    "saving",
    "saved",
    "writing",
    "written",
)


class Seen:
    """What the loop has seen, in an object of the user's own."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.means: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "means": self.means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.means = list(state["losses"]), list(state["means"])


class Small(nn.Module):
    """With a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.layers = nn.ModuleList(Block(64) for _ in range(2))
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Fault:
    """Ends rank ``who`` at a point of a step: each of its lives at the next one of ``at``."""

    def __init__(self, context: RankContext, who: int, at: tuple[Point, ...], processes: bool) -> None:
        self.armed = context.rank == who and context.life < len(at)
        self.at = at[context.life] if self.armed else ("", 0)
        self.processes = processes

    def __call__(self, point: str, step: int) -> None:
        if self.armed and (point, step) == self.at:
            self.armed = False
            if self.processes:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Killed


def loop(
    context: RankContext,
    base: nn.Module,
    folder: Path,
    at: tuple[Point, ...] = (),
    who: int = 1,
    processes: bool = False,
    accumulate: int = 1,
    tracks: bool = True,
    faults: Callable[[RankContext], Callable[[str, int], None]] | None = None,
    resume: Callable[[RankContext], Path | bool | None] | None = None,
    saves: int = AT,
    halved: Point | None = None,
) -> Any:
    """A plain loop with everything in it that a rank can die in. ``faults``: what happens at its points; None: rank
    ``who`` dies ``at`` some of them. ``resume``: what each life gives to prepare(). ``saves``: the step that ends with
    a checkpoint. ``halved``: the call before which the embedding is halved, and its step."""
    torch.set_num_threads(1)  # the bits of a matrix product depend on it
    fault = faults(context) if faults is not None else Fault(context, who, at, processes)
    model = copy.deepcopy(base)
    config = ZeroConfig(gradient_accumulation_steps=accumulate, units=["Block", "Embedding"])
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = rayzero.prepare(model, adamw, config, resume=resume(context) if resume is not None else None)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=STEPS + 1)
    loader, seen = Batches(context.rank), Seen()
    if tracks:
        rayzero.track(scheduler=scheduler, loader=loader, seen=seen)
    batches = iter(loader)
    engine, step = optimizer.engine, context.step
    assert engine.step_state.attempt == context.life * ATTEMPTS, "its pushes replace those of its earlier lives"

    def pushes(verb: str, unit: str) -> None:
        if verb == "push" and unit.startswith("layers.0"):
            fault("pushes", step)

    engine.cache.observers.append(pushes)
    commit = engine.step_state.commit

    def committing(*args: Any) -> None:
        fault("finish", step)
        commit(*args)
        fault("finished", step)

    def halve(call: str, step: int) -> None:
        if halved == (call, step):
            with torch.no_grad():
                model.embed.weight.mul_(0.5)

    engine.step_state.commit = committing  # type: ignore[method-assign]
    model.layers[1].register_forward_pre_hook(lambda *_: fault("forward", step))
    for step in range(context.step, STEPS):
        fault("fetch", step)
        for micro in range(accumulate):
            x, y = next(batches)
            if micro == 0:
                counted = rayzero.mean_over_ranks(float(y.sum()))
                fault("counted", step)
            out = model(x)
            out.register_hook(lambda _, step=step: fault("backward", step))
            loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
            (loss / accumulate).backward()
        seen.losses, seen.means = [*seen.losses, loss.detach()], [*seen.means, counted]
        fault("pushed", step)
        if step % 2 == 0:
            fault("norm", step)
            optimizer.clip_grad_norm_(0.5)
            fault("clipped", step)
        halve("step", step)
        optimizer.step()
        fault("stepped", step)
        scheduler.step()
        optimizer.zero_grad()
        seen.means = [*seen.means, rayzero.mean_over_ranks(float(seen.losses[-1]))]
        fault("mean", step)
        if step == saves:
            halve("save", step)
            fault("saving", step)
            rayzero.save_checkpoint(optimizer, folder / f"step-{step + 1}")
            fault("saved", step)
            fault("writing", step)
            with torch.no_grad():
                model.head.bias.fill_(0.25)
                model(x)
            fault("written", step)
    counts = engine.store.means, engine.store.saves  # the lead orders calls of all lives by them
    states = rayzero.full_state_dict(model), optimizer.state_dict()
    return context.life, (*states, seen.losses, seen.means, scheduler.get_last_lr(), counts)


def same(ours: Any, theirs: Any) -> bool:
    """Whether all ranks' results have the same bits."""
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        (weights, states, losses, *rest), (w, s, ls, *r) = mine, other
        if not same_bits(weights, w) or rest != r or [float(x) for x in losses] != [float(x) for x in ls]:
            return False
        if states["param_groups"] != s["param_groups"] or states["state"].keys() != s["state"].keys():
            return False
        for key, state in states["state"].items():
            if any(not torch.equal(torch.as_tensor(state[n]), torch.as_tensor(s["state"][key][n])) for n in state):
                return False
    return True


@functools.cache
def base() -> nn.Module:
    torch.manual_seed(3)
    return Small()


def run(folder: Path, *at: Point, transport: str = "inproc", processes: bool = False, who: int = 1, **more: Any) -> Any:
    """A run in which rank ``who`` dies at each of ``at``; checks that it did."""
    one = functools.partial(loop, base=base(), folder=folder, at=at, who=who, processes=processes, **more)
    found = run_ranks(
        one,
        2,
        2,
        transport,
        processes,
        stall_timeout=30.0,
        max_failures=len(at),  # type: ignore[arg-type]
    )
    assert [life for life, _ in found] == [len(at) if rank == who else 0 for rank in range(2)]
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("plain"))


needs_shm = needs.shared_memory


WRITTEN = [("forward", AT + 1), ("backward", AT + 1), ("pushed", AT + 1)]
"""Step AT's end has changed a bias, which the owners get with the next step's finish."""
OTHERS = product(["fetch", "finished", "stepped"], [0, 1, STEPS - 1])


@pytest.mark.spread(9)
@pytest.mark.parametrize("at", [*((point, AT) for point in POINTS), *OTHERS, *WRITTEN])
def test_a_thread_that_dies_repeats_its_step(at: Point, undisturbed: Any, tmp_path: Path) -> None:
    assert same(run(tmp_path, at), undisturbed)


TWICE: tuple[Point, ...] = (("pushes", 1), ("finished", 2))
GRPC: tuple[Point, ...] = (("forward", 1), ("pushes", 1), ("clipped", 2), ("finished", 2), ("saving", 2))
SHM: tuple[Point, ...] = (("backward", 1), ("finish", 1), ("stepped", 1), ("pushed", 2), ("writing", 2))


@pytest.mark.promise("recoverable", "accumulation")
@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("transport", "deaths"), [("grpc", TWICE), ("grpc", GRPC), pytest.param("shm", SHM, marks=needs_shm)]
)
def test_a_process_that_is_killed_repeats_its_step(
    transport: str, deaths: tuple[Point, ...], undisturbed: Any, tmp_path: Path
) -> None:
    assert same(run(tmp_path, *deaths, transport=transport, processes=True), undisturbed)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("transport", "deaths"),
    [("inproc", (("backward", 1), ("pushes", 1), ("pushed", 2))), ("grpc", (("pushed", 2),))],
)
def test_a_rank_may_push_often_before_it_dies(transport: str, deaths: tuple[Point, ...], tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", accumulate=3)
    assert same(run(tmp_path / "killed", *deaths, accumulate=3, transport=transport), plain)


@pytest.mark.parametrize(
    ("halved", "point", "tracks"),
    [
        (("save", AT), ("saved", AT), True),
        (("step", AT), ("finish", AT), True),
        (("step", 0), ("finish", 0), True),
        (("step", 0), ("finish", 0), False),
    ],
)
def test_a_write_that_a_repeat_would_make_twice_is_refused_by_name(
    halved: Point, point: Point, tracks: bool, tmp_path: Path
) -> None:
    """The repeat's forward would also begin with what was written. Only a checkpoint has what was there before."""
    with pytest.raises(StateLostError, match=r"cannot repeat step \d: it had written to 'embed'"):
        run(tmp_path, point, who=0, halved=halved, tracks=tracks)


def test_a_write_in_a_step_that_is_decided_is_not_made_again(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", halved=("step", AT))
    assert same(run(tmp_path / "killed", ("saved", AT), halved=("step", AT)), plain)


def test_a_loop_that_tracks_nothing_is_refused_by_name_after_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(UntrackedError, match=r"rank 1 .* cannot repeat step 2: its state was not kept, because it t"):
        run(tmp_path, ("forward", AT), tracks=False)


@pytest.mark.parametrize("point", ["backward", "stepped"])
def test_the_checkpoint_that_the_run_began_with_may_be_gone(point: str, tmp_path: Path) -> None:
    run(tmp_path)
    began = tmp_path / f"step-{AT + 1}"
    resumed = run_ranks(functools.partial(loop, base=base(), folder=tmp_path / "plain"), 2, 2, resume=began)

    def faults(context: RankContext) -> Callable[[str, int], None]:
        fault = Fault(context, 1, ((point, STEPS - 1),), False)

        def at(point: str, step: int) -> None:
            if fault.armed and (point, step) == fault.at:
                shutil.rmtree(began)
            fault(point, step)

        return at

    one = functools.partial(loop, base=base(), folder=tmp_path / "later", faults=faults)
    found = run_ranks(one, 2, 2, resume=began, max_failures=1)
    assert [life for life, _ in found] == [0, 1]
    assert not began.exists()
    assert same(found, resumed)


def newest(context: RankContext, folder: Path) -> Path | None:
    return rayzero.newest_checkpoint(folder)


def newest_at_first(context: RankContext, folder: Path) -> Path | bool | None:
    """A later life may say anything."""
    return (rayzero.newest_checkpoint(folder), None, False)[context.life]


NEWER: tuple[Point, ...] = (("written", AT), ("forward", AT + 1), ("stepped", AT + 1))


@pytest.mark.parametrize("point", NEWER, ids=lambda point: "-".join(map(str, point)))
def test_a_loop_that_names_its_newest_checkpoint_does_not_begin_again_with_what_its_run_has_saved(
    point: Point, undisturbed: Any, tmp_path: Path
) -> None:
    assert same(run(tmp_path, point, resume=functools.partial(newest, folder=tmp_path)), undisturbed)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that began with a checkpoint: its folder, and the results of its ranks."""
    folder = tmp_path_factory.mktemp("resumed")
    run(folder)
    return folder, run(folder, resume=functools.partial(newest, folder=folder), saves=AT + 1)


RESUMED: tuple[tuple[Point, ...], ...] = (
    (("forward", AT + 1),),
    (("finished", AT + 1), ("forward", AT + 1)),
    (("saved", AT + 1), ("fetch", AT + 2)),
    (("forward", AT + 2), ("stepped", AT + 2)),
)


@pytest.mark.spread(1)
@pytest.mark.parametrize("names", [newest, newest_at_first])
@pytest.mark.parametrize("deaths", RESUMED)
@pytest.mark.parametrize("transport", ["inproc", "grpc", pytest.param("shm", marks=needs_shm)])
def test_a_later_life_begins_with_the_checkpoint_that_its_run_began_with(
    transport: str, deaths: tuple[Point, ...], names: Callable[..., Any], resumed: Any, tmp_path: Path
) -> None:
    folder, expected = resumed
    shutil.copytree(folder / f"step-{AT + 1}", tmp_path / f"step-{AT + 1}")
    resume = functools.partial(names, folder=tmp_path)
    found = run(tmp_path, *deaths, transport=transport, processes=transport != "inproc", resume=resume, saves=AT + 1)
    assert (tmp_path / f"step-{AT + 2}").is_dir()
    assert same(found, expected)


class Finishes:
    """A store that takes finishes."""

    def __init__(self) -> None:
        self.attempts: list[int] = []

    def finish(self, report: FinishReport, inputs: StepInputs | None) -> Future[None]:
        self.attempts.append(report.attempt)
        return Future()


def test_a_later_life_counts_its_attempts_above_those_of_earlier_ones_in_every_step() -> None:
    """Not only in the step that it repeats: an earlier life may have pushed in the next one, too, before what it kept
    of its loop had arrived."""
    store = Finishes()
    transfers = cast(Any, SimpleNamespace(store=store))
    step = RankStep(transfers, NullRecorder(), rank=1, world_size=2, num_units=1, step=AT, life=2)
    for _ in range(2):
        step.commit((), None)
    assert store.attempts == [2 * ATTEMPTS, 2 * ATTEMPTS]


def test_the_error_is_todays_when_no_failure_is_left(tmp_path: Path) -> None:
    one = functools.partial(loop, base=base(), folder=tmp_path, at=(("forward", 1), ("forward", 1)))
    with pytest.raises(Killed) as caught:
        run_ranks(one, 2, 2, max_failures=1)
    assert any("on rank 1" in note for note in caught.value.__notes__)


def test_a_killed_process_ends_the_run_unless_failures_are_allowed(tmp_path: Path) -> None:
    one = functools.partial(loop, base=base(), folder=tmp_path, at=(("forward", 1),), processes=True)
    with pytest.raises(RunFailedError, match="the process of rank 1 died"):
        run_ranks(one, 2, 2, "grpc", True)
