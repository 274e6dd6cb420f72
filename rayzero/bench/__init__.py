"""Measurements of RayZero on the machine at hand, each a ratio within one run: ``rayzero bench``.

``turns.py`` lets contestants, each in its own processes, work in turn; ``step.py``, ``overlap.py`` and ``store.py``
are one question each. Peers other than plain PyTorch are in the repository's ``benchmarks/``.
"""
