"""Measures RayZero on this machine, against plain PyTorch and others. Figures are ratios within one run.

``turns.py`` lets contestants work in turn, each in its own processes; ``step.py``, ``overlap.py``, ``store.py`` and
``adam.py`` answer one question each. ``peers.py`` has peers other than plain PyTorch.
"""
