"""Measures what followers on the run's host cost a step, and how long a version takes to reach one.

    python -m lab followers [--network] [--followers 0 1 4] [--rounds 5] [--steps 4] [--dim 512] [--layers 8]

One rank trains the GPT of ``python -m lab step`` in bf16, with two owners. Followers are processes of their own, each
reads every version it can; rounds play the numbers of followers in turn. A ratio is of the step without followers of
the same round. A follower's seconds are those of the copy, after it has seen that a version is there. With --network
followers map no memory and are served as those of other hosts, with calls over this host's loopback. Beside them:
gathering all weights, writing a safetensors file and reading that, as a loop without followers does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Queue
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import rayzero
from lab.bench.figures import Spread, at_least_one, timed
from lab.bench.work import ADAMW, Work, loss_of
from lab.costs.follow_links import opened, way_to
from rayzero.engine.context import RankContext
from rayzero.errors import StallError, VersionGoneError
from rayzero.testing import run_ranks

_LOOK_S = 0.2  # between two looks of a follower that has no turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--followers", type=int, nargs="+", default=[0, 1, 4])
    for name, default in (("rounds", 5), ("steps", 4), ("dim", 512), ("layers", 8)):
        parser.add_argument(f"--{name}", type=at_least_one, default=default)
    args = parser.parse_args()
    work = Work(precision="bf16", dim=args.dim, layers=args.layers)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        ways, copies = manager.Queue(), manager.Queue()
        turns, over = [manager.Event() for _ in range(max(args.followers))], manager.Event()
        followers = [context.Process(target=follow, args=(ways, turn, over, copies)) for turn in turns]
        for follower in followers:
            follower.start()
        train = partial(take_turns, work, args, ways, turns)
        try:
            config = rayzero.ZeroConfig(precision=work.precision)
            played, saved = run_ranks(train, 1, 2, "shm", processes=True, config=config)[0]
        finally:
            over.set()
            for follower in followers:
                follower.join()
        taken = [copies.get() for _ in range(copies.qsize())]
    count, alone = work.count_params(), played[args.followers[0]]
    print(f"{count / 1e6:.1f}M parameters, bf16, {2 * count / 1e6:.0f} MB a version")
    for number, seconds in played.items():
        ratio = Spread.of(now / before for now, before in zip(seconds, alone, strict=True))
        print(f"  {number} followers  {Spread.of(seconds).text(1e3, 0)} ms a step, {ratio.text()} x none")
    if taken:
        print(f"  a copy by a follower  {Spread.of(taken).text(1e3, 0)} ms ({len(taken)} versions)")
    print(f"  gathered, saved, loaded  {Spread.of(saved).text(1e3, 0)} ms")


def follow(ways: Queue[Any], turn: Event, over: Event, copies: Queue[float]) -> None:
    """A follower's process: while it has its turn, it reads every version that it sees."""
    torch.set_num_threads(1)
    while ways.empty():
        if over.wait(_LOOK_S):
            return
    way = ways.get()
    ways.put(way)
    with rayzero.follow(way) if isinstance(way, str) else opened(*way) as follower:
        while not over.is_set():
            if not turn.wait(_LOOK_S):
                continue
            try:
                version = follower.wait(timeout_s=_LOOK_S)
                copies.put(timed(lambda version=version: [None for _ in follower.read(version, timeout_s=_LOOK_S)]))
            except (StallError, VersionGoneError):
                continue  # a turn without steps; a version that was overwritten meanwhile


def take_turns(
    work: Work, args: argparse.Namespace, ways: Queue[Any], turns: list[Event], context: RankContext
) -> tuple[dict[int, list[float]], list[float]]:
    """The rank's loop; returns seconds a step by number of followers, one figure a round, and of saves and loads."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    model = work.model()
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW))
    ways.put(way_to(context) if args.network else context.run)
    step = 0

    def take(count: int) -> list[float]:
        nonlocal step
        found = []
        for _ in range(count):
            began = time.perf_counter()
            loss_of(model, work.batch_of(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(time.perf_counter() - began)
            step += 1
        return found

    take(3)
    played: dict[int, list[float]] = {number: [] for number in args.followers}
    for _ in range(args.rounds):
        for number in args.followers:
            for turn in turns[:number]:
                turn.set()
            take(1)
            played[number].append(median(take(args.steps)))
            for turn in turns:
                turn.clear()
    with tempfile.TemporaryDirectory() as folder:
        saved = [timed(partial(save_and_load, model, Path(folder) / "model.safetensors")) for _ in range(args.rounds)]
    return played, saved


def save_and_load(model: Any, path: Path) -> None:
    """What a loop does for an engine that follows nothing."""
    weights = {name: value.to(torch.bfloat16).clone() for name, value in rayzero.full_state_dict(model).items()}
    save_file(weights, path)
    load_file(path)
