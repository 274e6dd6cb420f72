"""A training loop's own state: what it tracks, and everything else that it needs to go on from a step."""
