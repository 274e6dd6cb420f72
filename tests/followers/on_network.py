"""A run of ``run_ranks`` as its folder describes it to followers that share no memory with it."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rayzero.cluster.files.key_files import FOLLOWER_FILE, FollowerKey, write_key
from rayzero.config import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.files import replace_file
from rayzero.security.credentials import Identity, follower_token

STARTED = time.time()


def describe(context: RankContext, folder: Path, **entries: Any) -> None:
    """Write ``run.json`` and the followers' key as a driver does, from what a rank knows."""
    connect: Any = context.connect
    of_owners = connect.args[1]  # OwnersHere.connect: what reaches the owners, with their table
    table, reach = of_owners.args[0], of_owners.func
    record = {
        "run": context.run,
        "state": "running",
        "started_at": STARTED,
        "driver": {"pid": os.getpid(), "host": socket.gethostname()},
        "addresses": list(table._addresses),
        "config": {"zero": ZeroConfig(transport="grpc").model_dump(mode="json")},
    }
    write_key(folder, FOLLOWER_FILE, key(reach.service.token, reach.service.tls))
    replace_file(folder / "run.json", json.dumps(record | entries))


def key(token: str, tls: Identity | None) -> FollowerKey:
    """What a driver writes for followers."""
    if tls is None:
        return FollowerKey(token=follower_token(token))
    shown = {name: text.decode() for name, text in asdict(tls.now).items() if isinstance(text, bytes)}
    return FollowerKey(token=follower_token(token), on_loopback=tls.now.on_loopback, **shown)
