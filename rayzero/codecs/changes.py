"""What an update changed in a shard's published bytes: the 16-bit words that differ and what they are now.

[Note: positions] Bit i of a bitmap says whether word i changed. Of the bitmap only those bytes are kept that are not
zero; a bitmap of the bitmap says which, and of that again only those that are not zero, which a third one, kept whole,
says. Then come the changed words, ascending. Where 1 % of the words changed, spread evenly, that is 0.04 bytes a word;
where half did, 1.14; never more than 0.143 and 2 for each changed word.

[Note: the checksum] Two sums mod 2^32 over a shard's words: the upper half has the words, each times 2 i + 1, the lower
one the plain words. Both are linear: from what a word was and is, they are carried on by the difference, so that an
update need not read what it does not change. They find damage and lost or misplaced changes, not malice.
"""

from __future__ import annotations

from ctypes import byref, c_int64
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayzero.errors import TransferError
from rayzero.kernels import Changed
from rayzero.kernels.native import load

Words = NDArray[np.uint16]
Bits = NDArray[np.uint8]

_HALF = (1 << 32) - 1
_ROW = 1 << 14  # words that are summed at once: their products with weights are exact in fp64
_WEIGHTS = np.arange(1, 2 * _ROW, 2, dtype=np.float64)


class Form(StrEnum):
    """What a change's payload is."""

    NOTHING = "nothing"  # empty: every word stayed
    POSITIONS = "positions"  # [Note: positions]
    WHOLE = "whole"  # all words as they are now


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Makes version ``after`` of one shard out of any version from ``before`` up to it."""

    before: int
    after: int
    form: Form
    payload: bytes
    checksum: int  # of the whole shard, after it: 64 bits


def words_of(values: Tensor) -> Words:
    """A shard's bytes (1D, contiguous host memory, any dtype of an even number of bytes) as words; the same memory."""
    found: Any = values.detach().view(torch.int16).numpy()
    return found.view(np.uint16)  # type: ignore[no-any-return]


def checksum(values: Tensor) -> int:
    """The checksum of a whole shard: see ``words_of``."""
    return _checksum(words_of(values))


def _checksum(words: Words) -> int:
    if not isinstance(library := load(), str):
        return int(library.checksum(words.ctypes.data, len(words)))
    plain = weighted = 0
    for start in range(0, len(words), _ROW):
        row = words[start : start + _ROW].astype(np.float64)
        total = int(row.sum())
        plain += total
        weighted += 2 * start * total + int(row @ _WEIGHTS[: len(row)])
    return carried(0, plain, weighted)


def carried(checksum: int, plain: int, weighted: int) -> int:
    """The checksum after sums of differences: of the words, and of each times 2 i + 1."""
    return (checksum + plain) & _HALF | ((checksum >> 32) + weighted & _HALF) << 32


def compare(was: Tensor, now: Tensor, had: int | None = None) -> Changed:
    """What differs between two states of a shard. ``had``: the checksum of ``was``; None: it is summed up here."""
    bitmap = torch.from_numpy(np.packbits(words_of(was) != words_of(now), bitorder="little"))
    before, after = checksum(was) if had is None else had, checksum(now)
    sums = (after & _HALF) - (before & _HALF), (after >> 32) - (before >> 32)
    return Changed(bitmap, torch.tensor(sums, dtype=torch.int64, device="cpu"))


def encode(values: Tensor, bitmap: Tensor | None) -> tuple[Form, bytes, int]:
    """The smallest form, its payload, and the number of changed words. ``values``: the shard after the update.
    ``bitmap``: see ``Changed``; None: of a shard that is noted whole."""
    words = words_of(values)
    if bitmap is None:
        return Form.WHOLE, words.tobytes(), len(words)
    packed, changed = _packed(words, bitmap.numpy())
    if not changed:
        return Form.NOTHING, b"", 0
    if len(packed) >= words.nbytes:
        return Form.WHOLE, words.tobytes(), changed
    return Form.POSITIONS, packed.tobytes(), changed


def _packed(words: Words, bitmap: Bits) -> tuple[Bits, int]:
    """The payload of ``POSITIONS``, and how many words it has."""
    if isinstance(library := load(), str):
        middle = np.packbits(bitmap != 0, bitorder="little")
        top = np.packbits(middle != 0, bitorder="little")
        changed = words[_positions(bitmap, len(words))]
        kept = [top, middle[middle != 0], bitmap[bitmap != 0], changed.view(np.uint8)]
        return np.concatenate(kept), len(changed)
    middle, out = np.empty(len(bitmap) // 8 + 1, np.uint8), np.empty(words.nbytes + 2 * len(bitmap) + 64, np.uint8)
    arrays, found = [each.ctypes.data for each in (words, bitmap, middle, out)], c_int64()
    size = library.pack(library.isa(), *arrays[:2], len(words), *arrays[2:], byref(found))
    return out[:size], found.value


def _positions(bitmap: Bits, count: int) -> NDArray[np.int64]:
    """The indices of the bits that are set, of the first ``count``."""
    return np.flatnonzero(np.unpackbits(bitmap, count=count, bitorder="little"))


def apply(change: Change, values: Tensor, had: int | None = None) -> None:
    """Make a shard what it is after a change. ``values``: see ``words_of``. ``had``: their checksum, which a change of
    nothing needs; None: it is summed up here.

    Raises TransferError, before a word is written, if the checksum afterwards would not be the change's: the payload is
    damaged, or the values are not those of its version before."""
    words = words_of(values)
    if change.form is Form.NOTHING:
        _check(change, _checksum(words) if had is None else had)
        return
    if change.form is Form.WHOLE:
        if len(change.payload) != words.nbytes:
            raise _unfit(change, f"{len(change.payload):,} bytes instead of {words.nbytes:,}")
        new = np.frombuffer(change.payload, np.uint16)
    else:
        new, (places, changed) = words.copy(), _read(change, len(words))
        new[places] = changed
    _check(change, _checksum(new))
    words[:] = new


def _read(change: Change, count: int) -> tuple[NDArray[np.bool_], Words]:
    """Which words a payload changes, and what they become."""
    size = -(-count // 8)
    above = -(-size // 8)
    payload, at = np.frombuffer(change.payload, np.uint8), -(-above // 8)
    level = payload[:at]
    for length in (above, size):
        there = _positions(level, length)
        kept = payload[at : at + len(there)]
        if len(kept) < len(there):
            raise _unfit(change, "its bitmap is cut")
        level, at = np.zeros(length, np.uint8), at + len(there)
        level[there] = kept
    places = np.unpackbits(level, count=count, bitorder="little").view(np.bool_)
    changed = int(np.count_nonzero(places))
    if len(payload) - at != 2 * changed:
        raise _unfit(change, f"{len(payload) - at:,} bytes for {changed:,} words")
    return places, np.frombuffer(change.payload, np.uint16, offset=at)


def _check(change: Change, found: int) -> None:
    if found != change.checksum:
        raise _unfit(change, f"the checksum would be {found:016x} instead of {change.checksum:016x}")


def _unfit(change: Change, why: str) -> TransferError:
    return TransferError(f"the change v{change.before} -> v{change.after} of a shard does not fit: {why}")
