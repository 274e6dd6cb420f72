"""Reads torch.distributed.checkpoint folders (DCP): ``.metadata`` says which chunk of which tensor is in which file.

Names become weights and states by their place in the state dict that was saved. ``{"model": ..., "optim": ...}``, as
``get_state_dict`` gives them, with the optimizer's states by parameter names, flattened or not; the tensors of a plain
state dict are weights.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from rayzero.checkpoint.tensor_file import is_shape
from rayzero.convert.formats.content import (
    FLOATS,
    WEIGHT,
    Content,
    OptimizerGroup,
    Param,
    Reader,
    WeightDecl,
    damaged,
    plain_option,
    require_states,
    step_count,
)
from rayzero.convert.formats.pickles import METADATA_FILE, load_torch, read_dcp_metadata, require_dense
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.files import open_regular, regular_size
from rayzero.layout.model_layout import dtype_name

_STATE, _GROUPS, _EXTRA = "state", "param_groups", "_extra_state"
_MAX_BYTES_ENTRY = 1 << 28  # bytes of one option of a parameter group

Keys = tuple[Any, ...]  # keys from the top of the saved state dict to a value


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor, and the bytes of a file that hold it as ``torch.save`` wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _StorageInfo


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the folder."""

    decl: WeightDecl
    chunks: tuple[StoredChunk, ...]  # sorted by offsets


@dataclass(frozen=True, slots=True)
class Roles:
    """What the entries of a saved state dict are."""

    weights: Mapping[str, str]  # parameter or buffer -> entry
    states: Mapping[str, Mapping[str, str]]  # parameter -> state -> entry
    groups: Mapping[Keys, Mapping[str, str]]  # keys to a parameter group -> option, "params" too -> entry
    options: Mapping[str, Mapping[str, str]]  # parameter -> option -> entry, of flattened parameter groups
    others: tuple[Keys, ...]  # the keys to what is none of these


def roles_of(paths: Mapping[str, Keys], plain: Collection[str] = ()) -> Roles:
    """Tell weights from states.

    paths: entry -> the keys to it. plain: the entries that are no tensors. What is below the first key ``"model"`` is a
    weight, whatever its name, and has the keys behind it as its name; if there is such a key, only that is a weight: a
    folder may hold generators and loaders, too. An optimizer's state dict is known by its ``"param_groups"``, which are
    numbered or, flattened, hold what no tensor is. Below it, states are ``("state", parameter, kind)`` or, flattened,
    one key ``"state.parameter.kind"``; options of groups ``("param_groups", number, option)`` or
    ``"param_groups.parameter.option"``. Names in which two weights agree are refused."""
    optimizers, trained = _optimizers(paths, plain)
    below_model = any(_model_end(path, optimizers) for path in paths.values())
    weights: dict[str, str] = {}
    states: dict[str, dict[str, str]] = {}
    options: dict[str, dict[str, str]] = {}
    groups: dict[Keys, dict[str, str]] = {}
    others: list[Keys] = []
    for entry, path in paths.items():
        keys, end = [str(key) for key in path], _model_end(path, optimizers)
        flat = None if end else _flattened(keys[-1])
        outside = below_model and not end
        if not end and len(keys) >= 3 and keys[-3] == _STATE and (outside or path[:-3] in optimizers):
            states.setdefault(keys[-2], {})[keys[-1]] = entry
        elif not end and len(keys) >= 3 and keys[-3] == _GROUPS and isinstance(path[-2], int):
            groups.setdefault(path[:-1], {})[keys[-1]] = entry
        elif flat is not None and (outside or (path[:-1], flat[1]) in trained):
            where = states if flat[0] == _STATE else options
            where.setdefault(flat[1], {})[flat[2]] = entry
        elif outside:
            others.append(path)
        elif (name := ".".join(keys[end:]) if end else keys[-1]) in weights:
            raise UnsupportedError(
                f"two tensors are named {name!r} ({weights[name]!r} and {entry!r}); only one model can be "
                "converted at a time"
            )
        else:
            weights[name] = entry
    return Roles(weights, states, groups, options, tuple(others))


def _optimizers(paths: Mapping[str, Keys], plain: Collection[str]) -> tuple[set[Keys], set[tuple[Keys, str]]]:
    """The keys to each optimizer's state dict, and of flattened ones each with a parameter that it has."""
    nested: set[Keys] = set()
    flattened: set[tuple[Keys, str]] = set()
    for entry, path in paths.items():
        if len(path) >= 3 and path[-3] == _GROUPS and isinstance(path[-2], int):
            nested.add(path[:-3])
        flat = _flattened(str(path[-1]))
        if entry in plain and flat is not None and flat[0] == _GROUPS and flat[2] != _EXTRA:
            flattened.add((path[:-1], flat[1]))
    return nested, flattened


def _model_end(path: Keys, optimizers: Collection[Keys]) -> int:
    """How many keys lead to the model that an entry is in; 0 if it is in none. A parameter of this name in an
    optimizer's states is no model."""
    for at, key in enumerate(path[:-1]):
        if key == "model" and not (at and path[at - 1] == _STATE and path[: at - 1] in optimizers):
            return at + 1
    return 0


def _flattened(key: str) -> tuple[str, str, str] | None:
    """(state or param_groups, parameter, kind) of a key that ``get_optimizer_state_dict`` has flattened."""
    head, _, rest = key.partition(".")
    name, _, kind = rest.rpartition(".")
    return (head, name, kind) if head in (_STATE, _GROUPS) and name and kind else None


class DcpReader(Reader):
    """An open DCP folder. Loads one chunk at a time; memory is the chunks that a range touches."""

    def __init__(self, folder: Path, *, states: bool = True) -> None:
        """states: False leaves the optimizer's states out. Raises CheckpointError if the folder is damaged or
        incomplete, UnsupportedError that names what only code could read."""
        super().__init__(folder)
        self._folder = folder
        self._metadata = folder / METADATA_FILE
        metadata = read_dcp_metadata(self._metadata)
        self._sizes: dict[str, int] = {}  # file -> its bytes
        tensors, self._bytes = self._entries(metadata)
        self._tensors = {entry: self._stored(entry, found) for entry, found in tensors.items()}
        planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        # entry -> its keys in the saved state dict; its name alone if the folder does not say
        self._keys: dict[str, Keys] = {
            entry: planned.get(entry, (entry,)) for entry in [*self._tensors, *sorted(self._bytes)]
        }
        if not all(isinstance(path, tuple) and path for path in self._keys.values()):
            raise damaged(self._metadata, "a name has no keys")
        roles = roles_of(self._keys, self._bytes)
        self._require_tensors(roles, states)
        self._entry = {(name, WEIGHT): entry for name, entry in roles.weights.items() if entry in self._tensors}
        self._loaded: dict[tuple[int, ...], Tensor] = {}  # offset -> chunk, of the tensor that was read last
        self._loaded_of = ""
        self.content = self._content(roles, states)

    def _entries(self, metadata: Metadata) -> tuple[dict[str, TensorStorageMetadata], set[str]]:
        found = metadata.state_dict_metadata
        if not isinstance(found, dict) or not isinstance(metadata.storage_data, dict):
            raise damaged(self._metadata, "it lists no tensors")
        tensors = {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
        plain = {name for name, entry in found.items() if isinstance(entry, BytesStorageMetadata)}
        if len(tensors) + len(plain) != len(found) or not all(isinstance(name, str) for name in found):
            raise damaged(self._metadata, "an entry is neither a tensor nor bytes")
        self._places = {
            (getattr(index, "fqn", None), tuple(getattr(index, "offset", None) or ())): place
            for index, place in metadata.storage_data.items()
        }
        return tensors, plain

    def _require_tensors(self, roles: Roles, states: bool) -> None:
        """Raise UnsupportedError if nothing is a weight, or a model's state dict has what is no tensor."""
        if not any(entry in self._tensors for entry in roles.weights.values()):
            held = ", ".join(map(repr, sorted({*self._tensors, *self._bytes})[:8])) or "nothing"
            raise UnsupportedError(
                f"{self._folder} has no tensors of a model; it has {held}. Save a model's state dict with "
                "flatten_state_dict=True, which is DCP's default"
            )
        others = [n for n, e in roles.weights.items() if e in self._bytes and (e != n or n.endswith(_EXTRA))]
        if others and states:
            raise UnsupportedError(
                f"{self._folder} has {others[0]!r} in its model's state dict, which is no tensor, and no other format "
                "could hold it; convert the weights alone (--weights-only)"
            )

    # ---- checks of sizes and places

    def _stored(self, entry: str, found: TensorStorageMetadata) -> Stored:
        shape, dtype = list(found.size), getattr(found.properties, "dtype", None)
        if not is_shape(shape) or not isinstance(dtype, torch.dtype) or not isinstance(found.chunks, list):
            raise damaged(self._metadata, f"{entry!r} has no sound shape or dtype")
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]
        if not is_tiling(tuple(shape), boxes):
            raise damaged(self._metadata, f"the chunks of {entry!r} do not make up its shape {shape}")
        chunks = [
            StoredChunk(offsets, sizes, self._place(entry, offsets)) for offsets, sizes in boxes if math.prod(sizes)
        ]
        return Stored(WeightDecl(tuple(shape), dtype_name(dtype)), tuple(sorted(chunks, key=lambda c: c.offsets)))

    def _place(self, entry: str, offsets: tuple[int, ...]) -> _StorageInfo:
        place, where = self._places.get((entry, offsets)), self._metadata
        if not isinstance(place, _StorageInfo) or not isinstance(place.relative_path, str):
            raise damaged(where, f"it does not say where {entry!r} at {offsets} is")
        if place.transform_descriptors:
            raise UnsupportedError(
                f"{where}: {entry!r} is stored with {place.transform_descriptors}; save it without extensions"
            )
        file = PurePath(place.relative_path)
        if file.is_absolute() or ".." in file.parts or len(file.parts) != 1:
            raise CheckpointError(f"{where} names {place.relative_path[:200]!r}, which is outside its folder")
        if not is_shape([place.offset, place.length]) or place.offset + place.length > self._size(file.name):
            raise damaged(where, f"{entry!r} is beyond the end of {file.name}, which is cut short or was changed")
        return place

    def _size(self, file: str) -> int:
        if file not in self._sizes:
            try:
                self._sizes[file] = regular_size(self._folder / file)
            except OSError as exc:
                raise CheckpointError(
                    f"{self._folder / file} cannot be read, but {METADATA_FILE} names it: {exc.strerror}"
                ) from exc
        return self._sizes[file]

    # ---- what it holds

    def _content(self, roles: Roles, states: bool) -> Content:
        decls = {name: self._tensors[entry].decl for (name, _), entry in self._entry.items()}
        params = {
            name: self._param(name, decl, roles.states.get(name, {}) if states else {})
            for name, decl in decls.items()
            if decl.dtype in (*FLOATS, "float64")
        }
        strangers = sorted(set(roles.states) - set(params)) if states else []
        if strangers:
            raise UnsupportedError(
                f"{self._folder} has optimizer states of {strangers[0]!r}, which is no parameter in it; save the model "
                "with the optimizer, by get_state_dict, or convert the weights alone (--weights-only)"
            )
        return Content(
            params=params,
            buffers={name: decl for name, decl in decls.items() if name not in params},
            groups=self._groups(roles) if states else (),
            step=max((param.updates for param in params.values()), default=0),
            left_out=self._left_out(roles),
        )

    def _left_out(self, roles: Roles) -> tuple[str, ...]:
        """What is neither of the model nor of an optimizer: of a scheduler's many entries, its name alone."""
        plain = [self._keys[entry] for entry in roles.weights.values() if entry in self._bytes]
        others = [*roles.others, *plain]
        kept = {path[:end] for path in set(self._keys.values()) - set(others) for end in range(1, len(path) + 1)}
        shortest = (
            next((path[:end] for end in range(1, len(path)) if path[:end] not in kept), path) for path in others
        )
        return tuple(sorted({".".join(map(str, keys)) for keys in shortest}))

    def _param(self, name: str, decl: WeightDecl, kinds: Mapping[str, str]) -> Param:
        held, own = [], {}
        for kind, entry in sorted(kinds.items()):
            if kind == "step":
                continue
            stored = self._tensors.get(entry)
            if stored is None:
                raise UnsupportedError(f"{self._folder}: the optimizer state {kind!r} of {name!r} is not a tensor")
            require_states(name, WeightDecl(stored.decl.shape, decl.dtype), kind, stored.decl, self)
            if stored.decl.shape != decl.shape:
                own[kind] = stored.decl.shape
            self._entry[name, kind] = entry
            held.append(kind)
        step = kinds.get("step")
        try:
            updates = 0 if step is None else step_count(self._value(step), repr(step))
        except ValueError as exc:
            raise damaged(self, f"the step count {exc}") from exc
        return Param(decl=decl, states=tuple(held), own_shapes=own, updates=updates)

    def _groups(self, roles: Roles) -> tuple[OptimizerGroup, ...]:
        numbered = sorted(roles.groups.items(), key=lambda found: found[0][-1])
        if numbered:
            return tuple(group_from({o: self._value(e) for o, e in given.items()}, self) for _, given in numbered)
        return grouped({name: {o: self._value(e) for o, e in given.items()} for name, given in roles.options.items()})

    # ---- values

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """As ``Reader.read``. Loads the chunks that the range touches, and keeps those that the next range may."""
        entry = self._entry[name, kind]
        stored = self._tensors[entry]
        if entry != self._loaded_of:
            self._loaded.clear()
            self._loaded_of = entry
        rows, row = rows_of(stored.decl.shape)
        first, last = (start // row, -(-stop // row)) if row else (0, rows)
        values = torch.empty((last - first, *stored.decl.shape[1:]), dtype=stored.decl.torch_dtype(name), device="cpu")
        for chunk in stored.chunks:
            box = chunk.sizes or (1,)
            begin = (chunk.offsets or (0,))[0]
            low, high = max(first, begin), min(last, begin + box[0])
            if low < high:
                if chunk.offsets not in self._loaded:
                    self._loaded[chunk.offsets] = self._chunk(entry, chunk)
                here = tuple(slice(o, o + s) for o, s in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
                part = self._loaded[chunk.offsets].view(box)[low - begin : high - begin]
                values[(slice(low - first, high - first), *here)] = part
            if begin + box[0] <= last:
                self._loaded.pop(chunk.offsets, None)  # ranges come in order
        flat = values.reshape(-1)[start - first * row : stop - first * row]
        return flat if kind == WEIGHT else flat.float()

    def _value(self, entry: str) -> Any:
        """A value that is not a tensor, or the one number of a tensor."""
        if entry not in self._bytes:
            stored = self._tensors[entry]
            if math.prod(stored.decl.shape) != 1:
                raise damaged(self, f"{entry!r} has shape {stored.decl.shape}, and must be one number")
            return self._chunk(entry, stored.chunks[0]).item()
        place = self._place(entry, ())
        if place.length > _MAX_BYTES_ENTRY:
            raise damaged(self, f"{entry!r} has {place.length:,} bytes")
        return self._saved(entry, place)

    def _chunk(self, entry: str, chunk: StoredChunk) -> Tensor:
        where = f"{entry!r} in {self}"
        tensor = require_dense(self._saved(entry, chunk.place), where)
        found, wanted = WeightDecl.of(tensor), WeightDecl(chunk.sizes, self._tensors[entry].decl.dtype)
        if found != wanted:
            raise damaged(
                where,
                f"its file has {found.dtype} of shape {found.shape}, and {METADATA_FILE} says {wanted.dtype} "
                f"{wanted.shape}",
            )
        return tensor

    def _saved(self, entry: str, place: _StorageInfo) -> Any:
        """What ``torch.save`` wrote there."""
        path = self._folder / place.relative_path
        try:
            with open_regular(path) as stream:
                stream.seek(place.offset)
                data = io.BytesIO(stream.read(place.length))
        except OSError as exc:
            raise CheckpointError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        return load_torch(data, f"{entry!r} in {self}")


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """(how many rows, elements of a row) of a tensor cut along its first dimension; a 0-dim tensor is one row."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def is_tiling(shape: tuple[int, ...], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether (offsets, sizes) cut ``shape`` into a grid: each element is in exactly one box. Empty boxes count as
    nothing.

    Every way in which DTensor and FSDP cut a tensor is a grid, and a grid can be checked in one look at each box."""
    full = [(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes if math.prod(sizes)]
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in full):
        return False
    if not all(is_shape(list(offsets)) and is_shape(list(sizes)) for offsets, sizes in full):
        return False
    if math.prod(shape) == 0:
        return not full
    cuts = [sorted({offsets[axis] for offsets, _ in full} | {size}) for axis, size in enumerate(shape)]
    after = [dict(pairwise(at)) for at in cuts]
    fits = all(
        after[axis].get(offset) == offset + size
        for offsets, sizes in full
        for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
    )
    return (
        fits
        and all(at[0] == 0 for at in cuts)
        and len({offsets for offsets, _ in full}) == len(full) == math.prod(len(at) - 1 for at in cuts)
    )


def group_from(group: Any, where: object) -> OptimizerGroup:
    """A parameter group of a torch optimizer's state dict whose parameters are names."""
    names = group.get("params") if isinstance(group, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedError(
            f"{where}: the optimizer's parameter groups do not name their parameters; save it with "
            "get_optimizer_state_dict, or convert the weights alone (--weights-only)"
        )
    return OptimizerGroup.of(names, group)


def grouped(options: Mapping[str, Mapping[str, Any]]) -> tuple[OptimizerGroup, ...]:
    """Parameters with equal options make a group, in the order of their first parameter."""
    found: list[tuple[Mapping[str, Any], list[str]]] = []
    for name, given in options.items():
        plain = {key: plain_option(value) for key, value in given.items()}
        names = next((names for known, names in found if known == plain), None)
        if names is None:
            found.append((plain, names := []))
        names.append(name)
    return tuple(OptimizerGroup(params=tuple(names), options=given) for given, names in found)
