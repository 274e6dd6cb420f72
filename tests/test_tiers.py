"""What the first tier leaves out is no value of any parameter, each tier has what the one before has, and no test is in
no part."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from costs.parts import parts_of
from hypothesis import given
from hypothesis import strategies as st
from tiers import covering, further_seeds


def test_a_single_parameter_keeps_all_its_values() -> None:
    assert sorted(covering([["a"], ["b"], ["c"]])) == [0, 1, 2]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_each_value_of_each_parameter_is_there_and_no_more_cases_than_values(sizes: list[int]) -> None:
    cases = list(product(*([f"{at}:{value}" for value in range(size)] for at, size in enumerate(sizes))))
    chosen = covering(cases)
    assert {value for at in chosen for value in cases[at]} == {value for case in cases for value in case}
    assert max(sizes) <= len(chosen) <= sum(sizes)
    assert len(set(chosen)) == len(chosen)


def test_of_seeds_the_first_third_stays_for_each_value_of_the_other_parameters() -> None:
    way = object()
    cases = [{"seed": seed, "way": each} for each in (way, "other") for seed in range(4)]
    assert further_seeds(cases) == [2, 3, 6, 7]
    assert further_seeds([{"seed": seed, "ranks": seed + 1} for seed in range(3)]) == [], "each has its own ranks"


SPREAD = """
import pytest

@pytest.mark.spread(2, second=5)
@pytest.mark.parametrize("case", range(10))
def test_product(case):
    pass

@pytest.mark.parametrize("seed", range(3))
def test_seeds(seed):
    pass

@pytest.mark.soak
def test_long():
    pass
"""


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("options", "number"),
    [(["-m", "not thorough"], 2 + 1), ([], 5 + 1), (["--soak"], 10 + 3 + 1), (["--soak", "-m", "soak"], 5 + 2 + 1)],
    ids=["first", "second", "all three", "third alone"],
)
def test_each_tier_has_what_the_one_before_has_and_the_third_the_rest(
    options: list[str], number: int, tmp_path: Path
) -> None:
    file = tmp_path / "test_spread.py"
    file.write_text(SPREAD)
    root, path = Path(__file__).parents[1], {"PYTHONPATH": str(Path(__file__).parent)}
    pytest_here = [sys.executable, "-m", "pytest", "-c", str(root / "pyproject.toml"), "-p", "conftest"]
    said = subprocess.run(
        [*pytest_here, str(file), *options],
        cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert re.search(rf"^{number} passed", said.stdout, re.MULTILINE), said.stdout + said.stderr


THOROUGH = "pytestmark = [pytest.mark.thorough]"
FILES = {
    "tests/a/test_one.py": "",
    "tests/a/test_two.py": THOROUGH,
    "tests/a/test_three.py": THOROUGH,
    "tests/b/test_ray.py": "RAY = pytest.mark.ray",
    "tests/b/test_rays.py": THOROUGH + "\nRAY = pytest.mark.ray",
    "tests/hosts/test_hosts.py": "RAY = pytest.mark.ray",
    "tests/hosts/test_more.py": THOROUGH + "\nRAY = pytest.mark.ray",
}
WAITS = ("rays", "hosts")


def test_the_first_tier_has_no_file_that_is_in_the_second_alone() -> None:
    parts = parts_of(FILES, "first", 0, {})
    found = {file for files in parts.values() for file in files}
    assert found == {"tests/a/test_one.py", "tests/b/test_ray.py", "tests/hosts/test_hosts.py"}
    assert parts["rays"] == ["tests/b/test_ray.py"]
    assert parts["hosts"] == ["tests/hosts/test_hosts.py"]


def test_each_file_is_in_one_quarter_once_for_its_tests_with_ray_and_once_for_the_others() -> None:
    """What waits is divided among the quarters by its seconds, hosts and others together."""
    costs = {"tests/hosts/test_more.py": [0.0, 0.0, 0.0, 900.0], "tests/b/test_rays.py": [0.0, 0.0, 0.0, 800.0]}
    quarters = [parts_of(FILES, "quarter", number, costs) for number in range(4)]
    waiting = [parts["rays"] + parts["hosts"] for parts in quarters]
    computing = sorted(
        file for parts in quarters for name, files in parts.items() if name not in WAITS for file in files
    )
    assert sorted(file for files in waiting for file in files) == sorted(
        file for file, text in FILES.items() if "mark.ray" in text
    )
    assert computing == sorted(file for file in FILES if "hosts" not in file)
    assert ["tests/hosts/test_more.py"] in waiting
    assert ["tests/b/test_rays.py"] in waiting
    assert parts_of(FILES, "quarter", 5, costs) == quarters[1]
