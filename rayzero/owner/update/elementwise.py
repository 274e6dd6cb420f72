"""Any element-wise torch optimizer, run as it is on the slices an owner has.

[Note: the probe] Whether a class may see a parameter in pieces is found out, not looked up: the same fp32 values
and gradients go through it once as a matrix, once flat and once flat in pieces, for several steps, and every
bit of weights and states must agree. What mixes elements (norms, factored moments, Muon's matrix products), needs a
closure, or draws random numbers fails and is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import StoreError, UnsupportedError
from rayzero.kernels.rank_sum import RankSum
from rayzero.layout.model_layout import aligned
from rayzero.owner.shard import OwnedShard, ShardWork
from rayzero.owner.update.rules import OnTile
from rayzero.protocol.messages import STEP, Hyper, ModelSpec

_PROBE_SHAPE = (16, 24)  # elements of the probe's matrix ...
_PROBE_PIECES = (64, 192, 128)  # ... and of its pieces
_PROBE_STEPS = 4

_REFUSED = {  # a clearer reason than the probe's
    "LBFGS": "it needs a closure and a line search over all parameters",
    "SparseAdam": "it takes sparse gradients only",
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it factors whole matrices and scales by their norm",
}


class ElementwiseRule:
    """Runs one instance of the class per shard, on fp32 parameters that are views of the shard's master.

    Knows the class and each shard's instance; nothing about what the class computes. Its states are created by the
    class itself, at a parameter's first update, as torch does: they are outside the planned memory."""

    kernel = "elementwise"
    state_kinds: tuple[str, ...] = ()

    def __init__(self, spec: ModelSpec, cls: type[torch.optim.Optimizer]) -> None:
        """Raises UnsupportedError when ``cls`` is not element-wise for one of the parameter groups."""
        self._cls = cls
        for group in spec.hyper:
            probe(cls, group)
        self._hyper = spec.hyper
        self._kinds = {kind for group in spec.hyper for kind in state_template(cls, group)} - {STEP}
        self._shards: dict[int, _ShardOptimizer] = {}

    def _of(self, owned: OwnedShard) -> _ShardOptimizer:
        if owned.shard.index not in self._shards:
            self._shards[owned.shard.index] = _ShardOptimizer(self._cls, self._hyper, owned)
        return self._shards[owned.shard.index]

    def update(self, owned: OwnedShard, work: ShardWork, on_tile: OnTile) -> None:
        """See ``UpdateRule.update``: one ``step()`` of the shard's instance."""
        stamps = owned.stamps(work.version)
        with stamps.writing(0, owned.shard.numel) if stamps is not None else nullcontext():
            self._of(owned).step(work)
            owned.publish_master()
        on_tile(1, 1)

    def states(self, owned: OwnedShard) -> dict[str, Tensor]:
        """Element-wise states of the whole shard; zero where a parameter was never updated."""
        return {kind: torch.zeros(owned.shard.numel) for kind in self._kinds} | self._of(owned).gathered()

    def slice_states(self, owned: OwnedShard, index: int) -> dict[str, Tensor]:
        """Every tensor or number the class keeps for the slice, but the step count; numbers fill the slice."""
        return self._of(owned).states_of(index)

    def restore(self, owned: OwnedShard, index: int, values: dict[str, Tensor]) -> None:
        """See ``UpdateRule.restore``. The step count comes back from the shard's own."""
        self._of(owned).restore(index, values, owned.steps[index])

    def write(self, owned: OwnedShard, kind: str, values: Tensor) -> None:
        """See ``UpdateRule.write``."""
        if kind not in self._kinds and kind != STEP:
            raise StoreError(f"{self._cls.__qualname__} keeps no {kind!r}; it keeps {', '.join(sorted(self._kinds))}")
        self._of(owned).write(kind, values)

    def regroup(self, owned: OwnedShard) -> None:
        """A new instance over the new groups takes over the states."""
        was = self._shards.pop(owned.shard.index, None)
        if was is not None:
            self._of(owned).take_states(was)


class _ShardOptimizer:
    """One shard's instance of the class."""

    def __init__(self, cls: type[torch.optim.Optimizer], hyper: Sequence[Hyper], owned: OwnedShard) -> None:
        """``hyper``: what it is built with; each step brings its own options, also of groups that were added later."""
        assert owned.master is not None
        self._owned = owned
        self._ranges = [(part.start, part.start + aligned(part.numel)) for part in owned.slices]
        self.params = [owned.master[start:stop].detach().requires_grad_() for start, stop in self._ranges]
        self._used = sorted(set(owned.groups))  # groups without a slice here would be empty
        members = [[p for p, g in zip(self.params, owned.groups, strict=True) if g == used] for used in self._used]
        self._optimizer = build(cls, [hyper[group if group < len(hyper) else 0] for group in self._used], members)

    def step(self, work: ShardWork) -> None:
        for group, used in zip(self._optimizer.param_groups, self._used, strict=True):
            group.update(_as_options(work.hyper[used]))
        for param, ranks, (start, stop) in zip(self.params, work.contributors, self._ranges, strict=True):
            param.grad = _gradient(work, ranks, start, stop).to(param.device) if ranks else None
        self._optimizer.step()
        for param in self.params:
            param.grad = None

    def states_of(self, index: int) -> dict[str, Tensor]:
        numel = self._owned.slices[index].numel
        found = {}
        for name, value in self._optimizer.state.get(self.params[index], {}).items():
            if is_scalar(value) and not (name == "step" and float(value) == self._owned.steps[index]):
                found[name] = torch.full((numel,), float(value))
            elif isinstance(value, Tensor) and not is_scalar(value):
                found[name] = value.detach().reshape(-1)[:numel].float().cpu()
        return found

    def gathered(self) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        for index, part in enumerate(self._owned.slices):
            for name, value in self.states_of(index).items():
                out = whole.setdefault(name, torch.zeros(self._owned.shard.numel))
                out[part.start : part.stop] = value
        return whole

    def restore(self, index: int, values: dict[str, Tensor], step: int) -> None:
        if not step:
            return
        param, template = self.params[index], _state_template(self._optimizer, index, self.params)
        for name, value in template.items():
            if name in values and isinstance(value, Tensor) and not is_scalar(value):
                value.zero_().reshape(-1)[: values[name].numel()].copy_(values[name])
            elif is_scalar(value):
                template[name] = scalar_like(value, float(values[name][0]) if name in values else float(step))
        self._optimizer.state[param] = template

    def write(self, kind: str, values: Tensor) -> None:
        for index, part in enumerate(self._owned.slices):
            if kind == STEP:
                self._restart(index, self._owned.steps[index])
                continue
            state, new = self._optimizer.state.get(self.params[index], {}), values[part.start : part.stop]
            if kind in state and is_scalar(state[kind]):
                state[kind] = scalar_like(state[kind], float(new[0]))
            elif kind in state:
                state[kind].reshape(-1)[: part.numel].copy_(new)

    def _restart(self, index: int, step: int) -> None:
        """The state of a parameter after ``step`` updates, its values still to come."""
        param = self.params[index]
        self._optimizer.state.pop(param, None)
        if step:
            self.restore(index, {}, step)
            return
        initial = _instance(self._optimizer, index, self.params)
        if initial.state:  # made before the first step
            self._optimizer.state[param] = dict(next(iter(initial.state.values())))

    def take_states(self, other: _ShardOptimizer) -> None:
        for ours, theirs in zip(self.params, other.params, strict=True):
            if theirs in other._optimizer.state:
                self._optimizer.state[ours] = other._optimizer.state[theirs]


def _state_template(optimizer: torch.optim.Optimizer, index: int, params: Sequence[Tensor]) -> dict[str, Any]:
    """The state the class makes for a parameter of this size: that of a copy, stepped once with zero gradients."""
    return _stepped(_instance(optimizer, index, params))


def _instance(optimizer: torch.optim.Optimizer, index: int, params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """A new instance with the options of a parameter's group, over a copy of that parameter alone."""
    group = next(g for g in optimizer.param_groups if any(p is params[index] for p in g["params"]))
    copy = params[index].detach().clone().requires_grad_()
    return build(type(optimizer), [{key: value for key, value in group.items() if key != "params"}], [[copy]])


def _stepped(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the class keeps for the one parameter after a step with a zero gradient."""
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.zeros_like(param)
    optimizer.step()
    return dict(optimizer.state[param])


def state_template(cls: type[torch.optim.Optimizer], hyper: Hyper, *, stepped: bool = True) -> dict[str, Any]:
    """What ``cls`` keeps for a parameter of 64 elements that was updated once (or never): name -> tensor or number."""
    param = torch.zeros(64, requires_grad=True)
    optimizer = build(cls, [hyper], [[param]])
    return _stepped(optimizer) if stepped else dict(optimizer.state.get(param, {}))


def build(
    cls: type[torch.optim.Optimizer], hyper: Sequence[Hyper], members: Sequence[Sequence[Tensor]]
) -> torch.optim.Optimizer:
    """An instance with these groups. Its constructor gets the first group's options too: some classes require them,
    and Adagrad fills its state from its own argument, not from the groups."""
    groups = [_as_options(options) | {"params": list(params)} for options, params in zip(hyper, members, strict=True)]
    accepted = list(inspect.signature(cls).parameters.values())[1:]
    return cls(groups, **{p.name: groups[0][p.name] for p in accepted if p.name in groups[0] and p.name != "params"})


def probe(cls: type[torch.optim.Optimizer], hyper: Hyper) -> None:
    """Raise UnsupportedError, naming the class and the reason, unless whole and split parameters get equal bits."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__module__.startswith("torch.optim") and cls.__name__ in _REFUSED:
        raise UnsupportedError(f"{name} cannot run on shards: {_REFUSED[cls.__name__]}")
    numel = sum(_PROBE_PIECES)
    try:
        whole = _run_probe(cls, hyper, [_PROBE_SHAPE])
        same = all(
            _equal(whole, _run_probe(cls, hyper, shapes)) for shapes in ([(numel,)], [(n,) for n in _PROBE_PIECES])
        )
    except Exception as exc:  # a foreign class may raise anything: all of it means "not on slices"
        raise UnsupportedError(f"{name} cannot run on shards: a trial on slices raised {exc!r}") from exc
    if not same:
        raise UnsupportedError(
            f"{name} is not element-wise: a parameter split into slices gets other values than the whole one, "
            "so it cannot run on shards; use an element-wise optimizer (Adam, AdamW, SGD, Adagrad, RMSprop, ...)"
        )


def _run_probe(cls: type[torch.optim.Optimizer], hyper: Hyper, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Weights and element-wise states after some steps, each as one flat tensor of all pieces."""
    values = torch.Generator().manual_seed(2026)
    draws = [torch.randn(sum(_PROBE_PIECES), generator=values) for _ in range(_PROBE_STEPS + 1)]
    params = [piece.detach().requires_grad_() for piece in _cut(draws[0], shapes)]
    optimizer = build(cls, [hyper], [params])
    for draw in draws[1:]:
        for param, grad in zip(params, _cut(draw, shapes), strict=True):
            param.grad = grad
        optimizer.step()
    states = [optimizer.state[param] for param in params]
    kept = [name for name, value in states[0].items() if isinstance(value, Tensor) and not is_scalar(value)]
    return [_joined(params), *(_joined([state[name] for state in states]) for name in kept)]


def _cut(values: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [
        piece.clone().view(shape) for piece, shape in zip(torch.split_with_sizes(values, sizes), shapes, strict=True)
    ]


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.detach().reshape(-1) for piece in pieces])


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _gradient(work: ShardWork, ranks: Sequence[int], start: int, stop: int) -> Tensor:
    summed = RankSum(stop - start).sum(work.gradients, ranks, start, stop)
    return (summed * work.scale).clamp_(-work.limit, work.limit)


def is_scalar(value: object) -> bool:
    """Whether a state is one number, as a tensor or plainly."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def scalar_like(template: object, value: float) -> object:
    """``value`` in the form of ``template``."""
    return torch.tensor(value, dtype=template.dtype) if isinstance(template, Tensor) else type(template)(value)  # type: ignore[call-arg]


def _as_options(hyper: Hyper) -> Hyper:
    """A group's options with JSON's lists as the tuples torch has."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in hyper.items()}
