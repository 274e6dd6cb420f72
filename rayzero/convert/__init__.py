"""Checkpoints of other projects and other places, made from our own or read instead of them.

``formats/`` reads and writes the formats of Hugging Face, torch DCP and DeepSpeed, ``published/`` knows the names that
transformers gives to tensors. ``conversion.py`` writes new checkpoints, ``weights.py`` gives a model's first
values out of any of them, ``remote_checkpoints.py`` copies them to and from storage with URLs.
"""
