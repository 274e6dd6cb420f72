"""Where a Python process that this one starts finds the same RayZero, whatever folder it starts in."""

from __future__ import annotations

import os
import site

__all__ = ["with_own_path"]


def with_own_path() -> dict[str, str]:
    """This process's environment; ``PYTHONPATH`` begins with the folder of this RayZero unless it is installed, because
    an installed one is found anyway."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}
