"""What a step does, as pure functions: reports, inputs and norm parts in; norm, decision or error out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rayzero.errors import NonFiniteGradientError, StepMismatchError
from rayzero.layout.model_layout import ModelLayout
from rayzero.messages import Action, Decision, FinishReport, Norm, NormParts, StepInputs

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def total_norm(step: int, parts: Iterable[NormParts], world_size: int) -> Norm:
    """The L2 norm of the averaged gradients: parts of all owners, added in shard and slot order."""
    total = 0.0
    for _, _, square in sorted(part for owner in parts for part in owner.parts):
        total += square
    finite = math.isfinite(total)
    return Norm(step=step, total=math.sqrt(total) / world_size if finite else total, finite=finite)


def clip_factor(norm: float, max_norms: Sequence[float]) -> float:
    """The product of torch's clip factors; a second clip sees the norm that the first one left."""
    factor = 1.0
    for max_norm in max_norms:
        factor *= min(1.0, max_norm / (norm * factor + _EPSILON))
    return factor


def decide(norm: Norm, reports: Mapping[int, FinishReport], inputs: StepInputs, world_size: int) -> Decision:
    """The decision of a step whose ranks agree; a norm that is not finite skips it for all."""
    factor = clip_factor(norm.total, inputs.max_norms) if norm.finite else 0.0
    return Decision(
        step=norm.step,
        attempts=tuple(reports[rank].attempt for rank in range(world_size)),
        action=Action.APPLY if norm.finite else Action.SKIP,
        scale=factor / world_size,
        norm=norm.total,
        hyper=inputs.hyper,
    )


def agreed(step: int, inputs: Mapping[int, StepInputs]) -> StepInputs:
    """The inputs all ranks sent. Raises StepMismatchError naming the ranks and what differs."""
    first_rank = min(inputs)
    first = inputs[first_rank]
    for rank in sorted(inputs):
        if inputs[rank].digest != first.digest:
            raise StepMismatchError(
                f"step {step} was not decided: ranks {first_rank} and {rank} sent different inputs: "
                f"{_difference(first, inputs[rank])}; every rank must clip and set hyper-parameters alike"
            )
    return first


def _difference(ours: StepInputs, theirs: StepInputs) -> str:
    if ours.max_norms != theirs.max_norms:
        return f"max_norm {list(ours.max_norms)} against {list(theirs.max_norms)}"
    if len(ours.hyper) != len(theirs.hyper):
        return f"{len(ours.hyper)} against {len(theirs.hyper)} parameter groups"
    for group, (a, b) in enumerate(zip(ours.hyper, theirs.hyper, strict=True)):
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                return f"{key} of parameter group {group} is {a.get(key)} against {b.get(key)}"
    return f"digest {ours.digest[:8]} against {theirs.digest[:8]}"


def nonfinite_error(step: int, parts: Iterable[NormParts], layout: ModelLayout) -> NonFiniteGradientError:
    """What ``nonfinite="raise"`` raises, naming the first parameter in forward order whose gradient is inf or nan."""
    for shard, slot, square in sorted((s, i, v) for owner in parts for s, i, v in owner.parts):
        if not math.isfinite(square):
            name = layout.units[layout.shards[shard].unit].slots[slot].name
            return NonFiniteGradientError(
                f"step {step}: the gradient of {name!r} is inf or nan; nothing was updated. "
                'nonfinite="skip" would go on with the next step'
            )
    return NonFiniteGradientError(f"step {step}: the gradient norm overflows although each parameter's is finite")
