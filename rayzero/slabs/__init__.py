"""Shared memory: files that are mapped by several processes, what lies where in them, and windows over several."""
