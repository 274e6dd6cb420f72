"""Transfers between a rank and owners of its host, and what the ranks of a host send once."""
