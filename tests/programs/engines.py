"""Running a case under RayZero, and what came of it."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from engine.models import seeded, tight
from store.stores import STORES
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.errors import RayZeroError
from rayzero.protocol.store import ParameterStore
from rayzero.telemetry.recorder import Recorder
from rayzero.testing import run_ranks

from .case import Case, Run, difference
from .oracle import Outcome, oracle

LIMIT_S = 100.0  # of one run of a case; what is not over by then hangs
PROCESSES_LIMIT_S = 200.0  # where ranks are processes, which import torch first
STALL_S = 30.0  # a rank's wait for a peer that makes no progress ends by itself after this
OWNERS = 2
HERE = str(Path(__file__).parent)


RESIDENCIES: dict[str, dict[str, Any]] = {
    "one ahead": {"prefetch_buffer_size": 1},
    "none ahead": {"async_prefetch": False},
    "sums on device": {"prefetch_buffer_size": 1, "offload_grads": False},
    "all up": {},
}


@dataclass(frozen=True)
class Setting:
    """Where a case runs."""

    category: str  # the cases are those of test_<category>.py
    ranks: int
    precision: str
    store: str
    residency: str = "one ahead"

    def __str__(self) -> str:
        where = self.store if self.residency == "one ahead" else self.residency.replace(" ", "-")
        return f"{self.ranks}-{self.precision}-{where}"


@dataclass(frozen=True)
class Result:
    """What came of a run: "same", "refused", "wrong", "hangs" or "error", and why."""

    kind: str
    reason: str = ""


def run_rayzero(case: Case, setting: Setting) -> Result:
    """Train under RayZero on ranks that are threads (processes where the program draws) and compare."""
    try:
        outcomes = _outcomes(case, setting)
    except RayZeroError as exc:
        return Result("refused", f"{type(exc).__name__}: {exc}")
    except TimeoutError as exc:
        return Result("hangs", str(exc))
    except Exception as exc:
        return Result("error", f"{type(exc).__name__}: {exc}\n" + "".join(traceback.format_exception(exc)))
    adds_up = "offload_grads" in RESIDENCIES[setting.residency] | dict(case.settings)
    return compare(case, outcomes, oracle(case, setting.ranks, setting.precision, adds_up=adds_up))


def compare(case: Case, outcomes: list[Outcome], expected: list[Outcome], tolerance: float | None = None) -> Result:
    """Compare each rank's state and what its program returned with its replica's."""
    for rank, (mine, its) in enumerate(zip(outcomes, expected, strict=True)):
        for what, value, right in (("state", mine[0], its[0]), ("returned", mine[1], its[1])):
            gap, where = difference(value, right)
            if gap > (case.tolerance if tolerance is None else tolerance):
                return Result("wrong", f"{what} {where} of rank {rank} differs by {gap:.1e}")
    return Result("same")


def _outcomes(case: Case, setting: Setting) -> list[Outcome]:
    if case.draws and setting.ranks > 1:
        transport = "shm" if setting.store in ("shm", "mixed") else "grpc"
        loop = functools.partial(_train_in_process, case.name, setting)
        return limited(
            lambda: run_ranks(loop, setting.ranks, OWNERS, transport, processes=True, stall_timeout=STALL_S),
            PROCESSES_LIMIT_S,
        )
    models = [_models(case) for _ in range(setting.ranks)]  # here: ranks that are threads share the generator

    def loop(context: RankContext) -> Outcome:
        return train_rank(case, setting, models[context.rank], context)

    with STORES[setting.store](setting.ranks, OWNERS, stall_timeout=STALL_S) as stores:

        def connect(rank: int, _: Recorder, model: int) -> ParameterStore:
            return stores.connect(rank, model)

        return limited(lambda: run_ranks(loop, setting.ranks, OWNERS, connect), LIMIT_S)


def _models(case: Case) -> list[nn.Module]:
    return [seeded(build) for build in (case.build, *case.others)]


def train_rank(case: Case, setting: Setting, models: list[nn.Module], context: RankContext) -> Outcome:
    """One rank's program under RayZero."""
    if case.draws:
        torch.manual_seed(context.rank)
    run, *others = [_prepared(case, setting, model, context) for model in models]
    run.others = tuple(others)
    seen = case.program(run)
    return run.full_state(), seen


def _prepared(case: Case, setting: Setting, model: nn.Module, context: RankContext) -> Run:
    model, given = case.start(model, context.rank)
    config = _config(case, setting, model)
    model, optimizer = rayzero.prepare(model, case.optimizer(model), config, units=case.units, **given)
    return Run(
        engine="rayzero",
        rank=context.rank,
        world_size=context.world_size,
        model=model,
        optimizer=optimizer,
        clip=optimizer.clip_grad_norm_,
        clip_value=optimizer.clip_grad_value_,
        full_parameters=functools.partial(rayzero.full_parameters, model),
        full_state=functools.partial(rayzero.full_state_dict, model),
    )


def _config(case: Case, setting: Setting, model: nn.Module) -> ZeroConfig:
    settings = {"gradient_accumulation_steps": case.backwards, "shard_bytes": 16 << 10}
    settings |= {"precision": setting.precision} | RESIDENCIES[setting.residency] | dict(case.settings)
    budget = settings.pop("gpu_param_memory_budget", None)
    if budget is not None:
        return ZeroConfig(gpu_param_memory_budget=budget, **settings)
    if setting.residency == "all up":
        return ZeroConfig(**settings)
    ahead = settings.get("prefetch_buffer_size", 0)
    return tight(model, units=case.units, spare=case.spare + 1 - ahead, **settings)


def _train_in_process(name: str, setting: Setting, context: RankContext) -> Outcome:
    case = find(setting.category, name)
    return train_rank(case, setting, _models(case), context)


def find(category: str, name: str) -> Case:
    """The case of that name in test_<category>.py."""
    return next(case for case in cases_of(category) if case.name == name)


def cases_of(category: str) -> list[Case]:
    """The cases of test_<category>.py, in its order."""
    return list(importlib.import_module(f"{__package__}.test_{category}").CASES)


def categories() -> list[str]:
    """Every category there is."""
    files = sorted(Path(HERE).glob("test_*.py"))
    return [
        file.stem.removeprefix("test_")
        for file in files
        if "\nCASES" in file.read_text() and file.stem != "test_harness"
    ]


def limited(act: Callable[[], Any], seconds: float, since: threading.Event | None = None) -> Any:
    """What ``act`` returns or raises; TimeoutError that names who waits for what when it takes too long.

    ``since``: set by ``act`` where its ``seconds`` begin; at once without."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append((act(), None))
        except BaseException as exc:  # handed to the caller
            ended.append((None, exc))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if since is not None:
        since.wait(LIMIT_S)
    thread.join(seconds)
    if not ended:
        raise TimeoutError(waiting())
    result, failure = ended[0]
    if failure is not None:
        raise failure
    return result


def waiting() -> str:
    """Where every rank of this process is, in words."""
    frames = sys._current_frames()
    ranks = [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]
    found = [f"{thread.name} waits in {place(frames.get(thread.ident or 0))}" for thread in ranks]
    return "; ".join(found) or "no rank is left"


def place(frame: FrameType | None) -> str:
    """The call in the package or in torch that a thread is in, and the line of the program that made it."""
    stack = traceback.extract_stack(frame)
    ours = [at for at in stack if f"{os.sep}threading.py" not in at.filename and "concurrent" not in at.filename]
    program = [at for at in ours if at.filename.startswith(HERE) and f"{os.sep}test_" in at.filename]
    inner = f"{ours[-1].name} ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else "an unknown place"
    return inner + (f", called by {program[-1].name}: {program[-1].line}" if program else "")


@contextmanager
def debug(setting: Setting) -> Iterator[None]:
    """NaN in buffers that are swapped out; not over shared memory, which is read in place."""
    before = os.environ.get("RAYZERO_DEBUG")
    os.environ["RAYZERO_DEBUG"] = "0" if setting.store in ("shm", "mixed") else "1"
    yield
    if before is None:
        del os.environ["RAYZERO_DEBUG"]
    else:
        os.environ["RAYZERO_DEBUG"] = before
