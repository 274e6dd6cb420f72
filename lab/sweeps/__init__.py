"""What other packages bring, trained with RayZero beside plain PyTorch: `scripts/sweep FAMILY`.

A family is a module of this folder with `TITLE`, `INTRO`, `PACKAGES` and `cases()`. Each case runs in a process of its
own (`trial.py`); what came of all of them is a page of the documentation (`table.py`). A sweep ends with code 1 if a
case trained to other weights without a word.
"""
