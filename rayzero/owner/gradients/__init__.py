"""Gradients at the owner: the memory they land in, the count of contributions, and their norm."""
