"""The kernel protocol: Adam over a table of segments of one shard, in one pass over memory.

Tile stamps say which version each tile's bytes have; an undo log keeps what the native kernel is about to overwrite.
So an update whose process was killed can be called again, in another process, and is then whole.

[Note: killed between two instructions] A stamp is marked as being written before the tile's first byte changes, and as
whole after its last one has. Stamps are read after the writer's death, when every instruction before that point has
taken effect and none after it, so program order is enough.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import ConfigError, StateLostError, UnsupportedError
from rayzero.kernels.moments import CODED, CodedMoment
from rayzero.kernels.split_master import Moment
from rayzero.layout.model_layout import ALIGN
from rayzero.protocol.gradient_sum import Gradient

STAMP = 1 << 15  # elements of a stamp's tile; a thread of the native kernel claims as many at once
STAMP_BYTES = 8
UNDO_BYTES = 2240  # an entry of the undo log, one for each thread: ENTRY_BYTES in native/adam.c


@dataclass(frozen=True, slots=True)
class UndoCopy:
    """What one shard was before an update that overwrites it all at once.

    [Note: undo copy] A torch class says nothing of the order in which it writes. So masters and states are copied
    first, and the copy is stamped when it is whole; the tiles are marked as being written only then. If the process
    dies, its successor copies all of it back, and the same call makes the update anew."""

    words: Tensor  # 1D int64, two: the stamp of the update (0: the copy is not whole) and the shard's first tile
    memory: Tensor  # 1D uint8, as large as the largest shard with its states

    def keep(self, stamp: int, first: int, tensors: Sequence[Tensor]) -> None:
        """Copy a shard's tensors, 1D each."""
        self.words[0] = 0
        for tensor, kept in self._places(tensors):
            kept.copy_(tensor)
        self.words[1] = first
        self.words[0] = stamp

    def bring_back(self, stamp: int, first: int, tensors: Sequence[Tensor]) -> bool:
        """Copy them back, if they are of this update. Returns whether they are."""
        if self.words.tolist() != [stamp, first]:
            return False
        for tensor, kept in self._places(tensors):
            tensor.copy_(kept)
        return True

    def _places(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        at = 0
        for tensor in tensors:
            flat = tensor.view(torch.uint8)
            yield flat, self.memory[at : at + flat.numel()]
            at += flat.numel()


@dataclass(frozen=True, slots=True)
class TileStamps:
    """The stamps of one shard during one update."""

    words: Tensor  # 1D int64, one for every STAMP elements of the shard; the last may be for fewer
    version: int  # the version that the update makes, from 1
    first: int = 0  # number of the first among all stamps that share the undo log
    undo: Tensor | None = None  # uint8, (entries, UNDO_BYTES); only the native kernel uses it
    copy: UndoCopy | None = None  # of updates that overwrite a shard at once

    @property
    def whole(self) -> int:
        """A tile's stamp when all its bytes have the version. While they are being written, it is one less, and odd."""
        return 2 * self.version

    def are_whole(self, start: int, stop: int) -> bool:
        """Whether a process that died has made elements ``[start, stop)`` of this version. Raises StateLostError if it
        was just writing them: without the undo log nobody knows what they are."""
        words = self.words[start // STAMP : -(-stop // STAMP)].tolist()
        if any(word == self.whole - 1 for word in words):
            raise StateLostError(
                f"v{self.version} was being written when its process died, and only kernel='native' has an undo log: "
                "resume from a checkpoint"
            )
        return all(word == self.whole for word in words)

    def undone(self, tensors: Sequence[Tensor]) -> bool:
        """Let a shard's ``tensors`` be again what they were before the update, if a process has died in the middle of
        it. Returns whether one has."""
        cut = self.copy is not None and any(word == self.whole - 1 for word in self.words.tolist())
        if not cut or self.copy is None or not self.copy.bring_back(self.whole, self.first, tensors):
            return False
        self.words.fill_(self.whole - 2)
        return True

    @contextmanager
    def overwriting(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """``writing`` of all of a shard, whose ``tensors`` are kept before. See [Note: undo copy]."""
        if self.copy is not None:
            self.copy.keep(self.whole, self.first, tensors)
        with self.writing(0, self.words.numel() * STAMP):
            yield

    @contextmanager
    def writing(self, start: int, stop: int) -> Iterator[None]:
        """Stamp the writes to elements ``[start, stop)`` inside this context. ``start`` is a multiple of STAMP, and
        ``stop`` is one too, or the shard's end."""
        words = self.words[start // STAMP : -(-stop // STAMP)]
        words.fill_(self.whole - 1)
        yield
        words.fill_(self.whole)  # not after an error, because then the bytes have no version


def torn(words: Iterable[int]) -> list[int]:
    """The tiles that were being written."""
    return [index for index, word in enumerate(words) if word % 2]


ADAMS = (torch.optim.Adam, torch.optim.AdamW)  # what kernels compute; a subclass may compute something else


def adam_states(*, amsgrad: bool) -> tuple[str, ...]:
    """The names of the states that Adam keeps for each element."""
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]


def check_moments(moments: str, optimizer: type[torch.optim.Optimizer], groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise UnsupportedError, saying what to use, unless an optimizer with these parameter groups can keep its moments
    so."""
    if moments not in CODED:
        return
    if optimizer not in ADAMS:
        name = optimizer.__qualname__
        raise UnsupportedError(f"moments={moments!r} is for Adam and AdamW, not for {name}; use moments='fp32'")
    if any(group.get("amsgrad") for group in groups):
        raise UnsupportedError(f"moments={moments!r} does not work with amsgrad=True; use moments='fp32'")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamOptions:
    """One parameter group's Adam or AdamW options. Raises ConfigError if one is out of range."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool = False
    maximize: bool = False
    decoupled: bool = True  # True: AdamW's decay of the weights; False: Adam's L2 term in the gradient

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta1 < 1.0 or not 0.0 <= self.beta2 < 1.0:
            raise ConfigError(f"betas must be in [0, 1), got ({self.beta1}, {self.beta2})")
        if self.eps < 0.0 or self.lr < 0.0 or self.weight_decay < 0.0:
            raise ConfigError(
                f"lr, eps and weight_decay must be >= 0, got lr={self.lr}, eps={self.eps}, "
                f"weight_decay={self.weight_decay}"
            )

    @classmethod
    def from_hyper(cls, hyper: dict[str, Any], *, decoupled: bool) -> AdamOptions:
        """Read a torch parameter group. ``decoupled``: the class's own choice, if the group does not say.

        ``foreach``, ``fused`` and ``capturable`` only choose among torch's implementations and are not read.
        Raises UnsupportedError for ``differentiable=True``."""
        if hyper.get("differentiable"):
            raise UnsupportedError(
                "differentiable=True of the optimizer is not supported: owners update outside of autograd; leave it out"
            )
        beta1, beta2 = hyper["betas"]
        return cls(
            lr=float(hyper["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(hyper["eps"]),
            weight_decay=float(hyper["weight_decay"]),
            amsgrad=bool(hyper.get("amsgrad", False)),
            maximize=bool(hyper.get("maximize", False)),
            decoupled=bool(hyper.get("decoupled_weight_decay", decoupled)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of a shard with the same options, ranks and step count. Its offset and length are multiples of ``ALIGN``,
    so that kernels need no tail."""

    offset: int  # elements from the shard's start
    length: int  # elements, padding included
    ranks: tuple[int, ...]  # ranks with gradients for it, ascending
    options: AdamOptions
    step: int  # updates including this one, from 1

    def __post_init__(self) -> None:
        assert self.offset % ALIGN == 0, self.offset
        assert self.length % ALIGN == 0, self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamMemory:
    """One shard's tensors, all 1D with the shard's padded number of elements."""

    master: Tensor  # fp32; for the native kernel also int16: what masters are beyond params (split_master.py)
    exp_avg: Tensor  # fp32, or codes
    exp_avg_sq: Tensor  # fp32, or codes of its root
    max_exp_avg_sq: Tensor | None  # fp32, with amsgrad
    params: Tensor | None  # published parameters, in the unit's dtype; None: the master itself is published
    stamps: TileStamps | None = None  # set tile by tile; None: the memory does not outlive the process
    scales: tuple[Tensor, Tensor] | None = None  # of exp_avg and exp_avg_sq where these are codes: kernels/moments.py
    # 1D uint8, of a kernel that ``notes``: bit i % 8 of byte i // 8 says whether element i of params changes, where a
    # segment is; params are 16-bit, and what the master was rounded to
    changed: Tensor | None = None

    @classmethod
    def over(
        cls,
        master: Tensor,
        moments: Mapping[str, Moment],
        params: Tensor | None,
        stamps: TileStamps | None = None,
        changed: Tensor | None = None,
    ) -> AdamMemory:
        """``moments``: by their names in torch, with or without "max_exp_avg_sq". ``params``: may be the master."""
        kept = {kind: each.tensors[0] for kind, each in moments.items()}
        scales = [each.scales for each in (moments["exp_avg"], moments["exp_avg_sq"]) if isinstance(each, CodedMoment)]
        return cls(
            master=master,
            exp_avg=kept["exp_avg"],
            exp_avg_sq=kept["exp_avg_sq"],
            max_exp_avg_sq=kept.get("max_exp_avg_sq"),
            params=None if params is master else params,
            stamps=stamps,
            scales=(scales[0], scales[1]) if scales else None,
            changed=changed,
        )

    @property
    def coded(self) -> tuple[CodedMoment, CodedMoment] | None:
        """exp_avg and exp_avg_sq where these are codes."""
        if self.scales is None:
            return None
        mean, square = self.scales
        return CodedMoment(self.exp_avg, mean, is_root=False), CodedMoment(self.exp_avg_sq, square, is_root=True)


@dataclass(frozen=True, slots=True)
class AdamUpdate:
    """The arguments of ``Kernel.update``."""

    memory: AdamMemory
    gradients: Sequence[Gradient]
    segments: Sequence[Segment]
    scale: float
    on_tile: Callable[[int, int], None]
    limit: float


class Kernel(ABC):
    """Computes the update of a shard. An instance belongs to one thread and has its own scratch memory."""

    name: str
    notes = False  # whether it fills ``AdamMemory.changed``

    def update(
        self,
        memory: AdamMemory,
        gradients: Sequence[Gradient],
        segments: Sequence[Segment],
        scale: float,
        on_tile: Callable[[int, int], None],
        *,
        limit: float = math.inf,
    ) -> None:
        """Sum the ranks' gradients, multiply by ``scale``, clamp every element to within +-``limit``, run Adam, and
        write the published parameters.

        ``gradients``: by rank, 1D with the shard's elements, fp32, bf16 or fp16. Only the ranks and ranges that
        segments name are read, and nothing is written to them. Of scattered ones no segment has two parameters.
        ``on_tile(done, total)``: called after each tile.
        """
        self.run(AdamUpdate(memory, gradients, segments, scale, on_tile, limit))

    @abstractmethod
    def run(self, update: AdamUpdate) -> None:
        """See ``update``."""


def segments_of(
    parts: Iterable[tuple[int, int, tuple[int, ...], int, int]], options: Sequence[AdamOptions], *, apart: bool = False
) -> list[Segment]:
    """The segments of ``parts``, which are (offset, length, ranks, group, step) in ascending order. ``options``: those
    of each group. ``apart``: each part is a segment of its own.

    Neighbours that are updated alike become one segment, so that thousands of small parameters become a few segments.
    Parts without elements or ranks are left out."""
    runs: list[tuple[int, int, tuple[tuple[int, ...], int, int]]] = []  # start, end, what is alike
    for offset, length, ranks, group, step in parts:
        if not length or not ranks:
            continue
        alike = ranks, group, step
        if runs and not apart and runs[-1][1:] == (offset, alike):
            runs[-1] = runs[-1][0], offset + length, alike
        else:
            runs.append((offset, offset + length, alike))
    return [
        Segment(offset=start, length=end - start, ranks=ranks, options=options[group], step=step)
        for start, end, (ranks, group, step) in runs
    ]
