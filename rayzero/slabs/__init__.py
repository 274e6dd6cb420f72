"""Shared memory: files that several processes map, what lies where in them, and windows over parts of several."""
