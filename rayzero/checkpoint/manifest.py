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
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, Field

from rayzero.checkpoint.tensor_file import DTYPES, TensorDecl
from rayzero.errors import CheckpointError, RayZeroError
from rayzero.files import parse_json
from rayzero.kernels.moments import CODED, packed_bytes
from rayzero.layout.model_layout import ModelLayout, ParamSlot, Shape, UnitLayout, dtype_name
from rayzero.protocol.messages import COMPUTE, MASTER, FileEntry, Hyper, ModelSpec, canonical_json
from rayzero.records import Sha256, Whole, check_record, parse_record

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


_T = TypeVar("_T")


def _one_of(names: Iterable[str], what: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"must be {what}")
        return value

    return AfterValidator(check)


def _printable(value: str) -> str:
    if not value or not value.isprintable():
        raise ValueError("must be printable text")
    return value


_Word = Annotated[str, AfterValidator(_printable)]  # messages show it as it is
_Dtype = Annotated[str, _one_of(DTYPES, "a dtype that safetensors files hold")]
_Moments = Annotated[str, _one_of(("", *CODED), f"one of {', '.join(CODED)}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """One tensor in one owner file: elements ``start`` to ``stop`` of one parameter's values of one kind."""

    file: str
    tensor: str  # its name in the file
    param: str
    kind: _Word  # MASTER, an optimizer state such as "exp_avg", or COMPUTE for frozen parameters without a master
    start: Whole
    stop: Whole
    shape: Shape  # of the whole parameter
    dtype: _Dtype
    sha256: Sha256  # of the piece's bytes
    moments: _Moments = ""  # how the values are kept, if they are packed codes; their dtype is uint8
    own_shape: Shape | None = None  # of an optimizer state that has not the parameter's; start and stop count in it

    @property
    def decl(self) -> TensorDecl:
        """What the file must hold."""
        numel = self.stop - self.start
        return TensorDecl((packed_bytes(self.moments, numel) if self.moments else numel,), DTYPES[self.dtype])


@dataclass(frozen=True, slots=True)
class _Whole:
    """A rank's tensor, which is whole."""

    shape: Shape
    dtype: _Dtype

    @property
    def decl(self) -> TensorDecl:
        """What the file must hold."""
        return TensorDecl(self.shape, DTYPES[self.dtype])


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a checkpoint says about itself. Made by ``commit_checkpoint``, read by ``CheckpointReader``."""

    step: Whole  # decided steps that the content includes
    spec: ModelSpec
    hyper: tuple[Hyper, ...]  # per parameter group, as of the last decision
    slot_steps: Annotated[Mapping[str, Whole], Field(validation_alias="steps")]  # parameter -> updates it has had
    owner_files: tuple[FileEntry, ...]
    rank_files: tuple[FileEntry, ...]

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file of the checkpoint except the manifest."""
        return self.owner_files + self.rank_files

    @cached_property
    def pieces(self) -> Mapping[tuple[str, str], tuple[FilePiece, ...]]:
        """(parameter, kind) -> its pieces in element order. Raises ValueError if an entry is wrong."""
        found: dict[tuple[str, str], list[FilePiece]] = {}
        for entry in self.owner_files:
            for piece in _contents(entry, FilePiece).values():
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
        whole = {
            entry.name: {name: one.decl for name, one in _contents(entry, _Whole).items()} for entry in self.rank_files
        }
        return owned | whole

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content (see the module's docstring)."""
        slices = [
            [unit.name, slot.name, kind, piece.start, piece.stop, piece.dtype, piece.sha256]
            + ([] if piece.own_shape is None else [list(piece.own_shape)])
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
        grid = grid_of(self.spec.layout, unit, slot, at_most=len(cuts))
        if pieces and (own := pieces[0].own_shape) is not None and kind not in (COMPUTE, MASTER):
            grid = [(0, math.prod(own))]  # whole, with a parameter that no shard cuts
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
        described = _parse(text, where)
        claimed, claimed_digest = described.pop("sha256", None), described.get("digest")
        if described.get("format") != FORMAT:
            raise CheckpointError(
                f"{where} is not a RayZero manifest: its format is {reprlib.repr(described.get('format'))}"
            )
        if (version := described.get("version")) != VERSION:
            by = "was written by a newer RayZero: it " if isinstance(version, int) and version > VERSION else ""
            raise CheckpointError(
                f"{where} {by}has format version {reprlib.repr(version)}, this RayZero reads version "
                f"{VERSION}; use the RayZero that wrote it"
            )
        try:
            got = _hash(described)
        except RecursionError:
            raise CheckpointError(f"{where} is damaged: it is nested too deeply; use another checkpoint") from None
        if claimed != got:
            raise CheckpointError(
                f"{where} is damaged: it says its hash is {_start_of(claimed)}, but its content has {got[:12]}; "
                "use another checkpoint"
            )
        del described  # as large as what is made of the text now
        try:
            found = parse_record(text, cls)
            manifest = replace(
                found,
                owner_files=_in_order(found.owner_files, "owner_files", owner_file_name),
                rank_files=_in_order(found.rank_files, "rank_files", rank_file_name),
            )
            if [len(groups) for groups in found.spec.group_of] != [len(unit.slots) for unit in found.spec.layout.units]:
                raise ValueError("spec.group_of does not have one number for each parameter")
            if len(manifest.rank_files) != manifest.spec.world_size:
                raise ValueError(f"{len(manifest.rank_files)} rank_files, and world_size {manifest.spec.world_size}")
            manifest.check_complete()
            digest, _ = manifest.digest, manifest.tensors
        except (TypeError, ValueError, RayZeroError) as exc:
            raise CheckpointError(f"{where} lacks or misstates a field: {exc}; use another checkpoint") from exc
        if digest != claimed_digest:
            raise CheckpointError(
                f"{where} is damaged: it says its content digest is {_start_of(claimed_digest)}, but its entries give "
                f"{digest[:12]}; use another checkpoint"
            )
        return manifest


def _start_of(claimed: object) -> str:
    """The first 12 digits of a hash, for messages; of anything else, its short repr."""
    return claimed[:12] if isinstance(claimed, str) and claimed.isalnum() else reprlib.repr(claimed)


def _contents(entry: FileEntry, kind: type[_T]) -> dict[str, _T]:
    """Tensor -> what the manifest says of it. Raises ValueError that names the tensor and the file."""
    found = {}
    for name, content in entry.content.items():
        try:
            found[name] = check_record(content | {"file": entry.name, "tensor": name}, kind)
        except ValueError as error:
            raise ValueError(f"tensor {reprlib.repr(name)} of {entry.name}: {error}") from None
    return found


def _in_order(found: Sequence[FileEntry], key: str, file_name: Callable[[int], str]) -> tuple[FileEntry, ...]:
    """The files in the order of the numbers in their names. Raises ValueError if a number is missing."""
    by_name, names = {entry.name: entry for entry in found}, [file_name(number) for number in range(len(found))]
    if by_name.keys() != set(names):
        given = [entry.name for entry in found]
        raise ValueError(f"{key} have the names {reprlib.repr(given)}, and must have {reprlib.repr(names)}")
    return tuple(by_name[name] for name in names)


def slots_of(layout: ModelLayout) -> Iterable[tuple[UnitLayout, ParamSlot]]:
    """Every (unit, slot) in forward order."""
    return ((unit, slot) for unit in layout.units for slot in unit.slots)


def grid_of(
    layout: ModelLayout, unit: UnitLayout, slot: ParamSlot, *, at_most: float = math.inf
) -> list[tuple[int, int]]:
    """The element ranges that the shard grid cuts a parameter into. Stops after ``at_most`` + 1 of them, because a
    manifest may claim a parameter of 2**62 elements."""
    if layout.whole_parameters and unit.trainable:
        return [(0, slot.numel)] if slot.numel else []
    ranges: list[tuple[int, int]] = []
    at, shard_numel = slot.start, layout.shard_numel
    while at < slot.stop and len(ranges) <= at_most:
        end = min((at // shard_numel + 1) * shard_numel, slot.stop)
        ranges.append((at - slot.start, end - slot.start))
        at = end
    return ranges


def _file_to_json(entry: FileEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in ("name", "size_bytes", "sha256", "content")}


def _hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        described = parse_json(text)
    except ValueError as exc:
        raise CheckpointError(f"{where} is not JSON ({exc}); it is damaged or was cut short") from exc
    if not isinstance(described, dict):
        raise CheckpointError(f"{where} is not a RayZero manifest: expected a JSON object")
    return described
