"""``SecurityConfig``: how connections between a run's processes are protected."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from rayzero.config.base import ConfigModel


class SecurityConfig(ConfigModel):
    """Says how connections between optimizer actors and ranks are protected. Ray's own are not, and
    metrics have run.telemetry.web_config: see SECURITY.md."""

    tls: Literal["auto", "always", "never"] = "auto"
    """Mutual TLS. "auto": on every connection that is not to a loopback address. "always": on those too. "never":
    gradients, weights and the run's token cross the network in clear."""

    certificate: str | None = None
    """PEM file of the certificate that every process shows, with the DNS names owner.rayzero and rank.rayzero, read
    where the run is started, and again when the file changes; null: the run makes an authority of its own, and for each
    process a certificate that lasts a day and is renewed."""

    key: str | None = None
    """PEM file of the certificate's private key."""

    authority: str | None = None
    """PEM file of the authority whose certificates are accepted. Whoever has one with a name of a role may join."""

    @model_validator(mode="after")
    def _all_files_or_none(self) -> Self:
        given = [name for name in ("certificate", "key", "authority") if getattr(self, name) is not None]
        if given and len(given) < 3:
            raise ValueError(f"{' and '.join(given)} without the rest; pass certificate, key and authority, or none")
        if given and self.tls == "never":
            raise ValueError('certificate is set but tls is "never"; leave one of them out')
        return self
