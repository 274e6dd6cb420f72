"""Weights to start from, in a checkpoint of any format or in memory, and whether they fit a model. Names, shapes and
dtypes are read first; bytes only when somebody asks for them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from torch import Tensor

from rayzero.convert.formats import open_reader
from rayzero.convert.formats.content import FLOATS, PART, WeightDecl
from rayzero.convert.remote_checkpoints import is_url
from rayzero.convert.translation import is_pretrained, to_model, with_model_names
from rayzero.errors import ConfigError

_MOST = 10  # names of each kind that an error lists


@dataclass(frozen=True, slots=True)
class Wanted:
    """A parameter or persistent buffer of a model. A tied one has several names, and any of them will do."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    exact: bool = False  # its bytes need not be its values, so no other dtype will do

    def mismatch(self, name: str, decl: WeightDecl) -> str | None:
        """What is wrong with ``decl`` as its value; None if nothing is."""
        if decl.shape != self.shape:
            return f"{name!r} has the shape {decl.shape} there and {self.shape} in the model"
        takes = FLOATS if self.dtype in FLOATS and not self.exact else (self.dtype,)
        if decl.dtype not in takes:
            return f"{name!r} is {decl.dtype} there, and {self.dtype} in the model, which takes {' or '.join(takes)}"
        return None


def misfits(wanted: Sequence[Wanted], decls: Mapping[str, WeightDecl], *, strict: bool) -> list[str]:
    """All that is wrong, in words; empty if the tensors fit. ``strict``: missing and unexpected names are wrong."""
    by_name = {name: one for one in wanted for name in one.names}
    problems = [
        wrong for name, decl in decls.items() if name in by_name and (wrong := by_name[name].mismatch(name, decl))
    ]
    if strict:
        missing = [one.names[0] for one in wanted if not any(name in decls for name in one.names)]
        unexpected = [name for name in decls if name not in by_name]
        problems += _named("it lacks", missing, unexpected, "its nearest name is")
        problems += _named("the model lacks", unexpected, missing, "the nearest is")
        problems += _prefix_hint(missing, unexpected)
    return problems


def _named(says: str, names: Sequence[str], others: Sequence[str], hint: str) -> list[str]:
    """One problem that lists ``names``, each with the nearest of ``others``."""
    shown = [_with_nearest(name, others, hint) for name in names[:_MOST]]
    if len(names) > _MOST:
        shown.append(f"and {len(names) - _MOST} more")
    return [f"{says} {', '.join(shown)}"] if shown else []


def _with_nearest(name: str, others: Iterable[str], hint: str) -> str:
    near = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
    return f"{name!r} ({hint} {near[0]!r})" if near else repr(name)


def _prefix_hint(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """What to do if the names differ in nothing but a prefix."""
    for ours, theirs, action in (
        (missing, unexpected, "name.removeprefix({!r})"),
        (unexpected, missing, "{!r} + name"),
    ):
        prefix = _common_prefix(ours, theirs)
        if prefix is not None:
            return [f"with rayzero.Weights(..., rename=lambda name: {action.format(prefix)}) every name fits"]
    return []


def _common_prefix(short: Sequence[str], long: Sequence[str]) -> str | None:
    """The prefix, ending with a dot, that turns ``short`` into ``long``, each name once; None if there is none."""
    if not short or len(short) != len(long):
        return None
    names = set(short)
    for name in short:
        prefix = long[0].removesuffix(name)
        if prefix != long[0] and prefix.endswith(".") and {one.removeprefix(prefix) for one in long} == names:
            return prefix
    return None


__all__ = ["NamedWeights", "WeightDecl", "WeightSource", "Weights", "declare_weight"]

Rename = Callable[[str], str | None]
Part = Callable[[str, int, int], Tensor]


class Weights:
    """Where ``rayzero.prepare(weights=...)`` gets the values of a model's parameters and persistent buffers.

    Knows a source and how its names become the model's; not the model. Reads no bytes before somebody asks for them."""

    def __init__(
        self,
        source: str | PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        rename: Rename | None = None,
        strict: bool = True,
    ) -> None:
        """source: a safetensors file; a Hugging Face directory or its ``model.safetensors.index.json``; a checkpoint of
            RayZero, torch DCP or DeepSpeed (``convert/formats/``), of which only the weights count; a mapping of
            named tensors; or an iterable of (name, tensor). Tensors have the shapes of the model's parameters and
            buffers. An iterable is read once, and its order decides how much is in memory: a unit is held from its
            first tensor to its last, and so are the parts of what transformers merges.
        rename: gives the model's name for a name of the source, or None to leave that tensor out.
        strict: as in ``load_state_dict``. If False, names that the model lacks are left out, and parameters that the
            source lacks keep the model's own values, or those of ``init``.

        Raises ConfigError if ``source`` is anything else, or a URL.
        """
        if not isinstance(source, str | PathLike | Iterable):
            raise ConfigError(
                "weights must be a path, a mapping of named tensors, or an iterable of (name, tensor), got "
                f"{type(source).__name__}"
            )
        if is_url(source):
            raise ConfigError(
                f"weights are read from files, not from {source!r}; copy them first: rayzero convert URL FOLDER"
            )
        self.source = source
        self.rename = rename or (lambda name: name)
        self.strict = strict

    @property
    def is_stream(self) -> bool:
        """Whether it can be read only once, so that nobody knows its names beforehand."""
        return not isinstance(self.source, str | PathLike | Mapping)

    def open(self, model: object = None, wanted: Iterable[Wanted] = ()) -> NamedWeights:
        """Read the names, shapes and dtypes of a source that is not a stream.

        model, wanted: of one of transformers' models, all parameters and persistent buffers: tensors get their names,
        merged and split as ``model.from_pretrained`` does it. Raises CheckpointError if files are missing or damaged,
        ConfigError if a mapping holds something other than tensors with values or ``rename`` gives two tensors the
        same name, and what ``to_model`` raises."""
        if isinstance(self.source, str | PathLike):
            reader = open_reader(Path(self.source), states=False)
            named = NamedWeights(reader, reader.content.decls, reader.weight, self.rename)
        else:
            assert isinstance(self.source, Mapping)
            named = _of_mapping(self.source, self.rename)
        if not is_pretrained(model):
            return named
        made = to_model(model, [name for one in wanted for name in one.names], named.decls, named.part, named)
        return NamedWeights(named, made.decls, lambda name, *part: made.elements[name].read(*part), lambda name: name)

    def stream(self, model: object, wanted: Iterable[Wanted]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a stream as they come, with the names of the model whose parameters and buffers are
        ``wanted``. Raises as ``with_model_names``."""
        assert not isinstance(self.source, str | PathLike | Mapping)
        renamed = ((name, tensor) for given, tensor in self.source if (name := self.rename(given)) is not None)
        if not is_pretrained(model):
            return renamed
        decls = {name: WeightDecl(one.shape, one.dtype) for one in wanted for name in one.names}
        return with_model_names(model, decls, renamed, "the stream of weights")


WeightSource = str | PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Weights


class NamedWeights:
    """Tensors by the names that the model has for them."""

    def __init__(self, source: object, decls: Mapping[str, WeightDecl], part: Part, rename: Rename) -> None:
        """source: names them in messages. decls: by the source's own names. part: reads a range of one of them."""
        self._source, self._part = source, part
        self._given: dict[str, str] = {}  # the model's name -> the source's
        for given in decls:
            name = rename(given)
            if name in self._given:
                raise ConfigError(f"rename makes {name!r} of both {self._given[name]!r} and {given!r} of {source}")
            if name is not None:
                self._given[name] = given
        self.decls = {name: decls[given] for name, given in self._given.items()}

    def __str__(self) -> str:
        return str(self._source)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of one tensor, in C order: 1D, in the source's dtype."""
        return self._part(self._given[name], start, stop)

    def read(self, name: str) -> Tensor:
        """One tensor, in the source's shape and dtype. From a file it is a view of the mapped file: use it once and
        let it go. Raises CheckpointError if the file cannot be read."""
        shape = self.decls[name].shape
        return self.part(name, 0, math.prod(shape)).view(shape)

    def copy_to(self, name: str, flat: Tensor) -> None:
        """Copy one tensor into ``flat`` (1D, as many elements, of any dtype), at most ``PART`` elements at a time."""
        for start in range(0, flat.numel(), PART):
            stop = min(start + PART, flat.numel())
            flat[start:stop].copy_(self.part(name, start, stop))


def _of_mapping(tensors: Mapping[str, Tensor], rename: Rename) -> NamedWeights:
    """Named tensors in memory, or a mapping that makes them when asked: one is kept until its last part was read."""
    decls = {name: declare_weight(name, tensors[name]) for name in tensors}
    held: dict[str, Tensor] = {}

    def part(name: str, start: int, stop: int) -> Tensor:
        if name not in held:
            held.clear()
            held[name] = tensors[name].detach().reshape(-1)
        flat = held[name]
        if stop == len(flat):
            held.clear()
        return flat[start:stop]

    return NamedWeights("the weights mapping", decls, part, rename)


def declare_weight(name: str, tensor: object) -> WeightDecl:
    """The declaration of a tensor in memory. Raises ConfigError if it is not a tensor, or a meta tensor."""
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        what = "a meta tensor, without values" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise ConfigError(f"weights: {name!r} is {what}; pass a tensor with values")
    return WeightDecl.of(tensor)
