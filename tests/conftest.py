"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("rayzero", settings(), deadline=None)  # a loaded machine is no failure
settings.load_profile("rayzero")
