"""The optimizer that a training loop holds: its parameter groups, and its states as torch writes them."""
