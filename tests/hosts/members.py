"""An owner and ranks as a process of a host, without Ray: what a run's processes do between hosts.

It does what the lines of its stdin say, and answers each with a line:

serve NODE NETWORK   begin anew as an owner, which Ray knows by the address NODE; answers where it listens
connect ADDRESS...   know all owners
train ADDRESS...     train as all ranks; answers the digest
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

from store.stores import TOKEN
from store.toy import make_spec, masters, random_grads, start, take_step

from rayzero.cluster.nodes.reachability import unreachable
from rayzero.cluster.processes.owner_process import OwnerSettings, ServedOwner
from rayzero.protocol.ownership import Ownership
from rayzero.protocol.store import ParameterStore
from rayzero.security.authority import Authority
from rayzero.security.credentials import OWNER, Identity, name_of_rank
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.telemetry.recorder import MemoryRecorder

OWNERS, RANKS, STEPS = 2, 2, 20


def give_certificates(folder: Path) -> None:
    """Write what processes show, as the driver would send it."""
    run = Authority("hosts", on_loopback=False)
    shown = {f"owner {owner}": run.issue(f"optimizer {owner}", [OWNER]) for owner in range(OWNERS)}
    shown |= {f"rank {rank}": run.issue(f"rank {rank}", [name_of_rank(rank)]) for rank in range(RANKS)}
    (folder / "shown").write_bytes(pickle.dumps(shown))


def digest(stores: Sequence[ParameterStore]) -> str:
    """Of the masters after a training over these ranks' stores."""
    ranks = start(stores, make_spec(len(stores)))
    for step in range(STEPS):
        take_step(ranks, [random_grads(rank.spec, 10 * step + rank.rank) for rank in ranks], 0.5)
    found = sha256()
    for name, value in sorted(masters(ranks[0]).items()):
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


class Member:
    """What one process is."""

    def __init__(self, folder: Path, owner: int) -> None:
        self._shown, self._owner = pickle.loads((folder / "shown").read_bytes()), owner
        self._served: ServedOwner | None = None

    def serve(self, node: str, network: str = "") -> str:
        """``network``: empty: any."""
        if self._served is not None:
            self._served.stop()
        settings = OwnerSettings(
            owner=self._owner,
            num_owners=OWNERS,
            threads=1,
            memory_budget=None,
            share=None,
            norms_every=None,
            ownership=Ownership(OWNERS),
            token=TOKEN,
            tls=self._shown[f"owner {self._owner}"],
            network=network or None,
        )
        self._served = ServedOwner(settings, MemoryRecorder())
        return self._served.serve(node)

    def connect(self, *addresses: str) -> str:
        """See ``OwnerServer.connect_peers``."""
        assert self._served is not None
        self._served.server.connect_peers(addresses)
        return "connected"

    def train(self, *addresses: str) -> str:
        """As ranks that share no memory with owners."""
        if failed := unreachable(addresses):
            return str(failed)
        with ExitStack() as stack:
            stores = []
            for rank in range(RANKS):
                shown = Identity(self._shown[f"rank {rank}"])
                stores.append(RankStore(RemoteConnection(rank, addresses, RankTerms(token=TOKEN, tls=shown))))
                stack.callback(stores[-1].close)
            return digest(stores)


if __name__ == "__main__":
    member = Member(Path(sys.argv[1]), int(sys.argv[2]))
    for line in sys.stdin:
        order, *arguments = line.split()
        print(getattr(member, order)(*arguments), flush=True)
