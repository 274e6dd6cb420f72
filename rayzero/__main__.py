"""``python -m rayzero``: the same as the ``rayzero`` command."""

from __future__ import annotations

import sys

try:
    from rayzero.cli import main
except ModuleNotFoundError as error:  # in a clone, every Python finds rayzero, also one without what it needs
    if error.name is None or error.name.startswith("rayzero"):
        raise
    sys.exit(
        f"rayzero: {sys.executable} has no {error.name}; type scripts/setup, then .venv/bin/rayzero (docs/install.md)"
    )

if __name__ == "__main__":
    main()
