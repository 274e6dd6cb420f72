"""Writes of users into parameters and optimizer states: all ranks ask for the same, then every owner changes it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from rayzero.errors import StepMismatchError, StoreError
from rayzero.layout.model_layout import ModelLayout
from rayzero.messages import COMPUTE, GROUP, MASTER, STEP, Write
from rayzero.optimizer.futures import fail, settle
from rayzero.optimizer.rules import UpdateRule
from rayzero.optimizer.saves import have, owing
from rayzero.optimizer.state import OwnedShard

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes of an element -> a dtype that compares bits


def digest_of(values: Tensor) -> str:
    """Equal for equal bytes. ``values``: host memory, contiguous."""
    content: Any = values.detach().reshape(-1).view(torch.uint8).numpy()
    return str(xxhash.xxh3_128_hexdigest(content))


def same_bits(ours: Tensor, theirs: Tensor) -> Tensor:
    """Per element (of two tensors of one dtype) whether its bits are the same: NaNs may be equal, 0.0 is not -0.0."""
    bits = _BITS[ours.itemsize]
    return ours.view(bits) == theirs.view(bits)


# ---- what ranks ask for -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Asked:
    write: Write
    number: int
    futures: dict[int, Future[None]] = field(default_factory=dict)  # per rank that asked
    begun: bool = False
    asked: tuple[Future[None], ...] = ()  # owners, by index


class WriteRequests:
    """The write that ranks are asking for, one at a time.

    Knows who asked for what; not steps or owners. Called under the lead's lock."""

    def __init__(self) -> None:
        self._asked: _Asked | None = None
        self._count = 0

    def ask(self, rank: int, write: Write, layout: ModelLayout) -> Future[None]:
        """Note that a rank asks. Raises StepMismatchError, naming both, where another asked for something else."""
        if self._asked is None:
            self._count += 1
            self._asked = _Asked(write, self._count)
        asked = self._asked
        if write != asked.write or rank in asked.futures:
            raise _disagreement(rank, write, min(asked.futures, default=rank), asked.write, layout)
        return asked.futures.setdefault(rank, Future())

    @property
    def ranks(self) -> frozenset[int]:
        """Who waits for a write."""
        return frozenset(self._asked.futures) if self._asked is not None else frozenset()

    def begin(self, world_size: int) -> tuple[int, Write] | None:
        """The write that all ranks have asked for, with its number, once."""
        asked = self._asked
        if asked is None or asked.begun or len(asked.futures) < world_size:
            return None
        asked.begun = True
        return asked.number, asked.write

    def told(self, owners: tuple[Future[None], ...]) -> None:
        """Owners, by index, are making it."""
        if self._asked is not None:
            self._asked.asked = owners

    def end(self) -> list[Future[None]]:
        """It is done, or will never be: the futures of those who asked."""
        asked, self._asked = self._asked, None
        return list(asked.futures.values()) if asked is not None else []

    def describe(self, layout: ModelLayout) -> str:
        """Who asks for what, in words."""
        return f"{have(sorted(self.ranks))} {self.action(layout)}"

    def action(self, layout: ModelLayout) -> str:
        """What those who ask have done."""
        assert self._asked is not None
        write = self._asked.write
        return f"written to {_what(write, layout)} at step {write.version}"

    def waits_for(self, layout: ModelLayout, world_size: int) -> str:
        """Who is waited for, for messages about waits."""
        missing = [rank for rank in range(world_size) if rank not in self.ranks]
        owners = () if self._asked is None else self._asked.asked
        return f"{self.describe(layout)}, {have(missing) if missing else owing(owners)} not"


def _what(write: Write, layout: ModelLayout) -> str:
    of = {COMPUTE: "", MASTER: "the masters of "}.get(write.kind, f"{write.kind} of ")
    return f"{of}{layout.units[write.unit].name!r}"


def _disagreement(rank: int, ours: Write, other: int, theirs: Write, layout: ModelLayout) -> StepMismatchError:
    both, step = f"rank {other} wrote to {_what(theirs, layout)}", f"at step {ours.version}"
    what = "other values" if _what(ours, layout) == _what(theirs, layout) else f"to {_what(ours, layout)}"
    return StepMismatchError(
        f"{both} and rank {rank} wrote {what} {step}; every rank must write the same values to the same parameters"
    )


# ---- at an owner ------------------------------------------------------------------------------------------------


class StagedWrites:
    """Values that wait for their write, and the writes that were made.

    Knows shards' memory; not who asked. ``make`` is called by the updater thread."""

    def __init__(self) -> None:
        self._staged: dict[int, tuple[int, str, Tensor]] = {}  # shard -> version, kind, values. freed by: make
        self._last: tuple[int, Future[None]] | None = None

    def stage(self, owned: OwnedShard, version: int, kind: str, values: Tensor) -> None:
        """Keep ``values`` (1D, the shard's elements) until they are written; a repeat replaces them."""
        if values.shape != owned.params.shape:
            raise StoreError(
                f"shard {owned.shard.index} of {owned.unit.name!r} has {owned.shard.numel} elements, got "
                f"{tuple(values.shape)}"
            )
        self._staged[owned.shard.index] = version, kind, values

    def once(self, number: int) -> tuple[Future[None], bool]:
        """The future of the write with this number, and whether it is new: a repeat is the same write."""
        if self._last is None or self._last[0] != number:
            self._last = number, Future()
            return self._last[1], True
        return self._last[1], False

    def make(self, write: Write, shards: Sequence[OwnedShard], rule: UpdateRule, future: Future[None]) -> None:
        """Change the unit's shards."""
        try:
            for owned in shards:
                self._make(write, owned, rule)
        except StoreError as exc:
            fail(future, exc)
        else:
            settle(future, None)

    def _make(self, write: Write, owned: OwnedShard, rule: UpdateRule) -> None:
        version, kind, values = self._staged.pop(owned.shard.index, (-1, "", owned.params))
        if (version, kind) != (write.version, write.kind) or owned.published != version:
            raise StoreError(
                f"{owned.unit.name!r} is at v{owned.published}: a write of {write.kind} at v{write.version} has no "
                f"values for shard {owned.shard.index}"
            )
        stamps = owned.stamps(version)
        with stamps.writing(0, owned.shard.numel) if stamps is not None else nullcontext():
            overwrite(owned, rule, kind, values)


def overwrite(owned: OwnedShard, rule: UpdateRule, kind: str, values: Tensor) -> None:
    """Put ``values`` (1D, the shard's elements; COMPUTE: the unit's dtype, else fp32) in place of what a shard has of
    ``kind``. Raises StoreError for a kind that it does not have."""
    if kind == COMPUTE and owned.master is not None and owned.master is not owned.params:
        kept = same_bits(values, owned.params)
        owned.fill(torch.where(kept, owned.master.cpu(), values.float()))
    elif kind == COMPUTE or (kind == MASTER and owned.master is not None):
        owned.fill(values)
    elif not owned.trainable:
        owned.read(kind)  # raises
    elif kind == GROUP:
        owned.groups = tuple(int(values[part.start]) for part in owned.slices)
        rule.regroup(owned)
    else:
        if kind == STEP:
            owned.steps = [int(values[part.start]) for part in owned.slices]
        rule.write(owned, kind, values)
