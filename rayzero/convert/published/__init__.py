"""Checkpoints with the names that transformers publishes, which are not those of its models' parameters.

transformers 5 renames, merges and splits tensors when it loads and saves. Here its own mapping is asked once, with
tensors that have no values (``translation.py``); what it did to them is noted, and values are then read in pieces, each
from the places where its elements lie (``moved.py``).
"""
