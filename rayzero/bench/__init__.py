"""``rayzero bench``: measures RayZero on this machine. Figures are ratios within one run.

``turns.py`` lets contestants work in turn, each in its own processes; ``step.py``, ``overlap.py``, ``store.py`` and
``adam.py`` answer one question each. Peers other than plain PyTorch are in the repository's ``benchmarks/``.
"""
