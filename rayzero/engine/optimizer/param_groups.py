"""Parameter groups: which options the owners are told, and which a checkpoint keeps for the run that resumes from it.

The owners know only the options that an update needs. A loop has more: ``initial_lr``, and anything else that a
scheduler or the user keeps in a group. As in plain PyTorch, every entry has its saved value again before the first step
of a resumed run.

[Note: schedulers on resume] Creating a torch scheduler writes its first learning rate into the groups, so in plain
PyTorch a loop must create it before ``optimizer.load_state_dict()``. Here ``prepare()`` does that load. A scheduler may
be created before it or, as in most loops, after it, because the groups get their saved values once more after the
scheduler's own ``load_state_dict()``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayzero.checkpoint.state_values import is_packable
from rayzero.errors import CheckpointError
from rayzero.kernels import ADAMS
from rayzero.kernels.torch_classes.optimizer_class import options_of, plain_value
from rayzero.protocol.messages import CLASS, Hyper

log = logging.getLogger(__name__)

ParamGroup = dict[str, Any]  # one of torch.optim.Optimizer.param_groups


def hyper_of(optimizer: torch.optim.Optimizer, cls: type[torch.optim.Optimizer]) -> tuple[Hyper, ...]:
    """Each parameter group's options now, as plain JSON values. ``cls``: what the owners run. Adam and AdamW read only
    their own options; what another class reads is not known, so it gets all entries."""
    known = optimizer.defaults if cls in ADAMS else None
    return tuple(
        {name: plain_value(value, name) for name, value in options_of(group).items() if known is None or name in known}
        for group in optimizer.param_groups
    )


def saved_groups(groups: Sequence[ParamGroup], name_of: Mapping[int, str]) -> list[dict[str, Any]]:
    """Per group the names of its Parameters, in order, and its options as a checkpoint keeps them.

    ``name_of``: id of a Parameter -> its name. Options that a checkpoint cannot hold (functions, for example) are left
    out; a loop that resumes sets them again."""
    return [
        {
            "params": [name_of[id(param)] for param in group["params"]],
            "options": options,
        }
        for group, options in zip(groups, saved_options(groups), strict=True)
    ]


def saved_options(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Each group's options as a checkpoint keeps them; see ``saved_groups``."""
    return [{key: value for key, value in options_of(group).items() if is_packable(value)} for group in groups]


def put_options(groups: Sequence[ParamGroup], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give groups the options that ``saved_options`` returned of them."""
    for group, options in zip(groups, saved, strict=True):
        for key, value in options.items():
            group[key] = _put(group.get(key), value)


def _put(held: Any, value: Any) -> Any:
    """``value``; copied into the tensor ``held`` if possible, because a compiled step or a scheduler may refer to
    it."""
    if not isinstance(held, Tensor) or not held.is_floating_point():
        return value.clone() if isinstance(value, Tensor) else value
    if not isinstance(value, Tensor):
        return held.fill_(value)
    return held.copy_(value) if (held.shape, held.dtype) == (value.shape, value.dtype) else value.clone()


class ResumedGroups:
    """The groups of the checkpoint that a run resumes from, until its first step.

    A group is known by the parameters it trains, whatever its number. Knows saved options and names; not the owners.
    [Note: schedulers on resume]"""

    def __init__(self, saved: Sequence[Mapping[str, Any]], name_of: Mapping[int, str], checkpoint: str) -> None:
        """``saved``: the result of ``saved_groups``. ``checkpoint``: where they come from, for messages."""
        self._options: dict[frozenset[str], list[Mapping[str, Any]]] = {}  # groups without parameters share a key
        for group in saved:
            self._options.setdefault(frozenset(group["params"]), []).append(group["options"])
        self._name_of = name_of
        self._checkpoint = checkpoint

    def _params(self, group: ParamGroup) -> frozenset[str]:
        return frozenset(self._name_of[id(param)] for param in group["params"])

    def restore(self, groups: Sequence[ParamGroup], *, only: Collection[str] | None = None) -> None:
        """Restore the saved options in ``groups``. Options that were not saved, and groups that train other parameters,
        stay as they are.

        only: names of the options to restore; None: all."""
        seen: Counter[frozenset[str]] = Counter()
        for group in groups:
            params = self._params(group)
            saved = self._options.get(params, [])[seen[params] :]
            seen[params] += 1
            for key, value in saved[0].items() if saved else ():
                if only is None or key in only:
                    group[key] = _put(group.get(key), value)

    def require_classes(self, groups: Sequence[ParamGroup]) -> None:
        """Raise CheckpointError if another of several classes updates a parameter than does in the checkpoint."""
        saved = {name: options[0].get(CLASS) for params, options in self._options.items() for name in params}
        for group in groups:
            for name in sorted(self._params(group)):
                was, now = saved.get(name), group.get(CLASS)
                if was and now and was != now:
                    raise CheckpointError(
                        f"{name!r} was updated by {was} in {self._checkpoint}, but by {now} in this run; give each "
                        "parameter to an optimizer of the same class"
                    )

    def tell_kept(self, groups: Sequence[ParamGroup]) -> None:
        """Warn of groups that the checkpoint does not have and that therefore keep the loop's options."""
        for index, group in enumerate(groups):
            if self._params(group) not in self._options:
                log.warning(
                    "%s has no parameter group of the same parameters as the optimizer's group %d: the group keeps "
                    "the options that this run gave it (lr=%s), not those of the checkpoint",
                    self._checkpoint,
                    index,
                    group.get("lr"),
                )

    def require_all(self, groups: Sequence[ParamGroup]) -> None:
        """Raise CheckpointError if, at the first step, a parameter that the checkpoint trains is in no group."""
        saved = {name for params in self._options for name in params}
        if missing := sorted(saved.difference(*map(self._params, groups))):
            names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise CheckpointError(
                f"{self._checkpoint} trains {names}, which no parameter group of this run has; add the group with "
                f"add_param_group() before the first step, as the run that saved it did"
            )
