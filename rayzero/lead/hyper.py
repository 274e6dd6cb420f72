"""Whether a step's hyper-parameters can be applied to what was attached: asked before a decision is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayzero.errors import StepMismatchError, UnsupportedError
from rayzero.kernels import AdamOptions
from rayzero.protocol.hyper import require_numbers, resolve_optimizer
from rayzero.protocol.messages import Hyper, ModelSpec


def check_hyper(spec: ModelSpec, hyper: Sequence[Hyper]) -> None:
    """Raise where a step's hyper-parameters cannot be applied to what was attached: groups came or went,
    ``amsgrad`` was switched, a number became something else, or an option is out of range."""
    if len(hyper) < len(spec.hyper):
        raise StepMismatchError(
            f"step inputs have {len(hyper)} parameter groups, the run was attached with {len(spec.hyper)}; "
            "groups may be added, but not taken away"
        )
    like = (*spec.hyper, *[spec.hyper[0]] * (len(hyper) - len(spec.hyper)))  # added groups have the same options
    for group, (now, then) in enumerate(zip(hyper, like, strict=True)):
        require_numbers(group, now, then)
    if resolve_optimizer(spec.optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group, (now, then) in enumerate(zip(hyper, like, strict=True)):
        options = AdamOptions.from_hyper(now, decoupled=True)
        if options.amsgrad and not then.get("amsgrad"):
            raise UnsupportedError(f"amsgrad of parameter group {group} was switched on after prepare()")
