"""Threads, locks and futures: what every room waits with. Knows nothing of models."""
