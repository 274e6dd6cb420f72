"""A checkpoint's parameter groups: saved by each rank, put back into the optimizer of a resumed run.

The owners know the options that their update needs. A loop has more: ``initial_lr`` and whatever else a scheduler or
the user keeps in a group. Resumed as in plain PyTorch, every entry has its saved value before the first step.

[Note: schedulers on resume] Making a torch scheduler writes its first learning rate into the groups. Plain PyTorch
therefore wants the scheduler made before ``optimizer.load_state_dict()``. ``prepare()`` is that load here, and a
scheduler made before it is right; so is one made after it, as most loops do, because the groups get their saved values
once more when the scheduler's own ``load_state_dict()`` has run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from rayzero.checkpoint.state_values import is_packable
from rayzero.errors import CheckpointError

log = logging.getLogger(__name__)

ParamGroup = dict[str, Any]  # one of torch.optim.Optimizer.param_groups

_PARAMS = ("params", "param_names")  # entries that say what is trained, not how


def saved_groups(groups: Sequence[ParamGroup], name_of: Mapping[int, str]) -> list[dict[str, Any]]:
    """Per group the names of its Parameters, in order, and its options as a checkpoint keeps them.

    ``name_of``: id of a Parameter -> its name. Options that no checkpoint keeps (functions, say) are left out: a loop
    that resumes makes them again."""
    return [
        {
            "params": [name_of[id(param)] for param in group["params"]],
            "options": {key: value for key, value in group.items() if key not in _PARAMS and is_packable(value)},
        }
        for group in groups
    ]


def _put(held: Any, value: Any) -> Any:
    """``value``, in the tensor that is held where that can have it: a compiled step or a scheduler may know it."""
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
        """``saved``: of ``saved_groups``. ``checkpoint``: where they are from, for messages."""
        self._options: dict[frozenset[str], list[Mapping[str, Any]]] = {}  # several for groups without parameters
        for group in saved:
            self._options.setdefault(frozenset(group["params"]), []).append(group["options"])
        self._name_of = name_of
        self._checkpoint = checkpoint

    def _params(self, group: ParamGroup) -> frozenset[str]:
        return frozenset(self._name_of[id(param)] for param in group["params"])

    def restore(self, groups: Sequence[ParamGroup], *, only: Collection[str] | None = None) -> None:
        """Put the saved options into ``groups``; options that were not saved stay, and so do groups that train other
        parameters.

        only: names of the options to put back; None: all."""
        seen: Counter[frozenset[str]] = Counter()
        for group in groups:
            params = self._params(group)
            saved = self._options.get(params, [])[seen[params] :]
            seen[params] += 1
            for key, value in saved[0].items() if saved else ():
                if only is None or key in only:
                    group[key] = _put(group.get(key), value)

    def tell_kept(self, groups: Sequence[ParamGroup]) -> None:
        """Warn of groups that the checkpoint does not have: their options are those that the loop gave them."""
        for index, group in enumerate(groups):
            if self._params(group) not in self._options:
                log.warning(
                    "%s has no parameter group of the same parameters as the optimizer's group %d: it keeps the "
                    "options that this run gave it (lr=%s), not those of the checkpoint",
                    self._checkpoint,
                    index,
                    group.get("lr"),
                )

    def require_all(self, groups: Sequence[ParamGroup]) -> None:
        """Raise CheckpointError where parameters that the checkpoint trains are in no group at the first step."""
        saved = {name for params in self._options for name in params}
        if missing := sorted(saved.difference(*map(self._params, groups))):
            names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise CheckpointError(
                f"{self._checkpoint} trains {names}, which no parameter group of this run has: before the first step "
                "add the group with add_param_group(), as the run that saved it did"
            )
