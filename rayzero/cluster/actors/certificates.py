"""What the processes of one run show to each other and to readers of their metrics, as it is by now."""

from __future__ import annotations

import secrets

from rayzero.cluster.files.key_files import FollowerKey
from rayzero.cluster.run import optimizer_name, rank_name
from rayzero.config import SecurityConfig
from rayzero.security.addresses import is_loopback
from rayzero.security.authority import issuer
from rayzero.security.credentials import ANY_RANK, FOLLOWER, OWNER, Credentials, follower_token, name_of_rank
from rayzero.security.metrics_access import MetricsAccess
from rayzero.telemetry.guard import Protection
from rayzero.telemetry.scrape import Viewer


class Certificates:
    """The token and the credentials of one run, and what opens its exporters. They stay with the driver, and travel as
    arguments of actors alone.

    Knows ranks and owners by number; not their processes, nor when they get newer ones."""

    def __init__(self, run: str, security: SecurityConfig, access: MetricsAccess | None = None) -> None:
        """``access``: to the run's metrics; None: everybody has it. Raises ConfigError if files of the user's cannot be
        used."""
        self.token = secrets.token_hex(32)  # owners require it in every call
        self._issuer = issuer(run, security)
        self._access = access

    def of_owner(self, owner: int) -> Credentials | None:
        """What an owner shows to ranks and other owners; None: it uses no TLS."""
        return None if self._issuer is None else self._issuer.issue(optimizer_name(owner), [OWNER])

    def of_rank(self, rank: int | None) -> Credentials | None:
        """What a rank shows to owners; None: it uses no TLS. ``rank``: None: any."""
        who, name = ("any rank", ANY_RANK) if rank is None else (rank_name(rank), name_of_rank(rank))
        return None if self._issuer is None else self._issuer.issue(who, [name])

    def of_follower(self) -> FollowerKey:
        """What any follower shows to owners."""
        token = follower_token(self.token)
        shown = None if self._issuer is None else self._issuer.issue("a follower", [FOLLOWER])
        if shown is None:
            return FollowerKey(token=token)
        return FollowerKey(
            token=token,
            certificate=shown.certificate.decode(),
            key=shown.key.decode(),
            authority=shown.authority.decode(),
            on_loopback=shown.on_loopback,
        )

    def of_exporter(self, host: str, bind: str) -> Protection | None:
        """What an exporter that listens on ``host`` asks of its clients: what the web config says, or what only the
        run's own tools can show; None: nothing. ``bind``: of ``TelemetryConfig``."""
        access = self._access
        if access is None:
            return None
        return access.given or (access.own if bind == "auto" and not is_loopback(host) else None)

    @property
    def viewer(self) -> Viewer:
        """What opens the run's exporters to the coordinator's live page."""
        return Viewer() if self._access is None else self._access.viewer

    def refresh(self) -> bool:
        """Whether there is something newer for everybody than before. Called once a minute. Raises ConfigError if files
        of the user's cannot be used."""
        access = self._access is not None and self._access.refresh()
        return (self._issuer is not None and self._issuer.refresh()) or access

    @property
    def warnings(self) -> list[str]:
        sources = [source for source in (self._issuer, self._access) if source is not None]
        return [source.warning for source in sources if source.warning is not None]
