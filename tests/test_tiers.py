"""What the first tier leaves out is no value of any parameter."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from tiers import covering


def test_a_single_parameter_keeps_all_its_values() -> None:
    assert sorted(covering([["a"], ["b"], ["c"]])) == [0, 1, 2]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_each_value_of_each_parameter_is_there_and_no_more_cases_than_values(sizes: list[int]) -> None:
    cases = list(product(*([f"{at}:{value}" for value in range(size)] for at, size in enumerate(sizes))))
    chosen = covering(cases)
    assert {value for at in chosen for value in cases[at]} == {value for case in cases for value in case}
    assert max(sizes) <= len(chosen) <= sum(sizes)
    assert len(set(chosen)) == len(chosen)
