"""A stream of tensors with the names that transformers publishes, given out with those of a model's parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from rayzero.convert.formats.content import WeightDecl
from rayzero.convert.published.translation import Names, from_model, to_model
from rayzero.errors import CheckpointError, UnsupportedError


def with_model_names(
    model: Any, held: Mapping[str, WeightDecl], stream: Iterable[tuple[str, Tensor]], source: object
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a stream as ``model.from_pretrained`` would take them, in the order in which they can be made.

    model: one of transformers', perhaps on the meta device. held: its parameters and persistent buffers. Tensors that
    are merged wait for one another, and no longer: in the order of a published file, those of one layer. Names that
    the model has no place for come out as they are. Raises as ``to_model``, with ``source``, and CheckpointError if a
    name of a merged tensor comes twice."""
    names = Names(model, held)
    parts = _parts(model, held, names, source)
    waiting: dict[str, dict[str, Tensor]] = {}
    for given, tensor in stream:
        name, merged = names.of(given)
        if name is None:
            if not names.may_be_left_over(given):
                yield given, tensor
        elif not merged:
            yield name, tensor
        else:
            group = waiting.setdefault(name, {})
            if given in group:
                raise CheckpointError(f"{source}: {given!r} comes twice")
            group[given] = tensor
            if group.keys() == parts.get(name):
                yield from _made(model, held, waiting.pop(name), source)
    for group in waiting.values():  # other parts than transformers would publish now, or not all of them
        yield from _made(model, held, group, source)


def _parts(model: Any, held: Mapping[str, WeightDecl], names: Names, source: object) -> dict[str, set[str]]:
    """First name of what parts are merged into -> the parts as transformers publishes them; empty if this model's
    cannot be published: parts then wait until the stream ends."""
    try:
        published = from_model(model, held, _no_values, source).decls
    except (UnsupportedError, CheckpointError):
        return {}
    found: dict[str, set[str]] = {}
    for given in published:
        name, merged = names.of(given)
        if name is not None and merged:
            found.setdefault(name, set()).add(given)
    return found


def _no_values(name: str, start: int, stop: int) -> Tensor:
    raise AssertionError(f"names are asked for, not values of {name}")


def _made(
    model: Any, held: Mapping[str, WeightDecl], group: Mapping[str, Tensor], source: object
) -> Iterator[tuple[str, Tensor]]:
    flat = {name: tensor.detach().cpu().reshape(-1) for name, tensor in group.items()}
    decls = {name: WeightDecl.of(tensor) for name, tensor in group.items()}
    made = to_model(model, held, decls, lambda name, start, stop: flat[name][start:stop], source)
    for name, decl in made.decls.items():
        yield name, made.elements[name].read(0, math.prod(decl.shape)).view(decl.shape)
