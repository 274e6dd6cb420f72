"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - Ray ends processes where others fill the machine

settings.register_profile("rayzero", settings(), deadline=None)  # a loaded machine is no failure
settings.load_profile("rayzero")
