"""A loop's state in a checkpoint: what comes back equals what was saved, types included."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayzero.checkpoint.state_values import is_packable, pack, unpack
from rayzero.errors import CheckpointError

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_KEYS = (
    st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.sampled_from(["~tuple", "~items", "~tensor"])
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=3)
        | st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    packed, tensors = pack(state)
    return unpack(json.loads(json.dumps(packed)), tensors)


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(types(key), types(item)) for key, item in value.items()]
    return (type(value), [types(item) for item in value]) if isinstance(value, list | tuple) else type(value)


@given(st.dictionaries(st.text(), _VALUES, max_size=4))
def test_values_come_back_equal_and_of_their_types(state: dict[str, Any]) -> None:
    back = through_json(state)
    assert back == state
    assert types(back) == types(state)


def test_tensors_come_back_with_dtype_shape_and_bits() -> None:
    state = {
        "ema": OrderedDict(weight=torch.randn(3, 2).t(), count=torch.tensor(7)),
        "pair": (torch.tensor(1.5, dtype=torch.bfloat16), [torch.arange(3)]),
    }
    back = through_json(state)
    assert isinstance(back["pair"], tuple)
    pairs: list[tuple[Tensor, Tensor]] = [
        (back["ema"]["weight"], state["ema"]["weight"]),
        (back["ema"]["count"], state["ema"]["count"]),
        (back["pair"][0], state["pair"][0]),
        (back["pair"][1][0], state["pair"][1][0]),
    ]
    for got, given_ in pairs:
        assert got.dtype == given_.dtype
        assert torch.equal(got, given_)


def test_infinite_numbers_are_kept() -> None:
    back = through_json({"best": -math.inf, "worst": math.inf, "none": math.nan})
    assert (back["best"], back["worst"]) == (-math.inf, math.inf)
    assert math.isnan(back["none"])


def flat(value: Any) -> list[Tensor]:
    """The tensors of a nested value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in (value.values() if isinstance(value, dict) else value) for tensor in flat(item)]


def test_places_that_read_alike_keep_their_own_tensors() -> None:
    one, two, three = (torch.full((2,), float(i)) for i in range(3))
    for state in (
        {"a.b": one, "a": {"b": two}},
        {"x": [one, three], "x[0]": two, "x[1]": three},
        {"m": {"x": {0: one}, "x[0]": two}},
        {"a": {1: {"b": one}}, "a[1].b": two},
    ):
        packed, tensors = pack(state)
        back = unpack(json.loads(json.dumps(packed)), tensors)
        assert [t.tolist() for t in flat(back)] == [t.tolist() for t in flat(state)]


def test_views_of_complex_numbers_are_kept_and_tensors_without_plain_memory_are_named() -> None:
    number = torch.tensor([1 + 2j])
    back = through_json({"conj": number.conj(), "imag": number.conj().imag})
    assert back["conj"].item() == 1 - 2j
    assert back["imag"].item() == -2
    for value in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(CheckpointError, match=r"x\[0\] is a .* tensor, which a checkpoint cannot keep"):
            pack({"x": [value]})


def test_what_is_not_kept_is_named_by_its_place() -> None:
    endless: list[Any] = []
    endless.append(endless)
    wrong = [
        ({"a": {"b": [1, Path("x")]}}, r"a\.b\[1\] is a pathlib\.PosixPath"),
        ({"f": {3: print}}, r"f\[3\] is a builtins\.builtin_function"),
        ({"s": {1, 2}}, r"s is a builtins\.set"),
        ({"deep": endless}, r"deep.* nested more than 100 deep, or contains itself"),
    ]
    for state, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            pack(state)
        assert not is_packable(state)


@pytest.mark.parametrize("packed", [{"a": {"~tensor": "gone"}}, {"a": {"~tuple": 3}}, {"a": {"~items": [[1]]}}])
def test_a_damaged_mark_is_named(packed: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="damaged at"):
        unpack(packed, {})
