"""Checkpoints of other projects and other places, made from our own or read instead of them.

``formats/`` reads and writes the formats of Hugging Face, torch DCP and DeepSpeed. ``conversion.py`` writes new
checkpoints, ``weights.py`` gives a model's first values out of any of them, ``remote_checkpoints.py`` copies them to
and from storage with URLs.

The names that transformers publishes are not those of its models' parameters: transformers 5 renames, merges and splits
tensors when it loads and saves. Its own mapping is asked once, with tensors that have no values (``translation.py``).
What it did to them is noted, and values are then read in pieces, each from the places where its elements lie.
"""
