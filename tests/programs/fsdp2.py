"""The same cases under FSDP2: two processes over gloo on the CPU, each case under a time limit."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any

import torch
from engine.models import seeded
from torch import Tensor, nn

from .case import Case, Run
from .engines import Result, Setting, compare, find, place
from .oracle import Outcome, oracle

RANKS = 2
LIMIT_S = 20.0  # of one case; what is not over by then hangs
GRACE_S = 3.0  # for the other rank once one has failed
START_S = 120.0


@dataclass(frozen=True)
class Failed:
    """Why a rank did not get through a case, and whether fully_shard itself refused it."""

    reason: str
    refused: bool


class Fsdp2Ranks:
    """Two rank processes that train one case after the other; new ones after a failure."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        """``limit_s``: of one case, seconds."""
        self._limit_s = limit_s
        self._pipes: list[Connection] = []
        self._children: list[Any] = []
        self._place: TemporaryDirectory[str] | None = None

    def train(self, case: Case, setting: Setting) -> Result:
        """Run a case and compare each rank with the oracle."""
        expected = oracle(case, RANKS, "fp32") if case.refused is None else []
        self._start()
        for pipe in self._pipes:
            pipe.send((setting.category, case.name, self._limit_s))
        found = self._answers()
        failures = [answer for answer in found if isinstance(answer, Failed)]
        if failures and any(answer != found[0] for answer in found):  # else all stopped at the same place
            self.close()
        if failures:
            waits = " (the other rank hangs)" if None in found else ""
            return Result("refused" if failures[0].refused else "error", failures[0].reason + waits)
        hung = [answer for answer in found if isinstance(answer, str)]
        if hung or None in found:  # the other ranks wait for them
            self.close()
            return Result("hangs", hung[0] if hung else "")
        if case.refused is not None:
            return Result("runs")
        outcomes: list[Outcome] = [pickle.loads(answer) for answer in found]
        return compare(case, outcomes, expected, max(case.tolerance, 1e-6))

    def _answers(self) -> list[Any]:
        """What each rank sent: bytes of its outcome, a Failed, text of where it hangs, or None."""
        found: dict[int, Any] = {}
        limit = self._limit_s + GRACE_S
        while len(found) < RANKS:
            ready = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in found], limit)
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    found[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    found[rank] = Failed("the process died", refused=False)
                if not isinstance(found[rank], bytes):
                    limit = GRACE_S
        return [found.get(rank) for rank in range(RANKS)]

    def _start(self) -> None:
        if self._children:
            return
        server = multiprocessing.get_context("forkserver")  # imports torch once for all the processes that follow
        server.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "rayzero.testing"])
        self._place = TemporaryDirectory()
        for rank in range(RANKS):
            ours, theirs = server.Pipe()
            child = server.Process(target=_serve, args=(rank, f"file://{self._place.name}/store", theirs), daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)
        for pipe in self._pipes:
            assert pipe.poll(START_S), "a rank does not start"
            assert pipe.recv() == "ready"

    def close(self) -> None:
        """End the processes, in the middle of what they do."""
        for child in self._children:
            child.kill()
            child.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._children = [], []
        if self._place is not None:
            self._place.cleanup()
            self._place = None


# ---- in a rank's process ----------------------------------------------------------------------------------------


def _serve(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    pipe.send("ready")
    while True:
        category, name, limit_s = pipe.recv()
        case = find(category, name)
        seeded(case.build)  # also imports what the case needs: not part of its time
        with _telling_of_hangs(rank, pipe, limit_s):
            answer = _train(case, rank)
        pipe.send(answer)


@contextmanager
def _telling_of_hangs(rank: int, pipe: Connection, limit_s: float) -> Iterator[None]:
    main = threading.get_ident()
    timer = threading.Timer(limit_s, lambda: pipe.send(f"rank {rank} waits in {place(sys._current_frames()[main])}"))
    timer.start()
    yield
    timer.cancel()


def _train(case: Case, rank: int) -> bytes | Failed:
    refused = True
    try:
        models = [seeded(build) for build in (case.build, *case.others)]
        if case.draws:
            torch.manual_seed(rank)
        started = [case.start(model, rank) for model in models]
        for model, given in started:
            _shard(model, case)
            _bring(model, **given)
        refused = False
        run, *others = [_run(case, rank, model) for model, _ in started]
        run.others = tuple(others)
        seen = _full(case.program(run))
        return pickle.dumps((run.full_state(), seen))
    except Exception as exc:  # told to the parent, whatever it is
        traceback.clear_frames(exc.__traceback__)
        return Failed(f"{type(exc).__name__}: {exc}", refused)


def _run(case: Case, rank: int, model: nn.Module) -> Run:
    return Run(
        engine="fsdp2",
        rank=rank,
        world_size=RANKS,
        model=model,
        optimizer=case.optimizer(model),
        clip=lambda max_norm: _full(nn.utils.clip_grad_norm_(model.parameters(), max_norm)),
        clip_value=lambda value: nn.utils.clip_grad_value_(model.parameters(), value),
        full_parameters=lambda modify=False: _unsharded(model),
        full_state=lambda: _state(model),
    )


def _shard(model: nn.Module, case: Case) -> None:
    """Shard each entry of each list of modules (or what the case's rule chooses), then the rest with the root."""
    from torch.distributed.fsdp import fully_shard

    lists = (nn.ModuleList, nn.Sequential)
    entries = {id(child) for module in model.modules() if isinstance(module, lists) for child in module.children()}
    rule = case.units if callable(case.units) else lambda name, module: id(module) in entries
    for name, module in reversed(list(model.named_modules())):
        own = any(True for _ in module.parameters()) and not isinstance(module, (*lists, nn.ModuleDict))
        if name and own and rule(name, module):
            fully_shard(module)
    fully_shard(model)


def _bring(model: nn.Module, weights: Any = None, init: Callable[[nn.Module], object] | None = None) -> None:
    """Values for a model on meta, as FSDP2's documentation has it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if weights is not None or init is not None:
        model.to_empty(device="cpu")
    if weights is not None:
        set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))
    if init is not None:
        model.apply(init)


@contextmanager
def _unsharded(model: nn.Module) -> Iterator[None]:
    from torch.distributed.fsdp import FSDPModule

    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.unshard()
    yield
    for group in groups:
        group.reshard()


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: _full(value).detach().clone() for name, value in model.state_dict().items()}


def _full(tree: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if isinstance(tree, DTensor):
        return tree.full_tensor()
    if isinstance(tree, list | tuple):
        return type(tree)(_full(item) for item in tree)
    if isinstance(tree, dict):
        return {key: _full(item) for key, item in tree.items()}
    return tree
