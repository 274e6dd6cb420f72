"""Threads, locks and futures that every package waits with. Knows nothing about models."""
