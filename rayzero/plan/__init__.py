"""Plans a run before it starts: the bytes it needs per memory tier, and a lower bound on its step time."""
