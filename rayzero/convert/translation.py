"""The names, shapes and values that transformers' own mapping makes of a checkpoint's tensors, in either direction.

[Note: translating] Loading: each name passes through all renamings, then through at most one converter, which turns
several tensors into one or one into several. Saving does the opposite. What a converter computes is not known here: it
is called once with tensors that have no values, and a ``Trace`` notes where their elements go. So any operation that
moves elements works, also one that a later version brings, and any other is refused by its name.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rayzero.convert.formats.content import WeightDecl
from rayzero.convert.moved import Strided, Trace
from rayzero.errors import CheckpointError, UnsupportedError

ReadPart = Callable[[str, int, int], Tensor]

_USED = (
    ("conversion_mapping", "get_model_conversion_mapping"),
    ("core_model_loading", "WeightConverter"),
    ("core_model_loading", "WeightRenaming"),
    ("core_model_loading", "dot_natural_key"),
    ("core_model_loading", "rename_source_key"),
    ("core_model_loading", "revert_weight_conversion"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Tensors under their new names, made of tensors of a source."""

    decls: Mapping[str, WeightDecl]
    elements: Mapping[str, Strided]


def is_pretrained(model: object) -> bool:
    """Whether a model is one of transformers', which may publish its weights under other names."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def to_model(
    model: Any, held: Collection[str], decls: Mapping[str, WeightDecl], read: ReadPart, source: object
) -> Translation:
    """The tensors of a checkpoint as ``model.from_pretrained`` would take them. [Note: translating]

    held: all names of the model's parameters and persistent buffers. decls, read: the checkpoint's tensors. Tensors
    that the model has no place for keep their names, unless the model's class says that they may be left over. Raises
    CheckpointError, with ``source``, if two tensors would get one name or some do not go together, UnsupportedError
    that names an operation which does more than move elements, and if this transformers has no such mapping."""
    names = Names(model, held)
    tracer, made = Trace(), _Made(source)
    merged: dict[str, Any] = {}
    left_over: list[str] = []
    for given in names.in_order(decls):
        name, pattern = names.of(given)
        if name is None:
            left_over.append(given)
            continue
        tensor = tracer.tensor(given, decls[given], partial(read, given))
        if pattern is None:
            made.add(name, given, tensor)
        else:
            entry = merged.setdefault(name, names.converter(pattern))
            entry.add_tensor(name, given, pattern, tensor)
    for name, entry in merged.items():
        givens = sorted(given for target in entry.layer_targets.values() for given in target)
        with _refusing(f"{source}: {name!r}"), tracer:
            converted = entry.convert(name, model=model, config=model.config)
        for target, value in converted.items():
            made.add(target, givens[0], value[0] if isinstance(value, list) else value)
    for given in left_over:
        if not names.may_be_left_over(given):
            made.add(given, given, tracer.tensor(given, decls[given], partial(read, given)))
    return made.translation(tracer)


def from_model(model: Any, decls: Mapping[str, WeightDecl], read: ReadPart, source: object) -> Translation:
    """The tensors of a model as ``model.save_pretrained`` would write them: the names that transformers publishes,
    tied ones once. [Note: translating]

    decls, read: the model's tensors by the names of its parameters and persistent buffers. Raises as ``to_model``."""
    library = _library()
    tracer, made = Trace(), _Made(source)
    tensors = {name: tracer.tensor(name, decl, partial(read, name)) for name, decl in decls.items()}
    dropped = {alias for alias, name in model.all_tied_weights_keys.items() if name in tensors}
    dropped |= set(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    with _refusing(f"{source}: {type(model).__name__}"), tracer:
        found = library.revert_weight_conversion(model, kept)
    for name, tensor in found.items():
        made.add(name, name, tensor)
    return made.translation(tracer)


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
                yield from _whole(model, held, waiting.pop(name), source)
    for group in waiting.values():  # other parts than transformers would publish now, or not all of them
        yield from _whole(model, held, group, source)


def _parts(model: Any, held: Mapping[str, WeightDecl], names: Names, source: object) -> dict[str, set[str]]:
    """First name of what parts are merged into -> the parts as transformers publishes them; empty if this model's
    cannot be published: parts then wait until the stream ends."""
    try:
        published = from_model(model, held, no_values, source).decls
    except (UnsupportedError, CheckpointError):
        return {}
    found: dict[str, set[str]] = {}
    for given in published:
        name, merged = names.of(given)
        if name is not None and merged:
            found.setdefault(name, set()).add(given)
    return found


def no_values(name: str, start: int, stop: int) -> Tensor:
    """What names alone are asked for with, as ``read``."""
    raise AssertionError(f"{name} is followed, not read")


def _whole(
    model: Any, held: Mapping[str, WeightDecl], group: Mapping[str, Tensor], source: object
) -> Iterator[tuple[str, Tensor]]:
    flat = {name: tensor.detach().cpu().reshape(-1) for name, tensor in group.items()}
    decls = {name: WeightDecl.of(tensor) for name, tensor in group.items()}
    made = to_model(model, held, decls, lambda name, start, stop: flat[name][start:stop], source)
    for name, decl in made.decls.items():
        yield name, made.elements[name].read(0, math.prod(decl.shape)).view(decl.shape)


class Names:
    """Where transformers puts the names of a checkpoint in a model. Asks transformers; knows no tensors."""

    def __init__(self, model: Any, held: Collection[str]) -> None:
        """held: all names of the model's parameters and persistent buffers. Raises UnsupportedError if this
        transformers has no such mapping."""
        self._library = library = _library()
        mapping = library.get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, library.WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, library.WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._places = dict.fromkeys(held, True)  # transformers asks for a state dict, and looks only for its names
        self._prefix = model.base_model_prefix
        self._ignored = _may_be_left_over(model)

    def in_order(self, names: Collection[str]) -> list[str]:
        """The names in the order in which transformers takes them."""
        return sorted(names, key=self._library.dot_natural_key)

    def of(self, given: str) -> tuple[str | None, str | None]:
        """(the model's name for a name, the pattern of the converter that it goes through with others). No name: the
        model has no place for it; no pattern: it is renamed alone."""
        name, pattern = self._renamed(given)
        if name not in self._places and given in self._places:
            name, pattern = self._library.rename_source_key(given, [], [], self._prefix, self._places)
        return (name, pattern) if name in self._places else (None, None)

    def converter(self, pattern: str) -> Any:
        """A copy of transformers' converter that has this pattern."""
        return deepcopy(self._by_pattern[pattern])

    def may_be_left_over(self, given: str) -> bool:
        """Whether the model's class says that a name it has no place for may be dropped."""
        name, _ = self._renamed(given)
        return any(pattern.search(name) for pattern in self._ignored)

    def _renamed(self, given: str) -> tuple[str, str | None]:
        found: tuple[str, str | None] = self._library.rename_source_key(
            given, self._renamings, self._converters, self._prefix, self._places
        )
        return found


class _Made:
    """Tensors by their new names, each once."""

    def __init__(self, source: object) -> None:
        self._source = source
        self._tensors: dict[str, Tensor] = {}
        self._from: dict[str, str] = {}

    def add(self, name: str, given: str, tensor: Tensor) -> None:
        if name in self._tensors:
            raise CheckpointError(
                f"{self._source} has {name!r} twice: transformers makes it of both {self._from[name]!r} and {given!r}"
            )
        self._tensors[name], self._from[name] = tensor, given

    def translation(self, tracer: Trace) -> Translation:
        return Translation(
            decls={n: WeightDecl.of(t) for n, t in self._tensors.items()},
            elements={name: tracer.elements(tensor) for name, tensor in self._tensors.items()},
        )


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Name transformers' operation that cannot be followed, or that fails."""
    try:
        yield
    except UnsupportedError as exc:
        raise UnsupportedError(
            f"{what} needs transformers' {_operation(exc)}, which cannot be streamed: {exc}"
        ) from exc
    except Exception as exc:  # operations raise what they like about tensors that do not go together
        why = " ".join(str(exc).split())[:300] or type(exc).__name__
        raise CheckpointError(f"{what} cannot be made by transformers' {_operation(exc)}: {why}") from exc


def _operation(exc: BaseException) -> str:
    """The innermost of transformers' operations that an exception passed through."""
    from transformers.core_model_loading import ConversionOps

    frames = [frame.f_locals.get("self") for frame, _ in walk_tb(exc.__traceback__)]
    return next((type(one).__name__ for one in reversed(frames) if isinstance(one, ConversionOps)), "mapping")


def _may_be_left_over(model: Any) -> list[re.Pattern[str]]:
    """What ``from_pretrained`` drops without a word: what the classes name, and buffers that old versions saved."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return [re.compile(pattern) for pattern in patterns]


def _library() -> Any:
    """What of transformers is used here. Raises UnsupportedError that names what this version lacks."""
    import transformers

    found: dict[str, Any] = {}
    for module, name in _USED:
        try:
            found[name] = getattr(importlib.import_module(f"transformers.{module}"), name)
        except (ImportError, AttributeError) as exc:
            raise UnsupportedError(
                f"transformers {transformers.__version__} has no {module}.{name}, which says how the names of "
                "published checkpoints become its models'; install transformers 5"
            ) from exc
    return SimpleNamespace(**found)
