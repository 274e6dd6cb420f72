"""Checks by names, shapes and dtypes whether named tensors fit a model's parameters and buffers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayzero.convert.formats.content import FLOATS, WeightDecl

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
