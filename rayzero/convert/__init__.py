"""Checkpoints of other projects and other places, made from our own or read instead of them.

``formats/`` reads and writes the formats of Hugging Face, torch DCP and DeepSpeed, ``published/`` the names that
transformers gives to tensors, ``remote/`` copies checkpoints to and from storage with URLs. ``weights.py`` gives a
model's first values out of any of them, ``conversion.py`` and ``export.py`` write new ones.
"""
