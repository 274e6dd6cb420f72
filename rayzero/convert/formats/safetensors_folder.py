"""Hugging Face's format: one safetensors file, or a folder of them with an index. Weights only; it has no states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rayzero.checkpoint.tensor_file import DTYPES, TensorDecl, TensorFileWriter, code_name, shape_in_torch
from rayzero.convert.formats.content import FLOATS, Content, Param, Reader, WeightDecl, cut_into_files
from rayzero.errors import CheckpointError
from rayzero.files import parse_json, read_text, regular_size, replace_file

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX = 1 << 28  # bytes: two million tensors


class SafetensorsReader(Reader):
    """One safetensors file, or the files that a Hugging Face index names, memory-mapped.

    As in transformers, every tensor of those files counts, and no other file. Nothing in the format tells parameters
    from buffers: floating-point tensors count as parameters, others as buffers."""

    def __init__(self, path: Path, *, states: bool = True) -> None:
        """states: there are none. Raises CheckpointError if files are missing or damaged, if the index names one
        outside its folder, or if nobody can tell which values are meant: of two sets of weights, or of a tensor that
        two files have."""
        super().__init__(path)
        self._files: dict[str, Any] = {}  # tensor -> its open file
        self._flat: tuple[str, Tensor] | None = None  # the tensor that was read last
        decls: dict[str, WeightDecl] = {}
        files: dict[str, str] = {}  # tensor -> its file's name
        for file, promised in _files_of(path):
            found = self._add(file, promised)
            if twice := sorted(found.keys() & decls.keys()):
                raise CheckpointError(
                    f"{path}: {twice[0]!r} is in both {files[twice[0]]} and {file.name}, and only one of them can be "
                    "meant; save the model again, into an empty folder"
                )
            decls |= found
            files |= dict.fromkeys(found, file.name)
        self.content = Content(
            params={name: Param(decl=decl) for name, decl in decls.items() if decl.dtype in (*FLOATS, "float64")},
            buffers={name: decl for name, decl in decls.items() if decl.dtype not in (*FLOATS, "float64")},
        )

    def _add(self, path: Path, promised: list[str]) -> dict[str, WeightDecl]:
        """Every tensor of a file. ``promised``: those that it must have."""
        opener: Any = safe_open
        found: dict[str, WeightDecl] = {}
        try:
            regular_size(path)  # a link to a regular file is fine: the Hugging Face cache consists of links
            file = opener(path, framework="pt")
            held = sorted(file.keys())
            if lacking := set(promised) - set(held):
                raise CheckpointError(f"{self} says that {min(lacking)!r} is in {path.name}, which has no such tensor")
            for name in held:
                part = file.get_slice(name)
                dtype = code_name(part.get_dtype())
                found[name] = WeightDecl(shape_in_torch(part.get_shape(), DTYPES.get(dtype)), dtype)
                self._files[name] = file
        except (SafetensorError, OSError, RuntimeError, ValueError) as exc:  # RuntimeError: torch cannot map the file
            raise CheckpointError(
                f"{path} cannot be read as safetensors: {_one_line(exc)}; give a safetensors file, or a checkpoint's "
                "folder"
            ) from exc
        return found

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        if self._flat is None or self._flat[0] != name:
            try:
                self._flat = name, self._files[name].get_tensor(name).reshape(-1)
            except SafetensorError as exc:
                raise CheckpointError(f"{self}: {name!r} cannot be read: {_one_line(exc)}") from exc
        return self._flat[1][start:stop]


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc.strerror if isinstance(exc, OSError) and exc.strerror else exc).split())


def _files_of(path: Path) -> list[tuple[Path, list[str]]]:
    """Each file of ``path``, and the tensors that an index says it has."""
    try:
        if path.is_dir():
            path = _in_directory(path)
        if not path.is_file():
            raise CheckpointError(f"no weights at {path}: give a safetensors file, or a directory with {WHOLE_FILE}")
        return _indexed(path) if path.suffix == ".json" else [(path, [])]
    except OSError as exc:
        raise CheckpointError(f"weights cannot be read from {path}: {_one_line(exc)}") from exc


def _in_directory(directory: Path) -> Path:
    """The file or index of a folder. Raises CheckpointError if it has neither, or both and they may differ (of which
    transformers takes the single file without a word)."""
    found = [name for name in (INDEX_FILE, WHOLE_FILE) if (directory / name).is_file()]
    if not found:
        held = sorted(entry.name for entry in directory.iterdir())[:8]
        raise CheckpointError(
            f"{directory} has neither {WHOLE_FILE} nor {INDEX_FILE}; it has {', '.join(held) or 'nothing'}. Give "
            "safetensors, or a checkpoint of RayZero, torch DCP or DeepSpeed ZeRO"
        )
    if len(found) == 2 and set(_weight_map(directory / INDEX_FILE).values()) != {WHOLE_FILE}:
        raise CheckpointError(
            f"{directory} has both {WHOLE_FILE} and {INDEX_FILE}, and they may be of different models; give the path "
            "of the one that is meant, or remove the other"
        )
    return directory / found[0]


def _indexed(index: Path) -> list[tuple[Path, list[str]]]:
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


# ---- writing ----------------------------------------------------------------------------------------------------


def write_safetensors(reader: Reader, folder: Path, *, dtype: torch.dtype | None, max_bytes: int) -> None:
    """Write parameters, their other names, and buffers into ``folder``, which exists.

    dtype: what floating-point parameters are cast to; None keeps them (``Content.cast_dtype``). max_bytes: the most
    tensor bytes of one file, unless one tensor alone has more. With more than one file, an index says which tensor is
    where. At most ``PART`` elements are in memory at a time, if the source reads no more. Each file is fsynced."""
    content = reader.content
    decls = {name: TensorDecl(decl.shape, content.cast_dtype(name, dtype)) for name, decl in content.decls.items()}
    planned = list(cut_into_files(decls, lambda name: decls[name].size_bytes, max_bytes))
    placed: dict[str, str] = {}  # tensor -> its file
    for number, held in enumerate(planned, 1):
        file = WHOLE_FILE if len(planned) == 1 else f"model-{number:05d}-of-{len(planned):05d}.safetensors"
        write_file(reader, folder / file, {name: decls[name] for name in held})
        placed |= dict.fromkeys(held, file)
    if len(planned) > 1:
        total = sum(decl.size_bytes for decl in decls.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        replace_file(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def write_file(reader: Reader, path: Path, decls: Mapping[str, TensorDecl]) -> None:
    """Write one file with these tensors of ``reader``, cast to the dtypes that are declared, and fsync it. Raises
    OSError, and CheckpointError for what is damaged."""
    with TensorFileWriter(path, decls, {"format": "pt"}) as file:
        for name in file.order:
            dtype = decls[name].dtype
            file.write(name, (part.to(dtype) for part in reader.parts(name)))
