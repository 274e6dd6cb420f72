"""``python -m rayzero``: the same as the ``rayzero`` command."""

from __future__ import annotations

from rayzero.cli import main

if __name__ == "__main__":
    main()
