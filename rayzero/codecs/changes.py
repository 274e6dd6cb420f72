"""What an update changed in a shard's published bytes: the 16-bit words that differ and what they are now.

[Note: positions] Bit i of a bitmap says whether word i changed. Of the bitmap only those bytes are kept that are not
zero; a bitmap of the bitmap says which, and of that again only those that are not zero, which a third one, kept whole,
says. Then come the changed words, ascending. Where 1 % of the words changed, spread evenly, that is 0.04 bytes a word;
where half did, 1.14; never more than 0.143 and 2 for each changed word.

[Note: the checksum] Both ends take it of the whole shard, which costs as much as reading it once: the owner when it has
packed a change, the follower when it has applied one. It finds damage and lost or misplaced changes, not malice.

[Note: a change as a record] To a copy on another host a shard's change travels as a record (codecs/record.py): how many
bytes it has, the checksum, the payload. A record of no more than the first number says that the shard follows whole.
"""

from __future__ import annotations

import struct
from ctypes import byref, c_int64
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from rayzero.codecs.record import LENGTH, used_bytes
from rayzero.errors import TransferError
from rayzero.kernels.native import load

Words = NDArray[np.uint16]
Bits = NDArray[np.uint8]
_HEAD = struct.Struct("<qQ")  # of a record


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
    payload: bytes | memoryview
    checksum: int  # of the whole shard, after it: 64 bits


def words_of(values: Tensor) -> Words:
    """A shard's bytes (1D, contiguous host memory, any dtype of an even number of bytes) as words; the same memory."""
    found: Any = values.detach().view(torch.int16).numpy()
    return found.view(np.uint16)  # type: ignore[no-any-return]


def checksum(values: Tensor) -> int:
    """xxh3_64 of a whole shard: see ``words_of``."""
    return int(xxhash.xxh3_64_intdigest(words_of(values).data))


def compare(was: Tensor, now: Tensor) -> Tensor:
    """Which words differ between two states of a shard: see ``AdamMemory.changed``."""
    return torch.from_numpy(np.packbits(words_of(was) != words_of(now), bitorder="little"))


def encode(values: Tensor, bitmap: Tensor | None) -> tuple[Form, bytes, int]:
    """The smallest form, its payload, and the number of changed words. ``values``: the shard after the update.
    ``bitmap``: see ``AdamMemory.changed``; None: of a shard that is noted whole."""
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


def apply(change: Change, values: Tensor) -> None:
    """Make a shard what it is after a change. ``values``: see ``words_of``.

    Raises TransferError if the checksum afterwards is not the change's: the payload is damaged, or the values were not
    those of its version before. They may be anything then."""
    words = words_of(values)
    if change.form is Form.WHOLE:
        if len(change.payload) != words.nbytes:
            raise _unfit(change, f"{len(change.payload):,} bytes instead of {words.nbytes:,}")
        words[:] = np.frombuffer(change.payload, np.uint16)
    elif change.form is Form.POSITIONS and not _unpack(change.payload, words):
        raise _unfit(change, f"its {len(change.payload):,} bytes do not say which of {len(words):,} words they are")
    if (found := checksum(values)) != change.checksum:
        raise _unfit(change, f"the checksum is {found:016x} instead of {change.checksum:016x}")


def _unpack(payload: bytes | memoryview, words: Words) -> bool:
    """Write what ``_packed`` has made to its places. False: it is not of as many words; some may be written."""
    packed = np.frombuffer(payload, np.uint8)
    if not isinstance(library := load(), str):
        at, size = words.ctypes.data, len(words)
        return bool(library.unpack(library.isa(), at, size, packed.ctypes.data, len(packed)))
    size = -(-len(words) // 8)
    above = -(-size // 8)
    at = -(-above // 8)
    level = packed[:at]
    for length in (above, size):
        there = _positions(level, length)
        kept = packed[at : at + len(there)]
        if len(kept) < len(there):
            return False
        level, at = np.zeros(length, np.uint8), at + len(there)
        level[there] = kept
    places = _positions(level, len(words))
    if len(packed) - at != 2 * len(places):
        return False
    words[places] = packed[at:].view(np.uint16)
    return True


def to_record(change: Change | None) -> bytes:
    """See [Note: a change as a record]. None: the shard follows whole."""
    if change is None:
        return _HEAD.pack(LENGTH, 0)[:LENGTH]
    return _HEAD.pack(_HEAD.size + len(change.payload), change.checksum) + change.payload


def room_for_record(values: Tensor) -> Tensor:
    """Memory for a record of a shard's change: 1D uint8. ``values``: the shard's."""
    return torch.empty(_HEAD.size + values.nbytes // 2, dtype=torch.uint8, device="cpu")


def apply_record(record: Tensor, before: int, after: int, values: Tensor) -> bool:
    """Make a shard of version ``before`` what it is at ``after``; see ``apply``. False: it follows whole."""
    used = used_bytes(record)
    if used < _HEAD.size:
        return False
    content = record[:used].numpy().data
    payload = content[_HEAD.size :]
    form = Form.POSITIONS if len(payload) else Form.NOTHING
    _, found = _HEAD.unpack_from(content)
    apply(Change(before=before, after=after, form=form, payload=payload, checksum=found), values)
    return True


def _unfit(change: Change, why: str) -> TransferError:
    return TransferError(f"the change v{change.before} -> v{change.after} of a shard does not fit: {why}")
