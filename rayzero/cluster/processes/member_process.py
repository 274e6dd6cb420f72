"""What a run's driver asks of a rank worker and an optimizer actor alike: of the owner in it, and of its host."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rayzero.cluster.nodes.reachability import unreachable
from rayzero.cluster.processes.owner_process import ServedOwner

__all__ = ["MemberProcess"]


class MemberProcess:
    """A process that may have an owner in it: a rank worker, or an optimizer actor."""

    _owner: ServedOwner | None  # None: it is no owner, or none yet

    @property
    def _served(self) -> ServedOwner:
        assert self._owner is not None, "this process is no owner, or none yet"
        return self._owner

    # ---- the owner

    def serve(self, host: str) -> str:
        """See ``ServedOwner.serve``."""
        return self._served.serve(host)

    def tensor_address(self, address: str) -> str:
        """See ``OwnerServer.tensor_address``."""
        return self._served.tensor_address(address)

    def listen(self, host: str) -> str:
        """See ``ServedOwner.listen``."""
        return self._served.listen(host)

    def connect_peers(self, addresses: Sequence[str]) -> None:
        """See ``ServedOwner.connect_peers``."""
        self._served.connect_peers(addresses)

    def lose(self, rank: int, life: int) -> None:
        """See ``ServedOwner.lose``."""
        self._served.lose(rank, life)

    def abandon(self) -> None:
        """See ``OwnerServer.abandon``."""
        self._served.abandon()

    # ---- the host

    def unreachable(self, addresses: Sequence[str]) -> dict[str, str]:
        """Those owners' addresses that this host does not reach, and why."""
        return unreachable(addresses)

    def sees(self, path: str) -> bool:
        """Whether a file that the driver has written is on this host, too, where this process may look."""
        return os.path.exists(path)  # Path.exists() raises what a folder without permission does
