"""Measures how long a version takes to reach a follower on another host, over links of 1 and 10 Gbit/s. Only as root.

    python -m lab follow_links [--gbit 1 10] [--rates 1e-6 1e-5] [--rounds 5] [--dim 512] [--layers 8]

One rank trains the GPT of ``python -m lab step`` in bf16 with two owners, which share memory. All calls of the follower
go over the loopback device of a network namespace, which the kernel's token bucket holds to the rate of a link. Seconds
are from the return of a step with ``overlap="none"``, which is after its last publication, until the follower has all:
``changes``: what a step at that learning rate has changed; ``whole``: by a follower that has nothing yet. Beside them,
over the same link, in the same rounds: ``file``: gathered, saved, sent by a bare socket, saved, loaded; ``gloo``:
gathered, and broadcast by torch.distributed, tensor by tensor, as engines take weights over a collective.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

import rayzero
from lab.bench.figures import Spread, at_least_one
from lab.bench.work import ADAMW, Work, loss_of
from rayzero.engine.context import RankContext
from rayzero.followers.follower import Follower
from rayzero.followers.remote_shards import RemoteRun
from rayzero.security.credentials import follower_token
from rayzero.store.wire.rpc import CallTerms
from rayzero.testing import run_ranks

_INSIDE = "RAYZERO_LAB_NAMESPACE"  # set in the process that has a network of its own
_BURST = "1mb"  # of the token bucket: what passes at once after a pause
_PATIENCE_S = 120.0  # for the follower: it may have died
_CHUNK = 1 << 20  # bytes of a bare socket's reads
Figures = dict[tuple[float, str], list[tuple[float, int]]]  # by Gbit/s and way: seconds and bytes, a round each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    for name, default in (("rounds", 5), ("dim", 512), ("layers", 8)):
        parser.add_argument(f"--{name}", type=at_least_one, default=default)
    args = parser.parse_args()
    if (code := in_namespace("follow_links")) is not None:
        return code
    work = Work(precision="bf16", dim=args.dim, layers=args.layers)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        orders, answers = manager.Queue(), manager.Queue()
        follower = context.Process(target=follow, args=(orders, answers, folder))
        follower.start()
        train = partial(take_turns, work, args, orders, answers, folder)
        try:
            config = rayzero.ZeroConfig(precision=work.precision, overlap="none")
            found: Figures = run_ranks(train, 1, 2, "shm", processes=True, config=config)[0]
        finally:
            orders.put(None)
            follower.join()
    print(f"{work.count_params() / 1e6:.1f}M parameters, bf16, {2 * work.count_params() / 1e6:.0f} MB a version")
    for (gbit, way), taken in found.items():
        seconds, sizes = zip(*taken, strict=True)
        print(f"  {gbit:g} Gbit/s  {way:14} {Spread.of(seconds).text(1e3, 0):>16} ms   {max(sizes) / 1e6:.1f} MB")
    return 0


def in_namespace(command: str) -> int | None:
    """Run this command of the lab in a network namespace of its own, and return its exit status; None: this is it."""
    if _INSIDE not in os.environ:
        again = ["unshare", "--net", sys.executable, "-m", "lab", command, *sys.argv[1:]]
        return subprocess.run(again, env=os.environ | {_INSIDE: "1"}).returncode
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return None


def hold(gbit: float) -> None:
    """Let no more than this pass through the namespace's loopback in a second."""
    limit = ["tbf", "rate", f"{gbit}gbit", "burst", _BURST, "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *limit], check=True)


# ---- the follower's process


def follow(orders: Queue[Any], answers: Queue[Any], folder: str) -> None:
    """Answer each order with when it was done, and with the bytes that came."""
    torch.set_num_threads(1)
    way, shapes = orders.get()

    def follower() -> Follower:
        made = opened(*way)
        made.wait(0)
        return made

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=1, world_size=2)
    steady = follower()
    for tensor_free in (steady.read(0),):
        list(tensor_free)
    server = socket.create_server(("127.0.0.1", 0))
    answers.put(server.getsockname()[1])
    while (order := orders.get()) is not None:
        way, version = order
        reader = follower() if way == "whole" else steady
        answers.put("ready")
        came = 0
        if way == "file":
            came = take_file(server, Path(folder) / "taken.safetensors")
        elif way == "gloo":
            came = take_broadcast(shapes)
        else:
            before = reader.stats()
            reader.wait(version)
            list(reader.read(version))
            after = reader.stats()
            came = after.whole_bytes + after.change_bytes - before.whole_bytes - before.change_bytes
        answers.put((time.monotonic(), came))
        if reader is not steady:
            reader.close()
        list(steady.read())
        answers.put("level")
    steady.close()
    dist.destroy_process_group()


def opened(run: str, addresses: list[str], token: str) -> Follower:
    """A follower over the network."""
    way = addresses, CallTerms(token=token)
    return Follower(RemoteRun(run, lambda: way), None, lambda: False)


def take_file(server: socket.socket, path: Path) -> int:
    """Write what comes over a connection to a file, and load it; returns its bytes."""
    connection, _ = server.accept()
    with connection, path.open("wb") as file:
        while chunk := connection.recv(_CHUNK):
            file.write(chunk)
    load_file(path)
    return path.stat().st_size


def take_broadcast(shapes: list[torch.Size]) -> int:
    """Take tensors of rank 0; returns their bytes."""
    taken = [torch.empty(shape, dtype=torch.bfloat16, device="cpu") for shape in shapes]
    for tensor in taken:
        dist.broadcast(tensor, 0)
    return sum(tensor.nbytes for tensor in taken)


# ---- the rank


def way_to(context: RankContext) -> tuple[str, list[str], str]:
    """What ``opened`` takes."""
    connect: Any = context.connect
    table, service = connect.args[1].args[0], connect.args[1].func.__self__
    return context.run, list(table._addresses), follower_token(service.token)


def take_turns(
    work: Work, args: argparse.Namespace, orders: Queue[Any], answers: Queue[Any], folder: str, context: RankContext
) -> Figures:
    """The rank's loop: at each link, in rounds, each way for one version."""
    model = work.model()
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW))  # type: ignore[arg-type]
    shapes = [value.shape for value in rayzero.full_state_dict(model).values()]
    orders.put((way_to(context), shapes))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=2)
    port = answers.get(timeout=_PATIENCE_S)
    step = 0

    def turn(way: str, rate: float) -> tuple[float, int]:
        """Seconds and bytes of the version that one step makes."""
        nonlocal step
        for group in optimizer.param_groups:
            group["lr"] = rate
        orders.put((way, step + 1))
        answers.get(timeout=_PATIENCE_S)
        loss_of(model, work.batch_of(step, 0)).backward()
        optimizer.step()
        began = time.monotonic()
        optimizer.zero_grad()
        step += 1
        if way == "file":
            give_file(weights_of(model), Path(folder) / "given.safetensors", port)
        elif way == "gloo":
            for value in weights_of(model).values():
                dist.broadcast(value, 0)
        ended, came = answers.get(timeout=_PATIENCE_S)
        answers.get(timeout=_PATIENCE_S)
        return ended - began, came

    found: Figures = defaultdict(list)
    ways = [(f"changes {rate:g}", rate) for rate in args.rates]
    ways += [(way, args.rates[0]) for way in ("whole", "file", "gloo")]
    for _ in range(3):
        turn("changes", args.rates[0])  # Adam's moments
    for gbit in args.gbit:
        hold(gbit)
        for _ in range(args.rounds):
            for way, rate in ways:
                found[gbit, way].append(turn(way, rate))
    dist.destroy_process_group()
    return dict(found)


def weights_of(model: Any) -> dict[str, Tensor]:
    """All weights, in bf16."""
    return {name: value.to(torch.bfloat16).clone() for name, value in rayzero.full_state_dict(model).items()}


def give_file(weights: dict[str, Tensor], path: Path, port: int) -> None:
    """Save weights and send the file."""
    save_file(weights, path)
    with socket.create_connection(("127.0.0.1", port)) as connection, path.open("rb") as file:
        connection.sendfile(file)


if __name__ == "__main__":
    sys.exit(main())
