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
from rayzero.codecs.changes import Change, Form, apply, checksum, compare, encode, words_of
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
    form, payload, _ = encode(now, compare(was, now))
    return Change(before=3, after=4, form=form, payload=payload, checksum=checksum(now))


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
    assert len(change.payload) <= now.nbytes
    apply(change, values)
    assert np.array_equal(words_of(values), words_of(now))


@pytest.mark.parametrize("count", [1, 64, 4097, 40_000])
def test_every_instruction_set_and_numpy_make_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    was = shard(count, torch.bfloat16, 1)
    cases = [changed(was, share, 2) for share in (0.0, 0.01, 0.3, 1.0)]

    def made_and_applied() -> list[Change]:
        found = [change_of(was, now) for now in cases]
        for change, now in zip(found, cases, strict=True):
            values = was.clone()
            apply(change, values)
            assert np.array_equal(words_of(values), words_of(now))
        return found

    found = [made_and_applied()]
    library = changes.load()
    if not isinstance(library, str):
        monkeypatch.setattr(library, "isas", library.isas[:1])
        found.append(made_and_applied())
    monkeypatch.setattr(changes, "load", lambda: "not here")
    assert found == [made_and_applied()] * len(found)


@pytest.mark.skipif(isinstance(changes.load(), str), reason="the native library is not built here")
@given(st.integers(1, 700), st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.data())
def test_bytes_that_are_no_payload_write_nowhere_else(count: int, share: float, data: st.DataObject) -> None:
    was = shard(count, torch.bfloat16, 1)
    spoilt = bytearray(changes._packed(words_of(was), compare(was, changed(was, share, 2)).numpy())[0].tobytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(spoilt) - 1))
        spoilt[at] = data.draw(st.integers(0, 255))
    payload = bytes(spoilt[: data.draw(st.integers(0, len(spoilt)))]) if data.draw(st.booleans()) else bytes(spoilt)
    around = np.zeros(count + 2048, np.uint16)
    changes._unpack(payload, around[1024 : 1024 + count])
    assert not around[:1024].any()
    assert not around[1024 + count :].any()


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


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("share", [0.01, 1.0])
@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_does_not_fit_is_refused_by_name(spoilt: str, share: float) -> None:
    was = shard(6400, torch.bfloat16, 1)
    change, values = change_of(was, changed(was, share, 2)), was.clone()
    with pytest.raises(TransferError, match=r"v3 -> v4 of a shard does not fit: "):
        apply(SPOILT[spoilt](change), values)


def test_a_change_of_other_values_is_refused() -> None:
    was = shard(6400, torch.bfloat16, 1)
    change, other = change_of(was, changed(was, 0.1, 2)), changed(was, 0.01, 3)
    with pytest.raises(TransferError, match="the checksum is"):
        apply(change, other)
