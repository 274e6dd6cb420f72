"""``python -m rayzero``, and the ``rayzero`` command."""

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
except KeyboardInterrupt:
    print("rayzero: stopped before it began", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    main()
