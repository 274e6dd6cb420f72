"""Runs a training loop on several ranks on this machine, without Ray: see ``run_ranks``."""

from rayzero.testing.members import Killed
from rayzero.testing.ranks import Transport, run_ranks

__all__ = ["Killed", "Transport", "run_ranks"]
