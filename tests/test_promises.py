"""Every cell of the table of promises has a test in the first tier."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from costs.parts import is_thorough
from promises import CANNOT_BREAK, MECHANISMS, PROMISES

TESTS = Path(__file__).parent

Cell = tuple[str, str]  # promise, mechanism


def marks(decorators: list[ast.expr]) -> dict[str, list[list[str]]]:
    """Name of a mark -> the texts that each use of it has as arguments."""
    found: dict[str, list[list[str]]] = defaultdict(list)
    for decorator in decorators:
        call = decorator if isinstance(decorator, ast.Call) else None
        name = ast.unparse(call.func if call else decorator)
        arguments = call.args if call else []
        if name.startswith("pytest.mark."):
            texts = [one.value for one in arguments if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            found[name.removeprefix("pytest.mark.")].append(texts)
    return found


def held(source: str) -> set[Cell]:
    """The cells that the tests of one file hold in the first tier."""
    if "mark.promise" not in source or is_thorough(source):
        return set()
    cells: set[Cell] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            of = marks(node.decorator_list)
            if "thorough" not in of:
                cells |= {(promise, by) for promise, *mechanisms in of["promise"] for by in mechanisms}
    return cells


@pytest.fixture(scope="module")
def found() -> set[Cell]:
    """The cells that some test holds."""
    return {cell for file in TESTS.rglob("test_*.py") for cell in held(file.read_text())}


@pytest.mark.parametrize("promise", PROMISES)
def test_each_mechanism_has_a_test_or_a_reason_why_it_needs_none(promise: str, found: set[Cell]) -> None:
    held_by = {mechanism for of, mechanism in found if of == promise}
    excused = set(CANNOT_BREAK.get(promise, {}))
    assert held_by & excused == set(), "what has a test needs no reason"
    assert held_by | excused == set(MECHANISMS)


def test_marks_name_what_is_in_the_table(found: set[Cell]) -> None:
    assert {cell for cell in found if cell[0] not in PROMISES or cell[1] not in MECHANISMS} == set()


def test_a_test_of_the_second_tier_holds_nothing() -> None:
    marked = '@pytest.mark.promise("exact", "hosts", "tls")\ndef test_a() -> None: ...\n'
    assert held(marked) == {("exact", "hosts"), ("exact", "tls")}
    assert held("@pytest.mark.thorough\n" + marked) == set()
    assert held("pytestmark = [pytest.mark.ray, pytest.mark.thorough]\n" + marked) == set()
