"""A run of ``run_ranks`` as its folder describes it to followers that share no memory with it."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from rayzero.cluster.files.key_files import FOLLOWER_FILE, FollowerKey, write_key
from rayzero.config import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.files import replace_file
from rayzero.security.credentials import follower_token

STARTED = time.time()


def describe(context: RankContext, folder: Path, **entries: Any) -> None:
    """Write ``run.json`` and the followers' key as a driver does, from what a rank knows."""
    connect: Any = context.connect
    of_owners = connect.args[1]  # OwnersHere.connect: what reaches the owners, with their table
    table, service = of_owners.args[0], of_owners.func.__self__
    record = {
        "run": context.run,
        "state": "running",
        "started_at": STARTED,
        "driver": {"pid": os.getpid(), "host": socket.gethostname()},
        "addresses": list(table._addresses),
        "config": {"zero": ZeroConfig(transport="grpc").model_dump(mode="json")},
    }
    shown = None if service.tls is None else service.tls.now
    write_key(folder, FOLLOWER_FILE, FollowerKey(token=follower_token(service.token), tls=shown))
    replace_file(folder / "run.json", json.dumps(record | entries))
