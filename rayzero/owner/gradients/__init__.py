"""Gradients at the owner: where they land, what was counted, their norm."""
