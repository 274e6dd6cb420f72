"""A program that ends without closing anything, while RayZero computes, copies and waits: in silence and with its own
exit status. A daemon thread in torch's C++ when the interpreter goes ended the process: "terminate called", 134."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = """
    import threading

    import torch

    from rayzero.lanes import ThreadLane
    from rayzero.owner.shard import Updater
    from rayzero.store.owner.hosted import HostedModels
    from rayzero.store.owner.server import serve_models
    from rayzero.store.rank.rank_store import RankStore
    from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
    from store.toy import make_spec, random_grads, start, take_step

    spec = make_spec(1, kernel="torch")
    server = serve_models(HostedModels(0, 1), token="t")
    server.connect_peers([server.address])
    ranks = start([RankStore(RemoteConnection(0, [server.address], RankTerms(token="t")))], spec)
    take_step(ranks, [random_grads(spec, 1)])
    ranks[0].fetch_unit(0, 2)  # a version that never comes

    copies, computes = threading.Event(), threading.Event()
    lane = ThreadLane()
    values, there = (torch.ones(100_000_000, dtype=torch.uint8) for _ in range(2))
    for _ in range(20):
        lane.issue("out", lambda: copies.set() or there.copy_(values))

    def task():
        computes.set()
        values = torch.ones(100_000)
        for _ in range(5_000):
            values.mul_(0.5)

    updater = Updater("forgotten", 1, print)
    for _ in range(1_000):
        updater.submit(task)
    copies.wait()
    computes.wait()
    print("done")
"""


def test_a_program_that_closes_nothing_ends_well() -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM)]
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | paths)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
