"""What a run will need and what will bound it, computed before it starts: bytes per tier, and the least step time."""
