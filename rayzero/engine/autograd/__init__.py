"""Module and autograd events, turned into the engine's calls."""
