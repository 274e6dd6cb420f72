"""What an update changed, encoded and applied again, is what it changed, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayzero.codecs import changes
from rayzero.codecs.changes import Change, Form, apply, carried, checksum, compare, encode, words_of
from rayzero.errors import TransferError

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def shard(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, NaNs among them."""
    words = count * dtype.itemsize // 2
    bits = np.random.default_rng(seed).integers(0, 1 << 16, words, dtype=np.uint16)
    return torch.from_numpy(bits.view(np.int16)).view(dtype)


def changed(values: Tensor, share: float, seed: int) -> Tensor:
    """With other bits in about a share of the words."""
    new = values.clone()
    words = words_of(new)
    at = np.random.default_rng(seed).random(len(words)) < share
    words[at] ^= np.random.default_rng(seed + 1).integers(1, 1 << 16, int(at.sum()), dtype=np.uint16)
    return new


def change_of(was: Tensor, now: Tensor) -> Change:
    noted = compare(was, now)
    form, payload, _ = encode(now, noted.bitmap)
    after = carried(checksum(was), *noted.sums.tolist())
    return Change(before=3, after=4, form=form, payload=payload, checksum=after)


@pytest.fixture(params=["native", "numpy"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(changes, "load", lambda: "not here")


@given(
    st.integers(1, 40).map(lambda rows: rows * 64) | st.integers(1, 300),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 1e-3, 0.01, 0.1, 0.5, 0.94, 1.0]),
    st.integers(0, 1 << 30),
)
def test_a_change_makes_of_what_was_what_is_in_the_fewest_bytes(
    count: int, dtype: torch.dtype, share: float, seed: int
) -> None:
    was = shard(count, dtype, seed)
    now = changed(was, share, seed)
    change, values = change_of(was, now), was.clone()
    assert change.checksum == checksum(now)
    assert len(change.payload) <= now.nbytes
    apply(change, values, checksum(was) if seed % 2 else None)
    assert np.array_equal(words_of(values), words_of(now))


@pytest.mark.parametrize("count", [1, 64, 4097, 40_000])
def test_every_instruction_set_and_numpy_make_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    was = shard(count, torch.bfloat16, 1)
    cases = [changed(was, share, 2) for share in (0.0, 0.01, 0.3, 1.0)]
    found = [[change_of(was, now) for now in cases]]
    library = changes.load()
    if not isinstance(library, str):
        monkeypatch.setattr(library, "isas", library.isas[:1])
        found.append([change_of(was, now) for now in cases])
    monkeypatch.setattr(changes, "load", lambda: "not here")
    assert found == [[change_of(was, now) for now in cases]] * len(found)


@pytest.mark.usefixtures("library")
def test_a_shard_is_checked_from_its_first_word_to_its_last() -> None:
    """Also a word that is at another place, and with weights that do not fit 32 bits of a product."""
    values = shard(100_000, torch.bfloat16, 1)
    words = words_of(values).astype(object)
    plain, weighted = sum(words), sum((2 * i + 1) * word for i, word in enumerate(words))
    assert checksum(values) == plain % 2**32 + (weighted % 2**32 << 32)
    swapped = values.clone()
    swapped[[0, 99_999]] = values[[99_999, 0]]
    assert checksum(swapped) != checksum(values)


@pytest.mark.parametrize(("share", "most"), [(0.0, 0.0), (1e-3, 0.0062), (0.01, 0.04), (0.5, 1.15), (1.0, 2.0)])
def test_a_change_takes_the_bytes_that_the_note_says(share: float, most: float) -> None:
    was = shard(1 << 18, torch.bfloat16, 1)
    assert len(change_of(was, changed(was, share, 2)).payload) <= most * len(was)


SPOILT = {
    "cut": lambda change: replace(change, payload=change.payload[:-2]),
    "cut in the bitmap": lambda change: replace(change, payload=change.payload[:3]),
    "empty": lambda change: replace(change, payload=b""),
    "longer": lambda change: replace(change, payload=change.payload + b"  "),
    "a word": lambda change: replace(change, payload=change.payload[:-1] + bytes([change.payload[-1] ^ 1])),
    "the checksum": lambda change: replace(change, checksum=change.checksum ^ 1),
    "another form": lambda change: replace(change, form=Form.NOTHING),
}


@pytest.mark.parametrize("share", [0.01, 1.0])
@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(spoilt: str, share: float) -> None:
    was = shard(6400, torch.bfloat16, 1)
    change, values = change_of(was, changed(was, share, 2)), was.clone()
    with pytest.raises(TransferError, match=r"v3 -> v4 of a shard does not fit: "):
        apply(SPOILT[spoilt](change), values)
    assert np.array_equal(words_of(values), words_of(was))


def test_a_change_of_other_values_is_refused() -> None:
    was = shard(6400, torch.bfloat16, 1)
    change, other = change_of(was, changed(was, 0.1, 2)), changed(was, 0.01, 3)
    with pytest.raises(TransferError, match="the checksum would be"):
        apply(change, other)
