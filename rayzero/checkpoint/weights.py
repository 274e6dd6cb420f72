"""Weights to start from, in safetensors files or in memory. Names, shapes and dtypes are read first; bytes only when
somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rayzero.checkpoint.files.tensor_file import code_name
from rayzero.checkpoint.manifest import MANIFEST
from rayzero.errors import CheckpointError, ConfigError
from rayzero.files import parse_json, read_text, regular_size
from rayzero.layout.model_layout import dtype_name

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX = 1 << 28  # bytes: two million tensors

Rename = Callable[[str], str | None]


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
        """source: a safetensors file; a Hugging Face directory or its ``model.safetensors.index.json``; a mapping of
            named tensors; or an iterable of (name, tensor). Tensors have the shapes of the model's parameters and
            buffers. An iterable is read once, and its order decides how much is in memory: a unit is held from its
            first tensor to its last.
        rename: gives the model's name for a name of the source, or None to leave that tensor out.
        strict: as in ``load_state_dict``. If False, names that the model lacks are left out, and parameters that the
            source lacks keep the model's own values, or those of ``init``.

        Raises ConfigError if ``source`` is anything else.
        """
        if not isinstance(source, str | PathLike | Iterable):
            raise ConfigError(
                "weights must be a path, a mapping of named tensors, or an iterable of (name, tensor), got "
                f"{type(source).__name__}"
            )
        self.source = source
        self.rename = rename or (lambda name: name)
        self.strict = strict

    @property
    def is_stream(self) -> bool:
        """Whether it can be read only once, so that nobody knows its names beforehand."""
        return not isinstance(self.source, str | PathLike | Mapping)

    def open(self) -> NamedWeights:
        """Read the names, shapes and dtypes of a source that is not a stream. Raises CheckpointError if files are
        missing or damaged, ConfigError if a mapping holds something other than tensors with values or ``rename`` gives
        two tensors the same name."""
        if isinstance(self.source, str | PathLike):
            return NamedWeights(_TensorFiles(Path(self.source)), self.rename)
        assert isinstance(self.source, Mapping)
        return NamedWeights(_TensorMapping(self.source), self.rename)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a stream with the model's names, as they come."""
        assert not isinstance(self.source, str | PathLike | Mapping)
        for given, tensor in self.source:
            name = self.rename(given)
            if name is not None:
                yield name, tensor


WeightSource = str | PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Weights


@dataclass(frozen=True, slots=True)
class WeightDecl:
    """What a source says of one tensor."""

    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch."; the file's own code if this package has no name for it


class _Source(Protocol):
    def __str__(self) -> str: ...

    decls: dict[str, WeightDecl]  # by the source's own names

    def read(self, name: str) -> Tensor: ...


class NamedWeights:
    """Tensors by the names that the model has for them."""

    def __init__(self, source: _Source, rename: Rename) -> None:
        self._source = source
        self._given: dict[str, str] = {}  # the model's name -> the source's
        for given in source.decls:
            name = rename(given)
            if name in self._given:
                raise ConfigError(f"rename makes {name!r} of both {self._given[name]!r} and {given!r} of {source}")
            if name is not None:
                self._given[name] = given
        self.decls = {name: source.decls[given] for name, given in self._given.items()}

    def __str__(self) -> str:
        return str(self._source)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def read(self, name: str) -> Tensor:
        """One tensor, in the source's shape and dtype. From a file it is a view of the mapped file: use it once and
        let it go. Raises CheckpointError if the file cannot be read."""
        return self._source.read(self._given[name])


class _TensorMapping:
    """Named tensors in memory, or a mapping that makes them when asked."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.decls = {name: declare_weight(name, tensors[name]) for name in tensors}

    def __str__(self) -> str:
        return "the weights mapping"

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def declare_weight(name: str, tensor: object) -> WeightDecl:
    """The declaration of a tensor in memory. Raises ConfigError if it is not a tensor, or a meta tensor."""
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        what = "a meta tensor, without values" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise ConfigError(f"weights: {name!r} is {what}; pass a tensor with values")
    return WeightDecl(tuple(tensor.shape), dtype_name(tensor.dtype))


class _TensorFiles:
    """One safetensors file, or the files that a Hugging Face index names, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, Any] = {}  # tensor -> its open file. freed with this object
        self.decls: dict[str, WeightDecl] = {}
        for file, only in _files_of(path):
            self._add(file, only)

    def __str__(self) -> str:
        return str(self._path)

    def _add(self, path: Path, only: list[str] | None) -> None:
        opener: Any = safe_open
        try:
            regular_size(path)  # a link to a regular file is fine: the Hugging Face cache consists of links
            file = opener(path, framework="pt")
            held = set(file.keys())
            for name in sorted(held) if only is None else only:
                if name not in held:
                    raise CheckpointError(
                        f"{self._path} says that {name!r} is in {path.name}, which has no such tensor"
                    )
                part = file.get_slice(name)
                self.decls[name] = WeightDecl(tuple(part.get_shape()), code_name(part.get_dtype()))
                self._files[name] = file
        except (SafetensorError, OSError, RuntimeError) as exc:  # torch raises the last for a file it cannot map
            raise CheckpointError(f"{path} cannot be read as safetensors: {_one_line(exc)}") from exc

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except SafetensorError as exc:
            raise CheckpointError(f"{self._path}: {name!r} cannot be read: {_one_line(exc)}") from exc
        return tensor


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc.strerror if isinstance(exc, OSError) and exc.strerror else exc).split())


def _files_of(path: Path) -> list[tuple[Path, list[str] | None]]:
    """Each file of ``path``, and which of its tensors count; None if all do."""
    try:
        if path.is_dir():
            path = _in_directory(path)
        if not path.is_file():
            raise CheckpointError(f"no weights at {path}: give a safetensors file, or a directory with {WHOLE_FILE}")
        return _indexed(path) if path.suffix == ".json" else [(path, None)]
    except OSError as exc:
        raise CheckpointError(f"weights cannot be read from {path}: {_one_line(exc)}") from exc


def _in_directory(directory: Path) -> Path:
    for name in (INDEX_FILE, WHOLE_FILE):
        if (directory / name).is_file():
            return directory / name
    if (directory / MANIFEST).is_file():
        raise CheckpointError(
            f"{directory} is a RayZero checkpoint, not weights; resume from it, or export it with rayzero export"
        )
    held = sorted(entry.name for entry in directory.iterdir())[:8]
    raise CheckpointError(
        f"{directory} has neither {WHOLE_FILE} nor {INDEX_FILE}; it has {', '.join(held) or 'nothing'}. Save the "
        "weights as safetensors"
    )


def _indexed(index: Path) -> list[tuple[Path, list[str] | None]]:
    by_file: dict[str, list[str]] = {}
    for name, file in _weight_map(index).items():
        by_file.setdefault(file, []).append(name)
    for file in by_file:
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise CheckpointError(f"{index} names {file[:200]!r}, which is outside its folder")
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index} names {file[:200]!r}, which does not exist")
    return [(index.parent / file, names) for file, names in by_file.items()]


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> the file it is in."""
    try:
        placed = parse_json(read_text(index, at_most=_MAX_INDEX))["weight_map"]
        if not all(isinstance(file, str) for file in placed.values()):
            raise ValueError("it must name a file for each tensor")
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{index} is not an index of safetensors files: it needs a weight_map ({exc!r})") from exc
    return dict(placed)
