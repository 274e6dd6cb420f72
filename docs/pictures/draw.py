"""Write the SVG pictures of the documentation. ``--check``: exit 1 where one is not what it would write."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from docs.pictures import cluster, grpo, memory, muon, recovery, shards, step  # noqa: E402

PICTURES = {
    "cluster": cluster.draw,
    "shards": shards.draw,
    "step": step.draw,
    "memory": memory.draw,
    "recovery": recovery.draw,
    "muon": muon.draw,
    "grpo": grpo.draw,
}


def main() -> int:
    """Write or check every picture."""
    made = {HERE / f"{name}.svg": draw() for name, draw in PICTURES.items()}
    if "--check" not in sys.argv[1:]:
        for path, text in made.items():
            path.write_text(text)
        return 0
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
    print(
        f"not current: {', '.join(stale)}; run docs/pictures/draw.py" if stale else f"{len(made)} pictures are current"
    )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
