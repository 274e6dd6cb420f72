"""The manifest: what a checkpoint says about itself, with its JSON, its checks and its content digest.

There are two hashes. The one at the end of manifest.json (``sha256``) covers every field and answers: is this the file
that was written? ``Manifest.digest`` covers the *content*: the step, the hyper-parameters, each parameter's step count
and the bytes of every slice of every parameter and optimizer state, in layout order. It does not depend on the number
of owners, on the run's name or on the ranks' loop states. So a resumed run can be compared with an uninterrupted one,
and a run on two owners with the same run on three.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, TypeAdapter

from rayzero.checkpoint.files import fields
from rayzero.checkpoint.files.tensor_file import DTYPES, TensorDecl
from rayzero.errors import CheckpointError, RayZeroError
from rayzero.files import parse_json
from rayzero.kernels.moments import CODED, packed_bytes
from rayzero.layout.model_layout import ModelLayout, ParamSlot, UnitLayout, dtype_name
from rayzero.protocol.messages import COMPUTE, MASTER, FileEntry, Hyper, ModelSpec, canonical_json

FORMAT = "rayzero-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
MAX_BYTES = 1 << 29  # of its text: some 1.5 million pieces of parameters and states


def owner_file_name(owner: int) -> str:
    """The name of the file that one owner writes."""
    return f"owner-{owner:03d}.safetensors"


def rank_file_name(rank: int) -> str:
    """The name of the file that one rank writes."""
    return f"rank-{rank:04d}.safetensors"


def _coded(value: str) -> str:
    if value and value not in CODED:
        raise ValueError(f"must be one of {', '.join(CODED)}")
    return value


_Moments = Annotated[str, AfterValidator(_coded)]  # kernels/moments.py


@dataclass(frozen=True, slots=True)
class _Whole:
    """A rank's tensor, which is whole."""

    shape: fields.Shape
    dtype: fields.Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor in one owner file: elements ``start`` to ``stop`` of one parameter's values of one kind."""

    file: str
    tensor: str  # its name in the file
    param: str
    kind: fields.Word  # MASTER, an optimizer state such as "exp_avg", or COMPUTE for frozen parameters without a master
    start: fields.Count
    stop: fields.Count
    shape: fields.Shape  # of the whole parameter
    dtype: fields.Dtype
    sha256: fields.Sha256  # of the piece's bytes
    moments: _Moments = ""  # how the values are kept, if they are packed codes; their dtype is uint8

    @property
    def decl(self) -> TensorDecl:
        """What the file must hold."""
        numel = self.stop - self.start
        return TensorDecl((packed_bytes(self.moments, numel) if self.moments else numel,), DTYPES[self.dtype])

    @classmethod
    def from_content(cls, file: str, tensor: str, content: Mapping[str, Any]) -> Piece:
        """Read one entry of ``FileEntry.content``, ignoring unknown keys. Raises ValueError if a value is missing or
        wrong."""
        return fields.checked(_PIECE, {**content, "file": file, "tensor": tensor})


_PIECE = TypeAdapter(Piece)
_WHOLE = TypeAdapter(_Whole)
_BODY = TypeAdapter(fields.Body)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a checkpoint says about itself. Made by ``commit_checkpoint``, read by ``CheckpointReader``."""

    step: int  # decided steps that the content includes
    spec: ModelSpec
    hyper: tuple[Hyper, ...]  # per parameter group, as of the last decision
    slot_steps: Mapping[str, int]  # parameter -> how many updates it has had
    owner_files: tuple[FileEntry, ...]
    rank_files: tuple[FileEntry, ...]

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file of the checkpoint except the manifest."""
        return self.owner_files + self.rank_files

    @cached_property
    def pieces(self) -> Mapping[tuple[str, str], tuple[Piece, ...]]:
        """(parameter, kind) -> its pieces in element order. Raises ValueError if an entry is wrong."""
        found: dict[tuple[str, str], list[Piece]] = {}
        for entry in self.owner_files:
            for tensor, content in entry.content.items():
                piece = Piece.from_content(entry.name, tensor, content)
                found.setdefault((piece.param, piece.kind), []).append(piece)
        return {key: tuple(sorted(pieces, key=lambda p: p.start)) for key, pieces in found.items()}

    @cached_property
    def _kinds(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for param, kind in sorted(self.pieces):
            found.setdefault(param, []).append(kind)
        return found

    def kinds(self, param: str) -> list[str]:
        """The kinds of values that are stored for ``param``, sorted."""
        return self._kinds.get(param, [])

    @cached_property
    def tensors(self) -> Mapping[str, Mapping[str, TensorDecl]]:
        """File name -> the tensors it must hold, by name. Raises ValueError if an entry lacks a shape or dtype."""
        owned: dict[str, dict[str, TensorDecl]] = {entry.name: {} for entry in self.owner_files}
        for piece in (piece for pieces in self.pieces.values() for piece in pieces):
            owned[piece.file][piece.tensor] = piece.decl
        for entry in self.rank_files:
            whole = {name: fields.checked(_WHOLE, content) for name, content in entry.content.items()}
            owned[entry.name] = {name: TensorDecl(one.shape, DTYPES[one.dtype]) for name, one in whole.items()}
        return owned

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content (see the module's docstring)."""
        slices = [
            [unit.name, slot.name, kind, piece.start, piece.stop, piece.dtype, piece.sha256]
            for unit, slot in slots_of(self.spec.layout)
            for kind in self.kinds(slot.name)
            for piece in self.pieces[slot.name, kind]
        ]
        content = {
            "step": self.step,
            "hyper": self.hyper,
            "slot_steps": dict(self.slot_steps),
            "layout": self.spec.layout.digest,
            "slices": slices,
        }
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()

    def check_complete(self) -> None:
        """Check that every parameter is there whole, in its shape and dtype, and cut exactly as the layout's shard
        grid cuts it.

        Raises CheckpointError that names the parameter, the kind and, for a wrong cut, both lists of ranges."""
        slots = {slot.name: (unit, slot) for unit, slot in slots_of(self.spec.layout)}
        for param, kind in self.pieces:
            if param not in slots:
                raise CheckpointError(f"step {self.step}: {kind} of {param!r} was written, but no unit has it")
        for name, (unit, slot) in slots.items():
            wanted = MASTER if unit.has_master else COMPUTE
            kinds = {*self.kinds(name), *((wanted,) if slot.numel else ())}
            if not unit.trainable and (foreign := sorted(kinds - {wanted})):
                raise CheckpointError(f"step {self.step}: {foreign[0]} of {name!r} was written, but it is frozen")
            for kind in sorted(kinds):
                self._check_pieces(unit, slot, kind)

    def _check_pieces(self, unit: UnitLayout, slot: ParamSlot, kind: str) -> None:
        pieces = self.pieces.get((slot.name, kind), ())
        dtype = dtype_name(unit.dtype if kind == COMPUTE else torch.float32)
        cuts = [(piece.start, piece.stop) for piece in pieces]
        grid = _grid(slot, self.spec.layout.shard_numel, at_most=len(cuts))
        if cuts != grid:
            raise CheckpointError(
                f"step {self.step}: {kind} of {slot.name!r} is not complete: "
                f"expected element ranges {reprlib.repr(grid)}, got {reprlib.repr(cuts)}"
            )
        for piece in pieces:
            packed = bool(piece.moments) and kind not in (COMPUTE, MASTER)
            if (piece.shape, piece.dtype) != (slot.shape, "uint8" if packed else dtype):
                raise CheckpointError(
                    f"step {self.step}: {kind} of {slot.name!r} is {reprlib.repr(piece.dtype)} of shape {piece.shape} "
                    f"in {piece.file}, and must be {dtype} of shape {slot.shape}"
                )

    def to_json(self) -> str:
        """The text of manifest.json, ending with its own hash."""
        body = self._body()
        return json.dumps(body | {"sha256": _hash(body)}, indent=1) + "\n"

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "digest": self.digest,
            "hyper": list(self.hyper),
            "steps": dict(self.slot_steps),
            "owner_files": [_file_to_json(entry) for entry in self.owner_files],
            "rank_files": [_file_to_json(entry) for entry in self.rank_files],
            "spec": self.spec.to_json(),
        }

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """The inverse of ``to_json``. ``where`` names the file in errors. Raises CheckpointError for any damage."""
        try:
            described = parse_json(text)
        except ValueError as exc:
            raise CheckpointError(f"{where} is not JSON ({exc}); it is damaged or was cut short") from exc
        if not isinstance(described, dict):
            raise CheckpointError(f"{where} is not a RayZero manifest: expected a JSON object")
        claimed = described.pop("sha256", None)
        if described.get("format") != FORMAT:
            raise CheckpointError(
                f"{where} is not a RayZero manifest: its format is {reprlib.repr(described.get('format'))}"
            )
        if described.get("version") != VERSION:
            raise CheckpointError(
                f"{where} has format version {reprlib.repr(described.get('version'))}, this RayZero reads version "
                f"{VERSION}; use the RayZero that wrote it"
            )
        try:
            got = _hash(described)
        except RecursionError:
            raise CheckpointError(f"{where} is damaged: it is nested too deeply; use another checkpoint") from None
        _require_hash(where, "hash", claimed, "its content has", got)
        try:
            body = fields.checked(_BODY, described)
            manifest = cls(
                step=body.step,
                spec=_spec_of(described["spec"], body),
                hyper=tuple(body.hyper),
                slot_steps=body.steps,
                owner_files=_in_order("owner_files", body.owner_files, owner_file_name),
                rank_files=_in_order("rank_files", body.rank_files, rank_file_name),
            )
            manifest.check_complete()
            digest, _ = manifest.digest, manifest.tensors
        except (TypeError, ValueError, RayZeroError) as exc:
            raise CheckpointError(f"{where} lacks or misstates a field: {exc}; use another checkpoint") from exc
        _require_hash(where, "content digest", body.digest, "its entries give", digest)
        return manifest


def _require_hash(where: str, what: str, claimed: object, which: str, got: str) -> None:
    if claimed != got:
        says = claimed[:12] if isinstance(claimed, str) and claimed.isalnum() else reprlib.repr(claimed)
        raise CheckpointError(
            f"{where} is damaged: it says its {what} is {says}, but {which} {got[:12]}; use another checkpoint"
        )


def _spec_of(described: dict[str, Any], body: fields.Body) -> ModelSpec:
    """The model and optimizer that the run described at attach. Raises ValueError if they and the ranks' files do not
    go together, TypeError for an unknown field, ConfigError for an unknown dtype."""
    names = Counter(name for unit in body.spec.layout.units for name, _ in unit.params)
    if names and (most := names.most_common(1)[0])[1] > 1:
        raise ValueError(f"parameter {reprlib.repr(most[0])} comes twice")
    spec = ModelSpec.from_json(described)
    if [len(groups) for groups in spec.group_of] != [len(unit.slots) for unit in spec.layout.units]:
        raise ValueError("group_of does not have one number for each parameter")
    if len(body.rank_files) != spec.world_size:
        raise ValueError(f"{len(body.rank_files)} rank_files, and world_size {spec.world_size}")
    return spec


def _in_order(key: str, files: Sequence[fields.File], file_name: Callable[[int], str]) -> tuple[FileEntry, ...]:
    """The files in the order of the numbers in their names. Raises ValueError if a number is missing."""
    by_name = {file.name: FileEntry(**dict(file)) for file in files}
    names = [file_name(number) for number in range(len(files))]
    if by_name.keys() != set(names):
        given = [file.name for file in files]
        raise ValueError(f"{key} have the names {reprlib.repr(given)}, and must have {reprlib.repr(names)}")
    return tuple(by_name[name] for name in names)


def slots_of(layout: ModelLayout) -> Iterable[tuple[UnitLayout, ParamSlot]]:
    """Every (unit, slot) in forward order."""
    return ((unit, slot) for unit in layout.units for slot in unit.slots)


def _grid(slot: ParamSlot, shard_numel: int, *, at_most: int) -> list[tuple[int, int]]:
    """The element ranges that the shard grid cuts a parameter into. Stops after ``at_most`` + 1 of them, because a
    manifest may claim a parameter of 2**62 elements."""
    ranges: list[tuple[int, int]] = []
    at = slot.start
    while at < slot.stop and len(ranges) <= at_most:
        end = min((at // shard_numel + 1) * shard_numel, slot.stop)
        ranges.append((at - slot.start, end - slot.start))
        at = end
    return ranges


def _file_to_json(entry: FileEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in ("name", "size_bytes", "sha256", "content")}


def _hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()
