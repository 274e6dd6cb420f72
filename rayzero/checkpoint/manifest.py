"""What a checkpoint is, as data: the manifest, its JSON, its checks and its content digest.

Two hashes, two questions. ``Manifest.self_hash`` covers every field: is this file what was written?
``Manifest.digest`` covers the *content*: the step, the hyper-parameters, each parameter's step count and the
bytes of every slice of every parameter and optimizer state, in layout order. It does not depend on how many
owners wrote the files, on the run's name or on the ranks' loop states, so that a resumed run can be compared
with an uninterrupted one, and two numbers of optimizer actors with each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rayzero.errors import CheckpointError, RayZeroError
from rayzero.layout.model_layout import ModelLayout, ParamSlot, UnitLayout
from rayzero.messages import COMPUTE, MASTER, FileEntry, Hyper, ModelSpec, canonical_json

FORMAT = "rayzero-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor in one owner file: elements ``start`` to ``stop`` of one parameter's values of one kind."""

    file: str
    tensor: str  # its name in the file
    param: str
    kind: str  # MASTER, an optimizer state such as "exp_avg", or COMPUTE for frozen parameters
    start: int
    stop: int
    shape: tuple[int, ...]  # of the whole parameter
    dtype: str
    sha256: str  # of the piece's bytes

    @classmethod
    def from_content(cls, file: str, tensor: str, content: Mapping[str, Any]) -> Piece:
        """Read one entry of ``FileEntry.content``; unknown keys are left alone."""
        known = {name: content[name] for name in ("param", "kind", "start", "stop", "dtype", "sha256")}
        return cls(file=file, tensor=tensor, shape=tuple(content["shape"]), **known)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a checkpoint says about itself. Made by ``commit_checkpoint``, read by ``CheckpointReader``."""

    step: int  # decided steps the content includes
    spec: ModelSpec
    hyper: tuple[Hyper, ...]  # per parameter group, as of the last decision
    slot_steps: Mapping[str, int]  # parameter -> updates it has had
    owner_files: tuple[FileEntry, ...]
    rank_files: tuple[FileEntry, ...]

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file the checkpoint consists of, the manifest itself excluded."""
        return self.owner_files + self.rank_files

    @cached_property
    def pieces(self) -> Mapping[tuple[str, str], tuple[Piece, ...]]:
        """(parameter, kind) -> its pieces in element order."""
        found: dict[tuple[str, str], list[Piece]] = {}
        for entry in self.owner_files:
            for tensor, content in entry.content.items():
                piece = Piece.from_content(entry.name, tensor, content)
                found.setdefault((piece.param, piece.kind), []).append(piece)
        return {key: tuple(sorted(pieces, key=lambda p: p.start)) for key, pieces in found.items()}

    def kinds(self, param: str) -> list[str]:
        """What is stored of ``param``, sorted."""
        return sorted(kind for name, kind in self.pieces if name == param)

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
        """Every parameter is there whole, cut exactly as the layout's shard grid cuts it.

        Raises CheckpointError naming the parameter, the kind and the missing or foreign range."""
        grid = _grid(self.spec.layout)
        names = {slot.name for _, slot in slots_of(self.spec.layout)}
        for param, kind in self.pieces:
            if param not in names:
                raise CheckpointError(f"step {self.step}: {kind} of {param!r} was written, but no unit has it")
        for unit, slot in slots_of(self.spec.layout):
            wanted = MASTER if unit.trainable else COMPUTE
            for kind in sorted({wanted, *self.kinds(slot.name)}) if slot.numel else []:
                cuts = [(piece.start, piece.stop) for piece in self.pieces.get((slot.name, kind), ())]
                if cuts != grid[slot.name]:
                    raise CheckpointError(
                        f"step {self.step}: {kind} of {slot.name!r} is not complete: "
                        f"expected element ranges {grid[slot.name]}, got {cuts}"
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
        """The inverse of ``to_json``; ``where`` names the file in errors. Raises CheckpointError on any damage."""
        described = _parse(text, where)
        claimed = described.pop("sha256", None)
        if described.get("format") != FORMAT:
            raise CheckpointError(f"{where} is not a RayZero manifest: its format is {described.get('format')!r}")
        if described.get("version") != VERSION:
            raise CheckpointError(
                f"{where} has format version {described.get('version')!r}, this RayZero reads version {VERSION}; "
                "use the RayZero that wrote it"
            )
        if claimed != (got := _hash(described)):
            raise CheckpointError(
                f"{where} is damaged: it says its hash is {str(claimed)[:12]}, its content has {got[:12]}; "
                "use another checkpoint"
            )
        return cls._from_fields(described, where)

    @classmethod
    def _from_fields(cls, described: dict[str, Any], where: str) -> Manifest:
        try:
            manifest = cls(
                step=described["step"],
                spec=ModelSpec.from_json(described["spec"]),
                hyper=tuple(described["hyper"]),
                slot_steps=described["steps"],
                owner_files=tuple(FileEntry(**entry) for entry in described["owner_files"]),
                rank_files=tuple(FileEntry(**entry) for entry in described["rank_files"]),
            )
            digest = manifest.digest
        except (KeyError, TypeError, ValueError, RayZeroError) as exc:
            raise CheckpointError(f"{where} lacks or misstates a field: {exc!r}") from exc
        if digest != described["digest"]:
            raise CheckpointError(
                f"{where} has a wrong content digest: it says {str(described['digest'])[:12]}, "
                f"its entries give {digest[:12]}"
            )
        return manifest


def slots_of(layout: ModelLayout) -> Iterable[tuple[UnitLayout, ParamSlot]]:
    """Every (unit, slot) in forward order."""
    return ((unit, slot) for unit in layout.units for slot in unit.slots)


def _grid(layout: ModelLayout) -> dict[str, list[tuple[int, int]]]:
    """Parameter -> the element ranges the shard grid cuts it into."""
    grid: dict[str, list[tuple[int, int]]] = {}
    for shard in layout.shards:
        for part in layout.slices(shard):
            name = layout.units[shard.unit].slots[part.slot].name
            grid.setdefault(name, []).append((part.param_start, part.param_start + part.numel))
    return grid


def _file_to_json(entry: FileEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in ("name", "size_bytes", "sha256", "content")}


def _hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        described = json.loads(text)
    except ValueError as exc:
        raise CheckpointError(f"{where} is not JSON ({exc}); it is damaged or was cut short") from exc
    if not isinstance(described, dict):
        raise CheckpointError(f"{where} is not a RayZero manifest: expected a JSON object")
    return described
